"""What the user sees while the workers answer a request, and the Cancel button."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...pool.shared_state import Phase
from .. import comfy_api

if TYPE_CHECKING:
    from ...pool.coordinator import Pool

#: seconds before the first line: a short request shows nothing
QUIET_S = 2.0
#: seconds between two lines
EVERY_S = 0.5


class Watcher:
    """Shows a line under the node that waits. The pool calls it about twenty times a second; true asks for a cancel."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._node = comfy_api.executing_node()[0]
        self._started = time.monotonic()
        self._shown = 0.0

    def __call__(self, pool: Pool) -> bool:
        now = time.monotonic()
        if now - self._started > QUIET_S and now - self._shown > EVERY_S:
            self._shown = now
            comfy_api.show_text(self._node, self.line(pool))
        return comfy_api.interrupted()

    def line(self, pool: Pool) -> str:
        """One line: how far the slowest rank is."""
        if not pool.usable:
            return f"SP: starting workers {pool.shared_state.arrived()}/{pool.world_size}"
        phases = [state.phase for state in pool.shared_state.ranks]
        if Phase.COMPILING in phases:
            return f"SP: {self.doing}, {Phase.COMPILING.text} (torch.compile, minutes where it is new)"
        if Phase.COMPUTING not in phases:
            slowest = min(phases, key=lambda phase: phase.value if phase is not Phase.IDLE else len(Phase))
            arrived = [state.loaded_percent for state, phase in zip(pool.shared_state.ranks, phases, strict=True) if phase is slowest]
            if any(arrived):
                return f"SP: {self.doing}, {Phase.LOADING.text} {min(arrived)} %"
            return f"SP: {self.doing}, {slowest.text}"
        leader = pool.shared_state.ranks[0]
        return f"SP: {self.doing}, block {leader.block + 1}/{leader.blocks}" if leader.blocks else f"SP: {self.doing}"
