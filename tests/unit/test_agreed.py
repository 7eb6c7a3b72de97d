"""What ranks make of each other's reasons not to compile."""

from __future__ import annotations

import pytest

from sp_core.host.worker.agreed import Reason, united

MASK, RING = Reason("a mask", 0), Reason("a ring", 0)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([{}, {}], {}),
        ([{"": MASK}, {"": MASK._replace(rank=1)}], {"": "a mask"}),
        ([{}, {"": MASK._replace(rank=1)}], {"": "a mask (on rank 1)"}),
        ([{"": MASK}, {"": RING._replace(rank=1)}], {"": "a mask (on rank 0)"}),
        ([{"block": MASK}, {"other": RING._replace(rank=1)}], {"block": "a mask (on rank 0)", "other": "a ring (on rank 1)"}),
        # of groups: all of the second, and one of the first
        ([{"": MASK._replace(rank=1, everywhere=False)}, {"": MASK._replace(rank=2)}], {"": "a mask (on rank 1)"}),
    ],
)
def test_united(by_rank: list[dict[str, Reason]], expected: dict[str, str]) -> None:
    assert {what: str(reason) for what, reason in united(by_rank).items()} == expected
