"""SP_CAMPAIGN=1: the full counts of the long tests, and every device count."""

import os

CAMPAIGN = os.environ.get("SP_CAMPAIGN", "") not in ("", "0")
