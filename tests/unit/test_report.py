"""Lines of SP Sampler's report that are made from numbers alone."""

from __future__ import annotations

import pytest

from sp_core.host.ui.report import weights_on_devices

GB = 10**9


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ([], ""),
        ([14 * GB], ""),
        ([14 * GB, 15 * GB], ""),
        ([int(13.9 * GB), 14 * GB], ""),
        ([14 * GB, 9 * GB], "not all 14 GB are on the device (9 GB on rank 1)"),
        ([0, 9 * GB, 14 * GB], "(9 GB on rank 1)"),
    ],
)
def test_a_rank_that_lacks_weights_is_named(held: list[int], told: str) -> None:
    lines = weights_on_devices(held, 14 * GB)
    assert len(lines) == bool(told)
    assert told in "".join(lines)
