"""Tokens in what a block is given and gives back: which they are, this rank's part of them, and how the model had them.

Shape legend: B batch, T all tokens, t this rank's, F, H, W frames, height and width in tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..attention.sequence_group import SequenceGroup
from ..errors import SPError
from .arguments import Arguments
from .forward_state import ForwardState
from .plan import Blocks, Join, SequencePlan


def tokens_of(blocks: Blocks, call: Arguments) -> Tensor:
    """The tokens that a block was given, (B, T or t, C)."""
    stream = call.get(blocks.stream)
    return stream if blocks.stream_item is None else stream[blocks.stream_item]  # type: ignore[no-any-return]


def grid_of(blocks: Blocks, tokens: Tensor) -> tuple[int, ...]:
    """Sizes of the dims over which tokens lie: (T,), or (F, H, W)."""
    return tuple(tokens.shape[blocks.dim : blocks.dim + blocks.dims])


def in_stream(blocks: Blocks, state: ForwardState) -> int:
    """How many replicated tokens the stream of these blocks has beside this rank's."""
    return state.replicated_tokens if blocks.replicated is not None and blocks.replicated.in_stream else 0


def keep_own(blocks: Blocks, call: Arguments, state: ForwardState, first: bool) -> None:
    """The block gets this rank's tokens: sharded if it was given all, checked if it was given those already."""
    tokens, replicated = tokens_of(blocks, call), blocks.replicated
    state.replicated_behind = replicated is not None and replicated.behind
    if replicated is not None and replicated.argument is not None:
        state.replicated_tokens = call.get(replicated.argument).size(1)
    # the places of a grid stand for tokens only while all of them are there
    if first or (blocks.own_stream and math.prod(grid_of(blocks, tokens)) == state.layout.tokens):
        flat = tokens.flatten(blocks.dim, blocks.dim + blocks.dims - 1)
        tokens = state.shard(flat, blocks.dim).unflatten(blocks.dim, (-1, *[1] * (blocks.dims - 1)))
    else:
        state.expect_local(tokens, blocks.dim, in_stream(blocks, state))
    stream = call.get(blocks.stream)
    if blocks.stream_item is not None:
        tokens = type(stream)(tokens if i == blocks.stream_item else x for i, x in enumerate(stream))
    call.set(blocks.stream, tokens)


def as_the_model_had(gathered: Tensor, dim: int, grid: tuple[int, ...]) -> Tensor:
    """All tokens on ``dim``, (..., T, 1, 1, ...), over the dims of ``grid`` again: (..., F, H, W, ...). As they are without one."""
    return gathered.flatten(dim, dim + len(grid) - 1).unflatten(dim, grid) if len(grid) > 1 else gathered


def shard_residuals(plan: SequencePlan, inputs: Mapping[str, Any], state: ForwardState) -> None:
    """Of what a ControlNet adds between blocks this rank's part. In place, as the model has these arguments in its hands already.

    Raises:
        SPError: it has another number of tokens than the stream.
    """
    for name in plan.residuals:
        for kind, tensors in (inputs.get(name) or {}).items():
            try:
                tensors[:] = [None if x is None else _residual(x, state) for x in tensors]
            except ValueError as error:
                raise SPError(f"{plan.architecture}: the residuals of a ControlNet ({name}, {kind}) do not fit: {error}") from error


def _residual(tokens_BTC: Tensor, state: ForwardState) -> Tensor:
    """Of fewer than T tokens, which are the first ones, those that are this rank's; there may be none."""
    own = state.layout.indices(state.rank)
    if tokens_BTC.size(1) < state.layout.tokens and isinstance(own, slice):
        return tokens_BTC[:, own].contiguous()
    return state.shard(tokens_BTC)


def joined_by(join: Join, sequence: SequenceGroup, state: ForwardState) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
    """A forward hook for what :attr:`.plan.Blocks.joined` names: (B, 1, C) of this rank's tokens becomes that of all tokens."""

    def after(_: nn.Module, args: tuple, output_B1C: Tensor) -> Tensor:
        if not state.split or state.whole:
            return output_B1C
        return join(sequence.all_ranks.all_gather_tokens(output_B1C.contiguous(), [1] * sequence.world_size))

    return after
