"""The functions of ComfyUI that the hooks call. ``host/worker`` finds them; nothing here looks them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import SPError


def _not_handed_in(*args: Any, **kwargs: Any) -> Tensor:
    raise SPError("an attention of ComfyUI was needed, but the engine was made without ComfyUI's functions (HostFunctions)")


def _nothing_named(name: str) -> Callable[..., Tensor]:
    raise SPError(f"the attention '{name}' of ComfyUI was needed, but the engine was made without ComfyUI's functions (HostFunctions)")


def _never_swapped() -> bool:
    return False


@dataclass(frozen=True)
class HostFunctions:
    """ComfyUI's own attention functions. A field that was not handed in raises SPError when it is called."""

    #: (q, k, v, heads, ...) -> out: what a model's call comes to where the override is not told which function was called
    optimized_attention: Callable[..., Tensor] = _not_handed_in
    #: LTX: (q, k, v, heads, mask, attn_precision, transformer_options) -> out, for a mask object that speaks of guide frames
    guide_mask_attention: Callable[..., Tensor] = _not_handed_in
    #: the attention function that ComfyUI has by this name, as it is inside ComfyUI's wrapper for overrides
    named: Callable[[str], Callable[..., Tensor]] = _nothing_named
    #: another function has taken the place of ComfyUI's attention since this object was made
    is_swapped: Callable[[], bool] = _never_swapped
