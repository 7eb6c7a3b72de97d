"""The state of one forward on one rank: its layout, the arguments that were sharded already, and whether each block exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm import Transport
from ..errors import SPError
from ..layout import SequenceLayout
from .probing import Probing, Verdict

#: (value of an argument, the forward's state) -> the part of it that belongs to this rank's tokens
ShardRule = Callable[[Any, "ForwardState"], Any]
#: (output of a hook point on this rank's tokens, the hook point's arguments by name as they were before they were sharded,
#: the forward's state, a transport of all ranks) -> output for all tokens
Gather = Callable[[Any, Mapping[str, Any], "ForwardState", Transport], Any]


class Escaped(SPError):
    """A self-attention did not see the other ranks' tokens. The picture would be wrong."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} attended to its own part of the video only: another node replaced the attention function or the "
            "module's forward in a way that cannot be shared between devices. Remove that node, or SP Model Patch"
        )


class OtherKeys(Escaped):
    """A self-attention was given other keys than those of its queries: nobody knows which of them are whose."""

    def __init__(self, where: str, queries: int, keys: int) -> None:
        SPError.__init__(
            self,
            f"{where} was given {keys} keys for {queries} queries by another node, which cannot be shared between devices. "
            "Remove that node, or SP Model Patch",
        )


class DoesNotFit(Escaped):
    """An argument of the blocks has something for each token, and not for these tokens, as where another node took some away."""

    def __init__(self, architecture: str, name: str, tokens: int, error: Exception) -> None:
        SPError.__init__(self, f"{architecture}: '{name}' does not fit the {tokens} tokens: {error}")


class ForwardState:
    """What the hooks of one forward share. The engine makes a new one for each forward."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._layout: SequenceLayout | None = None
        #: sizes of the dims over which the model has its tokens: (T,), or frames, height and width
        self.grid: tuple[int, ...] = ()
        #: the first block has decided how the sequence lies over the ranks
        self.decided = False
        #: the output has been gathered, so the rest of the forward computes on all tokens
        self.gathered = False
        #: how often attention has exchanged since the current block began
        self.attended = 0
        #: how many of these were self-attention: queries of this rank's tokens
        self.self_attended = 0
        #: code of another pack computes on all tokens at this moment, and nothing exchanges
        self.whole = False
        #: ids of the modules whose forward is another pack's
        self.foreign: set[int] = set()
        #: names of the code that got whole data in this forward -> how many of its calls did
        self.got_whole: dict[str, int] = {}
        #: why it did, for code that was probed
        self.why_whole: dict[str, str] = {}
        #: names of the code that was shared out, or will be from its next call on
        self.apart: list[str] = []
        #: attentions whose heads did not go in groups although those of others did, and why
        self.alone: list[str] = []
        #: what attended to its own part only, where the forward was computed again for that, without a plan
        self.escaped = ""
        #: why blocks were not compiled although the user asked for it -> how many calls of blocks
        self.uncompiled: dict[str, int] = {}
        #: probes code of other packs; None where all of it gets whole data
        self.probing: Probing | None = None
        #: code of other packs is taken to keep everything apart, whatever it does; for tests
        self.trusts_all = False
        #: tokens (text) that every rank holds in full; in joint attention they stand before the rank's own, or behind them
        self.replicated_tokens = 0
        self.replicated_behind = False
        # keyed by identity; the value is kept alive so that its id stays its own
        self._sharded: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._originals: dict[int, tuple[Any, Any]] = {}

    @property
    def layout(self) -> SequenceLayout:
        assert self._layout is not None
        return self._layout

    @property
    def was_split(self) -> bool:
        """The sequence has been split. False before the first block, and for good when there are too few tokens to share."""
        return self._layout is not None

    @property
    def split(self) -> bool:
        """The model computes on this rank's tokens at this moment: the sequence was split and is not yet gathered."""
        return self.was_split and not self.gathered

    def split_by(self, layout: SequenceLayout) -> None:
        """Split the sequence as ``layout`` says, unless that would leave a rank without tokens.

        Raises:
            SPError: the layout is for another number of ranks.
        """
        if layout.world_size != self.world_size:
            raise SPError(f"a layout for {layout.world_size} ranks was made for a world of {self.world_size}")
        self.decided = True
        # models reshape by their token count and cannot do that with none: then every rank computes all tokens
        if 0 not in layout.counts:
            self._layout = layout

    def begin_anew(self) -> None:
        """The sequence was gathered, and the next block splits another one."""
        self._layout, self.decided, self.gathered = None, False, False
        self._sharded.clear()
        self._originals.clear()

    def shard(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of ``tokens``, which has all T tokens on ``dim``: a contiguous copy with t tokens there."""
        return self.layout.shard(tokens, self.rank, dim)

    def parted(self, tokens: Tensor, dim: int, replicated: int) -> tuple[Tensor, Tensor]:
        """Of a tensor that has so many replicated tokens beside those of a sequence: the replicated ones, and the others."""
        if not self.replicated_behind:
            head, tail = tokens.tensor_split((replicated,), dim)
            return head, tail
        head, tail = tokens.tensor_split((tokens.size(dim) - replicated,), dim)
        return tail, head

    def together(self, replicated: Tensor, others: Tensor, dim: int) -> Tensor:
        """The two of :meth:`parted` as one tensor again."""
        if not replicated.size(dim):
            return others
        return torch.cat([others, replicated] if self.replicated_behind else [replicated, others], dim)

    def expect_local(self, tokens: Tensor, dim: int = 1, replicated: int = 0) -> None:
        """Check that ``dim`` of ``tokens`` holds ``replicated`` tokens and then this rank's own.

        Raises:
            SPError: it holds another number.
        """
        count = self.layout.counts[self.rank]
        if tokens.size(dim) != replicated + count:
            raise SPError(
                f"rank {self.rank} owns {count} of {self.layout.tokens} tokens but a block was given {tokens.size(dim) - replicated}; "
                "a patch between the blocks changed the sequence"
            )

    def apply(self, rule: ShardRule, value: Any) -> Any:
        """This rank's part of ``value`` by ``rule``, computed once per forward however many blocks get the same object."""
        if value is None:
            return None
        key = (id(value), id(rule))
        known = self._sharded.get(key)
        if known is None:
            known = self._sharded[key] = (value, rule(value, self))
            if not isinstance(known[1], (int, float)):  # equal numbers can be one object
                self._originals[id(known[1])] = known
        return known[1]

    def original(self, value: Any) -> Any:
        """What ``value`` was before a rule took this rank's part of it; ``value`` itself where none did."""
        known = self._originals.get(id(value))
        return value if known is None else known[0]

    def note_whole(self, name: str, why: str = "") -> None:
        """A call of code of this name got whole data."""
        self.got_whole[name] = self.got_whole.get(name, 0) + 1
        if why:
            self.why_whole.setdefault(name, why)

    def note_apart(self, name: str) -> None:
        """A call of code of this name is shared out, or will be the next time."""
        if name not in self.apart:
            self.apart.append(name)

    def note_alone(self, what: str) -> None:
        """An attention exchanged all its heads at once, with nothing beside it; ``what`` says which, and why."""
        if what not in self.alone:
            self.alone.append(what)

    def note_uncompiled(self, why: str) -> None:
        """A call of a block was not compiled."""
        self.uncompiled[why] = self.uncompiled.get(why, 0) + 1

    def note_verdict(self, verdict: Verdict) -> None:
        """A call of code was its probe, on whole data."""
        if verdict.apart:
            self.note_apart(verdict.name)
        else:
            self.note_whole(verdict.name, verdict.why)

    def check(self) -> None:
        """To be called after the forward.

        Raises:
            SPError: the sequence was split and never gathered.
        """
        if self.split:
            raise SPError("the sequence was split over the devices but the model's output was never gathered")

    def describe(self) -> str:
        """The layout in a few words, for reports: "flat", "tiles 2x2", "not split"."""
        return self.layout.describe() if self.was_split else "not split"
