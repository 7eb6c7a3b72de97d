"""CFG halves: each part of the ranks computes some of the conditionings of a batched call.

The host decides whether conditionings are batched; here a batched call is cut between
them, never within one, so whatever a model reduces over its batch is the same in each part.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...comm import Transport

#: per-conditioning entries of the transformer options
_PER_CONDITIONING = ("cond_or_uncond", "uuids")


def conditionings(options: dict[str, Any]) -> int:
    """How many conditionings the host batched into this call."""
    return len(options.get("cond_or_uncond") or (0,))


def batch_of(x: Any) -> int:
    """Batch size of the model's input, a tensor or a list of them."""
    return (x[0] if isinstance(x, (list, tuple)) else x).size(0)


def cut_call(tree: Any, batch: int, part: int, parts: int) -> Any:
    """Part ``part`` of every tensor in ``tree`` that has ``batch`` rows; everything else is shared."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 or tree.size(0) != batch:
            return tree
        rows = batch // parts
        return tree.narrow(0, part * rows, rows)
    if isinstance(tree, dict):
        return {key: cut_call(value, batch, part, parts) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cut_call(value, batch, part, parts) for value in tree)
    return tree


def cut_options(options: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Transformer options for one part."""
    cut = dict(options)
    for key in _PER_CONDITIONING:
        if isinstance(cut.get(key), list):
            rows = len(cut[key]) // parts
            cut[key] = cut[key][part * rows : (part + 1) * rows]
    return cut


def join_output(output: Any, transport: Transport) -> Any:
    """The parts' outputs behind one another: (b, ...) to (B, ...), or a list of these."""
    if isinstance(output, Tensor):
        # the transport gathers along dim 1
        return transport.all_gather_tokens(output.unsqueeze(0).contiguous(), [output.size(0)] * transport.world_size)[0]
    return type(output)(join_output(part, transport) for part in output)
