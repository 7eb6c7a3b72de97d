"""Networks that mix rows, on bands over ranks: each rank's rows are those that one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.band_nets import NETS, on_bands, one_row_short, own_statistics, padded_at_the_cuts
from distributed.ranks import RankPools

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    with RankPools() as pools:
        yield pools


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", NETS)
def test_every_rank_has_the_rows_of_one_process(ranks: RankPools, name: str, world_size: int) -> None:
    # with 70 rows two bands are high: their edges are computed beside the band
    for height in (70, 11, 4, 3, 1):
        answers = [answer for answer in ranks.call(world_size, on_bands, name, height) if answer is not None]
        assert len(answers) == min(world_size, height)
        assert max(error for error, *_ in answers) <= TOLERANCE, f"{height} rows"


def test_bytes_are_those_of_the_halos(ranks: RankPools) -> None:
    """A 3 x 3 convolution: one row to each neighbour, (2, 4, 1, 6) float32."""
    row = 2 * 4 * 6 * 4
    assert [(count, sent) for _, count, sent in ranks.call(3, on_bands, "zeros", 11)] == [(1, row), (1, 2 * row), (1, row)]


@pytest.mark.parametrize(
    ("name", "spoil", "height"),
    [
        *((name, one_row_short, 11) for name in ("zeros", "seven rows", "half, padded by itself", "padded outside", "frames kept")),
        *((name, one_row_short, 11) for name in ("attention over time", "pooled")),
        *((name, one_row_short, 70) for name in ("zeros", "half, padded below", "padded outside")),
        ("group norm", own_statistics, 11),
        ("functions", own_statistics, 11),
        ("functions", one_row_short, 11),
        *((name, padded_at_the_cuts, 11) for name in ("zeros", "replicate", "reflect")),
    ],
)
def test_a_fault_is_noticed(ranks: RankPools, name: str, spoil: object, height: int) -> None:
    assert max(error for error, *_ in ranks.call(2, on_bands, name, height, spoil)) > 1e-2
