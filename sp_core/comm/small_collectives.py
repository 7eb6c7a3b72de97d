"""Small facts that all ranks of a group tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .errors import TransportUnavailable


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of this group's collectives must lie: the CPU if any of its backends can do that."""
    backend = dist.get_backend(group)
    if backend in ("gloo", "mpi") or "cpu:" in backend:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"a group with backend {backend} needs an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def all_gather_ints(group: dist.ProcessGroup | None, values: Sequence[int]) -> list[list[int]]:
    """Every rank's ``values`` (the same count everywhere), in rank order."""
    return [tensor.tolist() for tensor in _all_gather(group, torch.tensor(list(values), dtype=torch.int64))]


def all_gather_bytes(group: dist.ProcessGroup | None, value: bytes) -> list[bytes]:
    """Every rank's ``value``, in rank order; lengths may differ."""
    lengths = [length for (length,) in all_gather_ints(group, [len(value)])]
    padded = bytearray(value.ljust(max(lengths), b"\0"))
    if not padded:
        return [b"" for _ in lengths]
    gathered = _all_gather(group, torch.frombuffer(padded, dtype=torch.uint8))
    return [bytes(tensor.tolist()[:length]) for tensor, length in zip(gathered, lengths, strict=True)]


def raise_together(group: dist.ProcessGroup | None, problem: str) -> None:
    """Raises on every rank if any has a problem; ``problem`` is this rank's, a sentence that names it, or "". Collective.

    Raises:
        TransportUnavailable: the first rank's problem.
    """
    for text in all_gather_bytes(group, problem.encode()):
        if text:
            raise TransportUnavailable(text.decode(errors="replace"))


def _all_gather(group: dist.ProcessGroup | None, mine: torch.Tensor) -> list[torch.Tensor]:
    mine = mine.to(group_device(group))
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return everybody
