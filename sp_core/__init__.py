"""Sequence parallelism for video diffusion models. Importing this costs nothing: names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    # the names of LTX-2's multi-GPU path
    "Modality": "layout.modality",
    "pad_modality_for_uniform_sharding": "layout.modality",
    "compute_sequence_partition": "layout.modality",
    "tile_modality_for_rank": "layout.modality",
    "send_recv_heads": "comm.heads",
    "gather_heads": "comm.heads",
    "gather_output_tokens": "comm.heads",
    # the names of LongCat-Video's context-parallel package
    "init_context_parallel": "mesh",
    "get_optimal_split": "layout.tiles",
    "split_tensor_in_cp_2d": "comm.context_parallel",
    "split_cp_2d": "comm.context_parallel",
    "gather_cp_2d": "comm.context_parallel",
    "cp_broadcast": "comm.context_parallel",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
