"""``python -m sp_core``: see :mod:`.cli`."""

import signal
import sys

from .cli import main

if __name__ == "__main__":
    # asked to end, a command still ends its workers and deletes its files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
