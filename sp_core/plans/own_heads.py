"""Attentions whose module attends by itself to parts of the tokens, such as windows (SeedVR2): it gets all tokens of this rank's heads.

The exchange takes place at two of its modules, that which gives queries, keys and values and that which takes what attention gave.
Between them the model's own code computes as it does without this extension, with fewer heads.

Shape legend: t this rank's tokens, T all tokens, N replicated tokens, H all heads, h this rank's heads, D head_dim.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.replicated_heads import all_gather_heads
from ..attention.sequence_group import SequenceGroup
from ..layout import shard_sizes
from .forward_state import Escaped, ForwardState
from .plan import OwnHeads


class TooFewHeads(Escaped):
    """A rank would get no head, and the module's own code need not be able to attend with none."""

    def __init__(self, where: str, heads: int, ranks: int) -> None:
        super(Escaped, self).__init__(
            f"{where} has {heads} {'head' if heads == 1 else 'heads'} for {ranks} devices, and one would get none. "
            "Use fewer devices, or equal shares, in SP Model Patch"
        )


def hook_own_heads(
    module: nn.Module, rule: OwnHeads, where: str, state: ForwardState, sequence: SequenceGroup, undo: contextlib.ExitStack
) -> None:
    """Hook one attention until ``undo`` closes."""
    exchange = _Exchange(module, rule, where, state, sequence)
    undo.callback(exchange.put_heads_back)
    undo.callback(module.get_submodule(rule.into).register_forward_hook(exchange.to_own_heads).remove)
    undo.callback(module.get_submodule(rule.out).register_forward_pre_hook(exchange.to_own_tokens).remove)


class _Exchange:
    """Of one attention in one forward."""

    def __init__(self, module: nn.Module, rule: OwnHeads, where: str, state: ForwardState, sequence: SequenceGroup) -> None:
        self._module, self._rule, self._state, self._sequence = module, rule, state, sequence
        self._heads: int = getattr(module, rule.heads)
        self._counts = shard_sizes(self._heads, sequence.world_size, sequence.head_weights)
        self._where = where

    @property
    def _idle(self) -> bool:
        return not self._state.split or self._state.whole

    def to_own_heads(self, _: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """q, k and v of this rank's tokens, (t, 3 H D), and of the replicated ones, (N, 3 H D), to (T, 3 h D) and (N, 3 h D)."""
        if self._idle:
            return None
        if 0 in self._counts:
            raise TooFewHeads(self._where, self._heads, self._sequence.world_size)
        state, rank = self._state, self._sequence.rank
        tokens_t3HD, replicated_N3HD = (x.unflatten(1, (3, self._heads, -1)) for x in output)
        shards = [x[None] for x in tokens_t3HD.unbind(1)]  # (1, t, H, D)
        came = self._sequence.all_ranks.scatter_heads(shards, state.layout.counts, self._counts)
        tokens_T3hD = torch.stack([state.layout.restore(x, 1)[0] for x in came], 1)
        first = sum(self._counts[:rank])
        setattr(self._module, self._rule.heads, self._counts[rank])
        return tokens_T3hD.flatten(1), replicated_N3HD[:, :, first : first + self._counts[rank]].flatten(1)

    def to_own_tokens(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What attention gave, (T, h D) and (N, h D), to (t, H D) and (N, H D)."""
        if self._idle:
            return None
        state, all_ranks = self._state, self._sequence.all_ranks
        tokens_1ThD, replicated_1NhD = (x.unflatten(1, (self._counts[self._sequence.rank], -1))[None] for x in args[:2])
        order = state.layout.order()
        if order is not None:
            tokens_1ThD = tokens_1ThD.index_select(1, order.to(tokens_1ThD.device))
        tokens_1tHD = all_ranks.gather_heads(tokens_1ThD.contiguous(), self._heads, state.layout.counts, self._counts)
        replicated_1NHD = all_gather_heads(replicated_1NhD, self._heads, all_ranks, self._sequence.head_weights)
        self.put_heads_back()
        state.attended += 1
        state.self_attended += 1
        return (tokens_1tHD[0].flatten(1), replicated_1NHD[0].flatten(1), *args[2:])

    def put_heads_back(self) -> None:
        setattr(self._module, self._rule.heads, self._heads)
