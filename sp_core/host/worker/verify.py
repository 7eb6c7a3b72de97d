"""A check for tests and for hunting faults: every rank has computed the same bits.

Set ``SP_VERIFY_RANKS=1`` in the environment of ComfyUI's process; workers inherit it. Each forward
then costs a hash and a small collective.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ... import settings
from ...comm.small_collectives import all_gather_bytes
from ...errors import SPError


def check_ranks_agree(output: Any) -> None:
    """Compare the outputs of all ranks of the default process group, bit by bit. Collective.

    Raises:
        SPError: on every rank, naming the ranks that differ from rank 0.
    """
    digests = all_gather_bytes(None, digest(output))
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise SPError(f"{settings.VERIFY_RANKS}: the output of rank {', '.join(map(str, different))} differs from that of rank 0")


def digest(output: Any) -> bytes:
    """Hash of the shapes, types and bytes of the tensors in an output."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in output if isinstance(output, (list, tuple)) else (output,):
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()
