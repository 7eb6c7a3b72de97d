"""Sequence parallelism for video diffusion models. Importing this costs nothing: names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    # the names of LTX-2's multi-GPU path
    "Modality": "ports.ltx2_modality",
    "pad_modality_for_uniform_sharding": "ports.ltx2_modality",
    "compute_sequence_partition": "ports.ltx2_modality",
    "tile_modality_for_rank": "ports.ltx2_modality",
    "send_recv_heads": "ports.ltx2",
    "gather_heads": "ports.ltx2",
    "gather_output_tokens": "ports.ltx2",
    # the names of LongCat-Video's context-parallel package
    "init_context_parallel": "ports.longcat_cp",
    "get_optimal_split": "layout.tiles",
    "split_tensor_in_cp_2d": "ports.longcat_cp",
    "split_cp_2d": "ports.longcat_cp",
    "gather_cp_2d": "ports.longcat_cp",
    "cp_broadcast": "ports.longcat_cp",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
