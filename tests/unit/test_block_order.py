"""A rank follows the leader from block to block, whatever order the model calls them in."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path

import torch
from campaign import within

from sp_core.pool.errors import PeerFailed
from sp_core.pool.run_ahead import RunAheadLimit
from sp_core.pool.shared_buffer import SharedBuffer
from sp_core.pool.shared_state import SharedState
from sp_core.pool.worker import WorkerContext


def vace_order(layers: int = 40, controls: int = 8) -> list[int]:
    """Block numbers in the order in which VACE calls them: control blocks have the numbers behind those of the main blocks."""
    after = {layer: layers + number for number, layer in enumerate(range(0, layers, layers // controls))}
    return [block for layer in range(layers) for block in ([layer, after[layer]] if layer in after else [layer])]


def follows(order: list[int], ahead: int = 3) -> bool:
    """A rank gets through the first blocks after the leader has queued ``ahead`` of them, as it does on asynchronous devices."""
    with tempfile.TemporaryDirectory() as folder:
        buffer = SharedBuffer.create(Path(folder), "shared_state", SharedState.nbytes(2))
        state = SharedState(buffer, 2)
        device = torch.device("cpu")
        leader, follower = (WorkerContext(rank, 2, device, state, Path(folder), RunAheadLimit(device), request=1) for rank in (0, 1))
        for block in order[:ahead]:
            leader.enter_block(block, len(order))
        through = threading.Event()

        def follow() -> None:
            with contextlib.suppress(PeerFailed):
                for block in order[:ahead]:
                    follower.enter_block(block, len(order))
                through.set()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        done = through.wait(within(2.0))
        state.abort(1)  # releases a rank that waits for ever
        thread.join()
        return done


def test_a_rank_follows_the_leader_through_blocks_in_order() -> None:
    assert follows(list(range(40)))


def test_a_rank_follows_the_leader_through_blocks_out_of_order() -> None:
    assert follows(vace_order())
