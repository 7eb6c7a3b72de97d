"""What a node changed of a MODEL that the workers would see."""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import torch

#: what a ModelPatcher holds beside its options
_PARTS = (
    *("object_patches", "weight_wrapper_patches", "hook_patches", "force_cast_weights", "forced_hooks"),
    *("injections", "additional_models", "callbacks", "wrappers", "attachments"),
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def same_for_workers(before: Any, after: Any) -> bool:
    """Two values are MODELs that differ at most in what runs around the model: guidance, and functions of the sampler."""
    return same_but_for_weights(before, after) and _same(before.patches, after.patches)


def same_but_for_weights(before: Any, after: Any) -> bool:
    """As :func:`same_for_workers`, but weights may be patched, as by a LoRA."""
    if before is not after:
        if not isinstance(before, comfy.model_patcher.ModelPatcher) or type(before) is not type(after) or before.model is not after.model:
            return False
        options = (patcher.model_options.get("transformer_options", {}) for patcher in (before, after))
        return _same(*options) and all(_same(getattr(before, part, None), getattr(after, part, None)) for part in _PARTS)
    return isinstance(before, comfy.model_patcher.ModelPatcher)


def _same(a: Any, b: Any) -> bool:
    """The same objects in the same containers: a clone copies containers and keeps what they hold."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, _PLAIN):
        return bool(a == b)
    return same_for_workers(a, b)
