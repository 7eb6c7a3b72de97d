"""What a compiled block has in the place of its attentions: code that torch traces, and that leaves nothing but operators.

Nothing here knows a forward, a rank or the number of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import operators
from .arguments import parameter_names
from .override import OVERRIDE
from .plan import Attention

#: where ComfyUI's attention functions are defined, whose names the operator carries
HOST_MODULE = "comfy.ldm.modules.attention"
#: transformer option of a compiled block: number of a named attention -> its transformer options
NAMED = "sp_named_attentions"


class AttentionInGraph:
    """``optimized_attention_override`` of the attention calls of a compiled block."""

    def __init__(self, site: int) -> None:
        self.site = site

    def __call__(
        self,
        function: Callable[..., Tensor],
        q: Any,
        k: Any,
        v: Any,
        heads: int,
        mask: Any = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        low_precision_attention: bool | None = None,
        _inside_attn_wrapper: bool = True,
        transformer_options: Any = None,
        **others: Any,
    ) -> Tensor:
        if others or function.__module__ != HOST_MODULE or not (mask is None or isinstance(mask, Tensor)):
            given = {
                "mask": mask,
                "attn_precision": attn_precision,
                "skip_reshape": skip_reshape,
                "skip_output_reshape": skip_output_reshape,
                "enable_gqa": enable_gqa,
                **({} if scale is None else {"scale": scale}),
                **({} if low_precision_attention is None else {"low_precision_attention": low_precision_attention}),
                **others,
            }
            return operators.beside_the_graph(self.site, function, q, k, v, heads, given)
        return operators.attention(
            q,
            k,
            v,
            mask,
            heads,
            self.site,
            function.__name__,
            attn_precision,
            skip_reshape,
            skip_output_reshape,
            scale,
            enable_gqa,
            low_precision_attention,
        )


class NotedAttention(AttentionInGraph):
    """The same, which remembers that it was called; what it remembers while a block is traced is as fixed as the graph."""

    called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called = True
        return super().__call__(*args, **kwargs)


@functools.cache
def in_graph(site: int) -> AttentionInGraph:
    """The one override of this number: another object in each forward would be another graph."""
    return AttentionInGraph(site)


@functools.cache
def noted_in_graph(site: int) -> NotedAttention:
    """The same for a named module."""
    return NotedAttention(site)


def options_in_graph(options: Mapping[str, Any], attentions: Sequence[Attention]) -> dict[str, Any]:
    """Transformer options for a compiled block.

    A named attention finds its own among them, made here: torch would compile anew for every value of a dictionary that it sees
    copied, and one of these is the number of the block.
    """
    own = next((site for site, attention in enumerate(attentions) if not attention.module), operators.LOCAL)
    named = {site: {**options, OVERRIDE: noted_in_graph(site)} for site, attention in enumerate(attentions) if attention.module}
    # where the block itself attends, its own calls are the site's
    return {**options, OVERRIDE: in_graph(own), NAMED: named}


@functools.cache
def attending_class(kind: type[nn.Module], site: int, attention: Attention) -> type[nn.Module]:
    """The class of a named attention module while its block is compiled or runs: its own, whose attention call is the site's operator.

    A class and no closure: torch compiles anew for each object that it finds in a module.
    """
    place = parameter_names(kind.forward).index("transformer_options")
    skipped = attention.skipped

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options = (args[place] if place < len(args) else kwargs["transformer_options"])[NAMED][site]
        noted = options[OVERRIDE]
        noted.called = False
        if place < len(args):
            args = (*args[:place], options, *args[place + 1 :])
        else:
            kwargs["transformer_options"] = options
        out = kind.forward(self, *args, **kwargs)
        if noted.called or skipped(options):
            return out
        return operators.escaped(out, site)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
