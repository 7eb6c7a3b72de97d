"""Small facts that all ranks of a group tell each other while a transport is set up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


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
    device = group_device(group)
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [tensor.tolist() for tensor in everybody]


def all_gather_bytes(group: dist.ProcessGroup | None, value: bytes) -> list[bytes]:
    """Every rank's ``value``, in rank order; lengths may differ."""
    lengths = [length for (length,) in all_gather_ints(group, [len(value)])]
    padded = value.ljust(max(lengths), b"\0")
    gathered = all_gather_ints(group, list(padded)) if padded else [[] for _ in lengths]
    return [bytes(data)[:length] for data, length in zip(gathered, lengths, strict=True)]
