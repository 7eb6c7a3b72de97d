"""Keeps the process at most a few blocks ahead of its device.

Kernels are queued much faster than they run, so the process would be at the end of a
forward while the device is in its first blocks: a cancel, the progress line and the
watch over a rank that stands still would then speak of the queue, not of the work.
"""

from __future__ import annotations

from collections import deque

import torch

#: blocks that may be queued: enough that the device never waits for the process
AHEAD = 2


class Pace:
    """Call :meth:`keep` before each block. Does nothing on a CPU, where nothing is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: deque[torch.Event] = deque()

    def keep(self) -> None:
        """Wait until all but the last ``AHEAD`` blocks have run."""
        if self.device.type == "cpu":
            return
        mark = torch.Event(self.device)
        mark.record(torch.accelerator.current_stream(self.device))
        self._marks.append(mark)
        if len(self._marks) > AHEAD:
            self._marks.popleft().synchronize()
