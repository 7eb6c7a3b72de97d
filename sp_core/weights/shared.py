"""Gathers a block's weights before it computes, the next block's meanwhile, and drops them behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.lane import Lane
from .block import BlockShard, WrongWeights
from .layout import WORD, gathered_bytes


class SharedWeights:
    """The blocks of one model whose weights lie once over ``ranks`` ranks; this rank's part of them."""

    def __init__(self, shards: Sequence[BlockShard], ranks: int, kept: Sequence[str] = ()) -> None:
        """``kept``: why some weights of blocks stay whole on each rank, in sentences for a person."""
        self.shards, self.ranks, self.kept = list(shards), ranks, list(kept)

    @property
    def nbytes(self) -> int:
        """What this rank holds between two blocks."""
        return sum(shard.shard_bytes for shard in self.shards)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a rank sends in a forward that calls each block once."""
        return gathered_bytes([shard.block_bytes for shard in self.shards], self.ranks)

    @contextlib.contextmanager
    def gathering(self, transport: Transport, lane: Lane | None, following: dict[int, int] | None = None) -> Iterator[Gathering]:
        """For one forward. Behind it the model has its own weights, however the forward ended. Collective.

        Args:
            transport: over the ranks that share these weights, and used by nobody else.
            lane: where the next block's weights are gathered while a block computes; None gathers each before its block.
            following: which block came behind which in earlier forwards, the same on all ranks; this forward writes into it.
        """
        gathering = Gathering(self, transport, lane, {} if following is None else following)
        try:
            yield gathering
            gathering.over()
        finally:
            gathering.end()


class Gathering:
    """Which block's weights are there, in one forward."""

    def __init__(self, weights: SharedWeights, transport: Transport, lane: Lane | None, following: dict[int, int]) -> None:
        self._shards, self._transport, self._lane = weights.shards, transport, lane
        # a block's number is not its place in time: VACE calls those of its control between the others
        self._following = following
        self._last: int | None = None
        #: the blocks that compute now, the outermost first: code of another pack may call a block inside a block
        self._inside: list[int] = []
        #: the block whose weights come meanwhile, and what waits for them
        self._ahead: tuple[int, Callable[[], Tensor]] | None = None
        self._wrong: list[tuple[int, Tensor]] = []

    def enter(self, index: int) -> None:
        """Block ``index`` is about to compute: its weights are put in. Collective.

        Raises:
            WrongWeights: they are not those that were shared out.
        """
        self._inside.append(index)
        if self._inside.count(index) > 1:
            return
        shard, whole = self._shards[index], self._arrived(index)
        wrong = shard.differs(whole)
        if whole.device.type == "cpu":
            if bool(wrong):
                raise WrongWeights(self._transport.rank, f"block {shard.number}")
        else:  # looked at behind the forward, so that nobody waits for the device
            self._wrong.append((shard.number, wrong))
        shard.put_in(whole)
        if self._last is not None:
            self._following[self._last] = index
        self._last = index
        ahead = self._following.get(index, index + 1)
        if self._lane is not None and ahead < len(self._shards) and ahead not in self._inside:
            self._ahead = (ahead, self._lane.start(self._gather(ahead)))

    def leave(self, index: int) -> None:
        """Block ``index`` has computed: its gathered weights go."""
        self._inside.remove(index)
        if index not in self._inside:
            self._shards[index].take_out()

    def over(self) -> None:
        """Behind a forward that was computed to its end.

        Raises:
            WrongWeights: some block had other weights than were shared out.
        """
        if self._last is not None:
            self._following[self._last] = len(self._shards)  # none
        if self._wrong:
            flags = torch.stack([wrong for _, wrong in self._wrong]).tolist()
            blocks = [str(number) for (number, _), wrong in zip(self._wrong, flags, strict=True) if wrong]
            if blocks:
                raise WrongWeights(self._transport.rank, f"block {', '.join(blocks)}")
        self._transport.check()

    def end(self) -> None:
        """The model has its own weights again, and nothing is under way."""
        for index in self._inside:
            self._shards[index].take_out()
        self._inside.clear()
        self._ahead = None
        if self._lane is not None:
            self._lane.settle()

    def _arrived(self, index: int) -> Tensor:
        """The bytes of a block: those that came meanwhile, if it is that block."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            number, wait = ahead
            whole = wait()
            if number == index:
                return whole
            # blocks were left out, on all ranks alike
        return self._lane.start(self._gather(index))() if self._lane is not None else self._gather(index)()

    def _gather(self, index: int) -> Callable[[], Tensor]:
        shard, transport = self._shards[index], self._transport

        def gather() -> Tensor:
            # a token is a word: transports move runs of tokens
            words = shard.shard.view(1, -1, WORD)
            return transport.all_gather_tokens(words, shard.counts).view(-1)

        return gather
