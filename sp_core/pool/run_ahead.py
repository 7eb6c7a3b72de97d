"""Keeps a worker at most a few blocks ahead of its device.

A worker queues kernels much faster than its device runs them: it would be at the end of a
forward while the device is in the first blocks. A cancel, the progress line and the watch
over a rank that stands still would then follow the queue and not the work.
"""

from __future__ import annotations

from collections import deque

import torch

#: enough that the device never waits for the worker
MAX_BLOCKS_IN_FLIGHT = 2


class RunAheadLimit:
    """Call :meth:`wait_before_block` before each block. Does nothing on a CPU, where nothing is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._block_ends: deque[torch.Event] = deque()

    def wait_before_block(self) -> None:
        """Wait until the device has run all but the last ``MAX_BLOCKS_IN_FLIGHT`` of the blocks that were queued."""
        if self.device.type == "cpu":
            return
        end = torch.Event(self.device)
        end.record(torch.accelerator.current_stream(self.device))
        self._block_ends.append(end)
        if len(self._block_ends) > MAX_BLOCKS_IN_FLIGHT:
            self._block_ends.popleft().synchronize()
