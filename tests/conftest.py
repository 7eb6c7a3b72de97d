"""Which variations a plain run leaves to a campaign (``SP_CAMPAIGN=1``), so that it ends within a quarter of an hour on two cores.

A case is never left out, only some of its device counts: those that start many workers, or
that repeat on other counts what three and four ranks show.
"""

from __future__ import annotations

import re

import pytest
from campaign import CAMPAIGN

#: (file, parameters that a campaign adds)
LEFT_OUT = tuple(
    (file, re.compile(pattern))
    for file, pattern in (
        ("distributed/test_collective_transport.py", r"\[(4|6|7|9)\]"),
        ("distributed/test_attention.py", r"\[6\]"),
        ("host/test_wan_family.py", r"face_moves_a_tile\[cpu:(2|4)\]"),
        ("host/test_faults.py", r"on_ctrl_c$"),
        ("host/test_longcat_ranks.py", r"\[(2-|6)"),
        ("host/test_comfy_api.py", r"\[ComfyUI-0"),
    )
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CAMPAIGN:
        return
    left_out = [item for item in items if _is_for_a_campaign(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_for_a_campaign(item: pytest.Item) -> bool:
    path = item.path.as_posix()
    return any(path.endswith(f"/tests/{file}") and pattern.search(item.name) for file, pattern in LEFT_OUT)
