"""CFG split: each part of the ranks computes some of the conditionings of a batched call.

The host decides whether it batches conditionings. Here a batched call is split between them,
never within one, so whatever a model reduces over its batch is the same in each part.

Shape legend: B rows of all parts, b rows of this part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...comm import Transport
from .forward_call import ForwardCall

#: transformer options that are a list with one entry for each conditioning
PER_CONDITIONING = ("cond_or_uncond", "uuids")


def part_of_call(call: ForwardCall, part: int, parts: int) -> ForwardCall:
    """Part ``part`` of ``parts`` equal ones: the rows of its conditionings, and all that has no rows."""
    batch = call.x.size(0)
    named, extra = (part_of_tensors(tree, batch, part, parts) for tree in (call.named, call.extra))
    return replace(call, named=named, extra=extra, options=part_of_options(call.options, part, parts))


def part_of_tensors(tree: Any, batch: int, part: int, parts: int) -> Any:
    """``tree`` with (b, ...) of every tensor that is (B, ...) with B = ``batch``; other tensors belong to every part."""
    return rows_of_tensors(tree, batch, part * (batch // parts), batch // parts)


def rows_of_tensors(tree: Any, batch: int, first: int, count: int) -> Any:
    """``tree`` with rows ``first`` to ``first + count`` of every tensor that is (B, ...) with B = ``batch``, and the others as they are."""

    def rows_of(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and tensor.size(0) == batch
        return tensor.narrow(0, first, count) if has_rows else tensor

    return tree_map_only(Tensor, rows_of, tree)


def part_of_options(options: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Transformer options of one part."""
    own = dict(options)
    for key in PER_CONDITIONING:
        if isinstance(own.get(key), list):
            rows = len(own[key]) // parts
            own[key] = own[key][part * rows : (part + 1) * rows]
    return own


def join_parts(output: Any, transport: Transport, counts: Sequence[int] | None = None) -> Any:
    """All parts' outputs behind one another: (b, ...) to (B, ...), or a list of these. Collective over the parts.

    Args:
        counts: b of each part; the same in all where it is not given.
    """

    def join(tensor: Tensor) -> Tensor:
        # the transport gathers along dim 1
        return transport.all_gather_tokens(tensor.unsqueeze(0).contiguous(), counts or [tensor.size(0)] * transport.world_size)[0]

    return tree_map_only(Tensor, join, output)
