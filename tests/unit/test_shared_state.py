"""The page that all processes of a pool share, once the pool is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from leftovers import memory_files

from sp_core import memory_file
from sp_core.pool.shared_buffer import SharedBuffer
from sp_core.pool.shared_state import Phase, SharedState


@pytest.mark.skipif(not memory_file.available(), reason="this system has no anonymous memory files")
def test_a_copy_says_the_same_and_holds_no_memory_file(tmp_path: Path) -> None:
    """Whoever still looks at a pool that is over, as the frames of a failed request do, must not keep its memory."""
    before = memory_files([os.getpid()])
    buffer = SharedBuffer.create(tmp_path, "shared_state", SharedState.nbytes(2))
    state = SharedState(buffer, 2)
    state.ranks[1].show(Phase.COMPUTING, 3, 7)
    state.cancel(5)
    buffer.close()
    assert memory_files([os.getpid()]) - before, "nothing was held"
    state.keep_a_copy()
    assert not memory_files([os.getpid()]) - before
    assert state.cancelled(5) and state.ranks[1].phase is Phase.COMPUTING and (state.ranks[1].block, state.ranks[1].blocks) == (3, 7)
