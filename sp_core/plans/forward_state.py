"""One forward on one rank: its layout, what was cut already, and the book of exchanges."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import SPError
from ..layout import SequenceLayout
from .plan import ShardRule


class Escaped(SPError):
    """A self-attention did not see the other ranks' tokens. The picture would be wrong."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} attended to its own part of the video only: another node replaced the attention function or the "
            "module's forward in a way that cannot be shared between devices. Remove that node, or SP Model Patch"
        )


class ForwardState:
    """State of one forward; made anew for each."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._layout: SequenceLayout | None = None
        #: the first block has decided how the sequence lies
        self.decided = False
        self.gathered = False
        self.attended = 0
        #: tokens that are whole on every rank and stand before the rank's own in joint attention
        self.whole_tokens = 0
        # keyed by identity; the value is kept alive so that its id stays its own
        self._cut: dict[tuple[int, int], tuple[Any, Any]] = {}

    @property
    def layout(self) -> SequenceLayout:
        assert self._layout is not None
        return self._layout

    @property
    def started(self) -> bool:
        """The sequence is split. False before the first block, and for good when there are too few tokens to share."""
        return self._layout is not None

    @property
    def split(self) -> bool:
        """The model computes on this rank's tokens at this moment."""
        return self.started and not self.gathered

    def start(self, layout: SequenceLayout) -> None:
        if layout.world_size != self.world_size:
            raise SPError(f"a layout for {layout.world_size} ranks was made for a world of {self.world_size}")
        self.decided = True
        # models reshape by their token count and cannot do that with none: then every rank computes the whole sequence
        if 0 not in layout.counts:
            self._layout = layout

    def shard(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens."""
        return self.layout.shard(tokens, self.rank, dim)

    def expect_local(self, tokens: Tensor, dim: int = 1, whole: int = 0) -> Tensor:
        """The tokens that a later block was given: local already, behind ``whole`` replicated ones."""
        count = self.layout.counts[self.rank]
        if tokens.size(dim) != whole + count:
            raise SPError(
                f"rank {self.rank} owns {count} of {self.layout.tokens} tokens but a block was given {tokens.size(dim) - whole}; "
                "a patch between the blocks changed the sequence"
            )
        return tokens

    def cut(self, value: Any, rule: ShardRule) -> Any:
        """ShardRule once per forward, however many blocks get the same object."""
        if value is None:
            return None
        key = (id(value), id(rule))
        known = self._cut.get(key)
        if known is None:
            known = self._cut[key] = (value, rule(value, self))
        return known[1]

    def check(self) -> None:
        """After the forward.

        Raises:
            SPError: the sequence was split and never gathered.
        """
        if self.started and not self.gathered:
            raise SPError("the sequence was split over the devices but the model's output was never gathered")

    def describe(self) -> str:
        return self.layout.describe() if self.started else "not split"
