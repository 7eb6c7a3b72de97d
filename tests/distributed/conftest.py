"""Ranks and pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.pools import HERE, make_pool
from distributed.ranks import RankPools

from sp_core.pool.coordinator import Pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Ranks that stay for all cases of a module: ``ranks.call(world_size, function, *args)``."""
    with RankPools() as pools:
        yield pools


@pytest.fixture(scope="module")
def echo_service() -> Iterator[None]:
    """Workers find the service of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


@pytest.fixture(scope="module")
def shared_pool(echo_service: None) -> Iterator[Pool]:
    pool = make_pool()
    yield pool
    pool.shutdown()


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    """A pool of three workers that stays for all tests of a module."""
    assert shared_pool.usable, "an earlier test broke the shared pool"
    return shared_pool


@pytest.fixture
def gate(tmp_path):
    """A block that waits for this file lasts until the test ends it, however fast the machine is."""
    path = tmp_path / "open"
    yield path
    path.touch()
