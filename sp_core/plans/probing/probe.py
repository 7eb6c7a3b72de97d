"""The first call of a function of another pack: computed on whole data, and then in parts if that can do no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import SPError
from .options import FUNCTIONS, WatchedOptions
from .parts import agree
from .random_state import RandomState
from .trace import Trace
from .visible_state import Hidden, VisibleState, is_plain

T = TypeVar("T")
#: packages of the host, and of the model that stands in for its models
_HOSTS = {"comfy", "sp_core"}


@dataclass(frozen=True)
class Verdict:
    """What a probe found of one function at one place."""

    name: str
    #: it computes the same on a rank's part as on the whole, whatever the numbers are and for as long as it sees the same Python
    apart: bool
    #: why it does not, in words that follow its name
    why: str = ""
    function: Any = None
    state: VisibleState | None = None
    #: what it reads of the transformer options, of each that it was given
    read: tuple[dict[str, Any], ...] = ()
    #: what comes out, without its numbers
    outline: Any = field(default=None, repr=False)

    def holds(self, function: Any, options: list[dict[str, Any]]) -> bool:
        """The function is the one that was probed, and sees what it saw."""
        same_function = function is self.function or (hasattr(function, "__func__") and function == self.function)
        return (
            same_function
            and len(options) == len(self.read)
            and all(_same_entries(was, now) for was, now in zip(self.read, options, strict=True))
            and self.state is not None
            and not self.state.changed()
        )


class Probe:
    """Calls ``function`` for a verdict. The first call is the one whose result counts.

    Args:
        companions: other code that may run inside the function.
        options: the transformer options that it was given.
    """

    def __init__(self, name: str, function: Any, companions: list[Any], options: list[dict[str, Any]], device: torch.device) -> None:
        self.name, self._function, self._options, self._device = name, function, options, device
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._trace: Trace | None = None
        self._outline: Any = None
        #: why it is not apart; None as long as it may be
        self.why: str | None = None
        #: the first call changed something that outlives it
        self.keeps_state = False
        self._state: VisibleState | None = None
        try:
            self._state = VisibleState([function, *companions])
        except Hidden as hidden:
            self.refuse(str(hidden))

    @property
    def open(self) -> bool:
        return self.why is None

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def require(self, condition: bool, why: str) -> None:
        if not condition:
            self.refuse(why)

    def watched(self, options: Mapping[str, Any]) -> WatchedOptions:
        """Options for one of the calls."""
        return WatchedOptions(options, self._read, self._written)

    def trusted(self, value: Any) -> Any:
        """``value``; where it is a function of the host that is handed in, one that need not be seen through."""
        if not isinstance(value, FunctionType) or self._trace is None or value.__module__.partition(".")[0] not in _HOSTS:
            return value
        return self._trace.trusted(value)

    def whole(self, call: Callable[[], T]) -> T:
        """The first call, on whole data."""
        if not self.open:
            return call()
        drawn = RandomState(self._device)
        try:
            output = self._traced(call)
        except SPError:
            raise
        except Exception:
            assert self._state is not None
            if self._state.changed() or drawn.changed():
                raise
            # it may have failed because it was watched
            self.refuse("it cannot be watched")
            output = call()
        self._judge_whole(drawn)
        return output

    def _judge_whole(self, drawn: RandomState) -> None:
        if drawn.changed():
            self.refuse("it draws random numbers")
        if self._written or (self._state is not None and self._state.changed()):
            self.keeps_state = True
            self.refuse("it keeps state between its calls")
        for options in self._options:
            unknown = [key for key in self._read - FUNCTIONS if not _may_be_read(options.get(key))]
            if unknown:
                self.refuse(f"it reads what changes from step to step ({', '.join(sorted(unknown))})")

    def again(self, call: Callable[[], T]) -> T | None:
        """A later call, whose result is for comparison only; None once the probe is over."""
        if not self.open:
            return None
        try:
            output = self._traced(call)
        except SPError:
            raise
        except Exception:
            self.refuse("it fails on a part")
            return None
        if self._state is not None and self._state.changed():
            self.refuse("it keeps state between its calls")
        return output

    def _traced(self, call: Callable[[], T]) -> T:
        trace = self._trace = Trace()
        try:
            with trace.running():
                output = call()
        finally:
            self._trace = None
        trace.check_output(output)
        if trace.reason is not None:
            self.refuse(trace.reason)
        return output

    def compare(self, part: Any, of_whole: Any, why: str) -> None:
        """Two results that have to be the same."""
        if self.open:
            self.require(agree(part, of_whole), why)
            self._outline = tree_map(lambda x: _Outline.of(x) if isinstance(x, Tensor) else x, of_whole)

    def verdict(self) -> Verdict:
        """What this rank found."""
        if not self.open:
            return Verdict(self.name, False, self.why or "")
        read = tuple({key: options.get(key) for key in self._read - FUNCTIONS} for options in self._options)
        return Verdict(self.name, True, "", self._function, self._state, read, self._outline)


@dataclass(frozen=True)
class _Outline:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Outline:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def filled(outline: Any) -> Any:
    """Zeros in the form of a result: what a forward goes on with that is computed again anyway."""
    return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, _Outline) else x, outline)


def _may_be_read(value: Any) -> bool:
    """Plain values, and objects without tensors. A tensor in the options is another one in each step."""
    return is_plain(value) or not any(
        isinstance(x, Tensor) or not isinstance(x, (bool, int, float, str, type(None))) for x in tree_leaves(value)
    )


def _same_entries(was: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    return all((now := options.get(key)) is value or (is_plain(value) and is_plain(now) and now == value) for key, value in was.items())
