"""What other packs put in the place of attentions, for forwards over ranks. Each yields the paths of the modules that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def nothing_foreign(model: Any, plan: Any) -> Iterator[list[str]]:
    yield []


def _paths(model: Any, plan: Any) -> list[str]:
    """Of the attentions that a plan names."""
    return [
        f"{blocks.path}.{index}.{attention.module}"
        for blocks in plan.blocks
        for index in range(len(blocks.of(model)))
        for attention in blocks.attentions
    ]


def _with_the_mean(own: Callable[..., Any]) -> Callable[..., Any]:
    """Every token also gets a part of the mean of all tokens."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        parts = tuple(x + 0.3 * x.mean(1, keepdim=True) for x in (out if isinstance(out, tuple) else (out,)))
        return parts if isinstance(out, tuple) else parts[0]

    return forward


@contextmanager
def forwards_that_see_all_tokens(model: Any, plan: Any) -> Iterator[list[str]]:
    """A forward of a pack on each attention."""
    paths = _paths(model, plan)
    modules = [model.get_submodule(path) for path in paths]
    for module in modules:
        module.forward = _with_the_mean(module.forward)
    try:
        yield paths
    finally:
        for module in modules:
            del module.forward


@contextmanager
def function_without_options(model: Any, plan: Any) -> Iterator[list[str]]:
    """A pack's function by the name by which the attentions call ComfyUI's, which takes what they give it and nothing more."""
    names = type(model.get_submodule(_paths(model, plan)[0])).forward.__globals__
    own = names["optimized_attention"]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, attn_precision: Any = None, skip_reshape: bool = False
    ) -> Tensor:
        return 1.1 * own(q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape)

    names["optimized_attention"] = attend
    try:
        yield []
    finally:
        names["optimized_attention"] = own
