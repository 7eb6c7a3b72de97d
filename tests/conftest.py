"""What holds for all tests: a plain run leaves out what is marked ``campaign``, so that it ends in time on two cores.

A test is never left out whole where a part of it can stay: a campaign adds device counts that start many workers,
or that repeat what three and four ranks have shown.
"""

from __future__ import annotations

import pytest
from campaign import CAMPAIGN


def pytest_configure(config: pytest.Config) -> None:
    options = config.getini("addopts")
    plain = options[options.index("-m") + 1]
    if CAMPAIGN and config.option.markexpr == plain:  # another -m on the command line is kept
        config.option.markexpr = ""
