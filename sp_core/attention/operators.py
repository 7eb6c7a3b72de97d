"""A block's attentions as operators of torch, for a compiled block without a break in its graph.

An operator holds all of an attention that is not the block's own arithmetic: the exchanges, whoever computes the attention, and
what is counted. It asks the block call that runs at that moment (:func:`running`), so nothing of a forward, a block or a rank is
in a graph: one graph serves all blocks alike, whatever the other ranks hold.

Shape legend: B batch, t this rank's tokens, H heads, D head_dim of q and k, E that of v.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

#: the number of a call that attends by itself: its keys are all there
LOCAL = -1
AttentionFunction = str | Callable[..., Tensor]


class BlockCall(Protocol):
    """One call of a compiled block: what its operators do."""

    def attend(
        self, site: int, function: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, heads: int, options: dict[str, Any]
    ) -> Tensor:
        """The attention of the block's call site of this number, or of one that is not named (:data:`LOCAL`).

        Args:
            function: that which the block called, or the name that ComfyUI gives it.
            options: other arguments of that call which are not at their defaults.
        """
        ...

    def escaped(self, site: int) -> None:
        """The named module of this call site returned without calling an attention. Raises."""
        ...


_running: ContextVar[BlockCall | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def running(call: BlockCall) -> Iterator[None]:
    """Inside, operators ask ``call``."""
    token = _running.set(call)
    try:
        yield
    finally:
        _running.reset(token)


def _call() -> BlockCall:
    call = _running.get()
    if call is None:
        raise RuntimeError("an attention of a compiled block ran outside of a call of that block")
    return call


@torch.library.custom_op("sequence_parallel::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    site: int,
    function: str,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None,
    enable_gqa: bool,
    low_precision_attention: bool | None,
) -> Tensor:
    """ComfyUI's attention call: (B, t, H * D), or (B, H, t, D) with ``skip_reshape``, to (B, t, H * E), or (B, H, t, E)."""
    given: dict[str, Any] = {
        "mask": mask,
        "attn_precision": attn_precision,
        "skip_reshape": skip_reshape or None,
        "skip_output_reshape": skip_output_reshape or None,
        "scale": scale,
        "enable_gqa": enable_gqa or None,
        "low_precision_attention": low_precision_attention,
    }
    out = _call().attend(site, function, q, k, v, heads, {name: value for name, value in given.items() if value is not None})
    expected = _output_shape(q, v, heads, skip_reshape, skip_output_reshape)
    if out.shape != torch.Size(expected):
        raise ValueError(f"the attention returned shape {tuple(out.shape)} where {tuple(expected)} was due")
    return _of_its_own(out.to(q.dtype).contiguous(), (q, k, v))


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    site: int,
    function: str,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None,
    enable_gqa: bool,
    low_precision_attention: bool | None,
) -> Tensor:
    return q.new_empty(_output_shape(q, v, heads, skip_reshape, skip_output_reshape))


@torch.compiler.disable
def beside_the_graph(
    site: int, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, options: dict[str, Any]
) -> Tensor:
    """An attention call that the operator does not carry: the same with a break in the graph."""
    return _call().attend(site, function, q, k, v, heads, options)


def _output_shape(q: Tensor, v: Tensor, heads: int, heads_first: bool, keep_heads_first: bool) -> tuple[int, ...]:
    width = v.shape[3] if heads_first else v.shape[2] // heads
    tokens = q.shape[2] if heads_first else q.shape[1]
    return (q.shape[0], heads, tokens, width) if keep_heads_first else (q.shape[0], tokens, heads * width)


@torch.library.custom_op("sequence_parallel::escaped", mutates_args=())
def escaped(output: Tensor, site: int) -> Tensor:
    """What a named module returned that called no attention: an error, unless the block call has nothing against it."""
    _call().escaped(site)
    return output.clone()


@escaped.register_fake
def _(output: Tensor, site: int) -> Tensor:
    return torch.empty_like(output)


def _of_its_own(output: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """The output, copied where it shares memory with an input: torch refuses such an operator."""
    there = {tensor.untyped_storage()._cdata for tensor in inputs}
    return output.clone() if output.untyped_storage()._cdata in there else output
