"""Which rank owns which rows of a frame, and which it needs of others."""

from __future__ import annotations

import pytest

from sp_core.layout.bands import Bands, Rows, cut_bands


@pytest.mark.parametrize(
    ("height", "world_size", "counts"),
    [(8, 2, (4, 4)), (9, 2, (5, 4)), (11, 3, (4, 4, 3)), (1, 4, (1,)), (3, 4, (1, 1, 1)), (5, 1, (5,)), (13, 4, (4, 3, 3, 3))],
)
def test_every_row_has_one_owner_and_no_band_is_empty(height: int, world_size: int, counts: tuple[int, ...]) -> None:
    bands = cut_bands(height, world_size)
    assert bands.counts == counts
    assert [row for rank in range(bands.ranks) for row in range(*bands.range(rank))] == list(range(height))


@pytest.mark.parametrize("height", [0, -1])
def test_a_frame_without_rows_is_refused(height: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        cut_bands(height, 2)


def test_bands_scale_with_the_frame() -> None:
    assert cut_bands(11, 3).scaled(8).counts == (32, 32, 24)


def test_a_rank_needs_the_rows_beside_its_band_and_none_outside_the_frame() -> None:
    bands = Bands((4, 3, 3))
    assert bands.needed(0, 1, 2) == (Rows(1, 4, 6),)
    assert bands.needed(1, 1, 1) == (Rows(0, 3, 4), Rows(2, 7, 8))
    assert bands.needed(2, 2, 1) == (Rows(1, 5, 7),)
    assert bands.needed(1, 0, 0) == ()


def test_a_band_of_few_rows_is_stepped_over() -> None:
    bands = Bands((1, 1, 1, 1))
    assert bands.needed(2, 3, 1) == (Rows(0, 0, 1), Rows(1, 1, 2), Rows(3, 3, 4))
    assert bands.needed(0, 3, 3) == (Rows(1, 1, 2), Rows(2, 2, 3), Rows(3, 3, 4))


@pytest.mark.parametrize("counts", [(4, 3, 3), (1, 1, 1, 1), (2, 1), (5,)])
@pytest.mark.parametrize(("above", "below"), [(0, 1), (1, 1), (2, 0), (3, 3)])
def test_what_one_rank_needs_another_gives(counts: tuple[int, ...], above: int, below: int) -> None:
    bands = Bands(counts)
    needed = {(rows.rank, rank, rows.start, rows.stop) for rank in range(bands.ranks) for rows in bands.needed(rank, above, below)}
    given = {(rank, rows.rank, rows.start, rows.stop) for rank in range(bands.ranks) for rows in bands.given(rank, above, below)}
    assert needed == given
    assert all(bands.range(owner)[0] <= start < stop <= bands.range(owner)[1] for owner, _, start, stop in needed)
