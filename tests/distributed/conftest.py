"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.ranks import RankPools


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Ranks that stay for all cases of a module: ``ranks.call(world_size, function, *args)``."""
    with RankPools() as pools:
        yield pools
