"""Control plane: a gloo group of the coordinator (rank 0) and the workers (rank r + 1).

The group is made from its class, not through ``init_process_group``, which would take the
default group of ComfyUI's process: other extensions use that. Rendezvous is a file in the pool's private
directory and the sockets are loopback ones, so nothing is reachable from outside.
Frames are four int64; the body that they announce lies in the sender's :class:`SharedBuffer`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The coordinator watches processes and progress to see who is alive; a socket's clock would end long steps.
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Frame:
    """One message: what it is, for which request, and how large its header and its whole body are in the sender's buffer."""

    op: int
    request: int
    header_bytes: int = 0
    total_bytes: int = 0


class ControlGroup:
    """Point-to-point frames over loopback gloo."""

    def __init__(self, directory: Path, rank: int, size: int, connect_timeout_s: float) -> None:
        store = dist.FileStore(str(directory / "control"), size)
        store.set_timeout(timedelta(seconds=connect_timeout_s))
        gloo: Any = dist.ProcessGroupGloo  # its type stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=connect_timeout_s)
        self.rank, self.size = rank, size
        self._group: Any = gloo(store, rank, size, options)
        self._group._set_default_timeout(_FOREVER)

    def send(self, to: int, frame: Frame) -> None:
        """Raises RuntimeError when the peer is gone."""
        self._group.send([_words(frame)], to, 0).wait(_FOREVER)

    def send_to_all(self, frame: Frame) -> list[int]:
        """Send to every other rank, and wait for all of them together. Returns the ranks that are gone."""
        words, sent, gone = _words(frame), [], []
        for rank in range(self.size):
            if rank != self.rank:
                try:
                    sent.append((rank, self._group.send([words], rank, 0)))
                except RuntimeError:
                    gone.append(rank)
        for rank, work in sent:
            try:
                work.wait(_FOREVER)
            except RuntimeError:
                gone.append(rank)
        return gone

    def receive(self, source: int) -> Frame:
        """Blocks; raises RuntimeError when the peer is gone."""
        words = torch.zeros(len(fields(Frame)), dtype=torch.int64)
        self._group.recv([words], source, 0).wait(_FOREVER)
        return Frame(*words.tolist())


def _words(frame: Frame) -> torch.Tensor:
    return torch.tensor(astuple(frame), dtype=torch.int64)
