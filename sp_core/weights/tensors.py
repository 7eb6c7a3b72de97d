"""Tensors of any kind as plain ones, and back: what is shared out is bytes, whatever they mean.

A plain tensor is its own only part. One that can be flattened (``__tensor_flatten__``: ComfyUI's quantised tensors) is
the parts that it names. Of other subclasses only those are taken apart that were read: their bytes are a plain tensor's,
and what else they know is in their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: subclasses that are a plain tensor with attributes: ComfyUI-GGUF's
WITH_ATTRIBUTES = ("GGMLTensor",)

Rebuild = Callable[[Sequence[Tensor]], Tensor]


class NotShareable(Exception):
    """A tensor whose bytes cannot be shared out; the text is a sentence for a person."""


@dataclass(frozen=True)
class Apart:
    """A tensor as plain ones: dense, and in an order that ``rebuild`` knows."""

    parts: list[Tensor]
    #: gives a tensor like the one that was taken apart, on tensors like ``parts``
    rebuild: Rebuild


def take_apart(tensor: Tensor) -> Apart:
    """The plain tensors that ``tensor`` is made of. Nothing is copied but what is not dense.

    Raises:
        NotShareable: it is a subclass that nobody has read.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    if type(tensor) in (Tensor, nn.Parameter):
        return Apart([_dense(tensor.detach())], lambda parts: _parameter(parts[0]) if is_parameter else parts[0])
    if hasattr(type(tensor), "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__"):
        return _flattened(tensor, is_parameter)
    if type(tensor).__name__ in WITH_ATTRIBUTES:
        return _with_attributes(tensor)
    raise NotShareable(f"weights are {type(tensor).__name__}s of {type(tensor).__module__}, which nobody can share out by bytes")


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor that can be shared out, by the plain tensors that it is made of; 0 of one that cannot."""
    try:
        return sum(part.numel() * part.element_size() for part in take_apart(tensor).parts)
    except NotShareable:
        return 0


def _flattened(tensor: Any, is_parameter: bool) -> Apart:
    names, context = tensor.__tensor_flatten__()
    inner = [take_apart(getattr(tensor, name)) for name in names]
    kind, counts = type(tensor), [len(each.parts) for each in inner]
    size, stride = tensor.size(), tensor.stride()

    def rebuild(parts: Sequence[Tensor]) -> Tensor:
        made, start = {}, 0
        for name, each, count in zip(names, inner, counts, strict=True):
            made[name] = each.rebuild(parts[start : start + count])
            start += count
        whole = kind.__tensor_unflatten__(made, context, size, stride)
        return _parameter(whole) if is_parameter else whole

    return Apart([part for each in inner for part in each.parts], rebuild)


def _with_attributes(tensor: Tensor) -> Apart:
    kind, attributes = type(tensor), dict(vars(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(Tensor)

    def rebuild(parts: Sequence[Tensor]) -> Tensor:
        made = parts[0].as_subclass(kind)
        vars(made).update(attributes)
        return made

    return Apart([_dense(plain)], rebuild)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()
