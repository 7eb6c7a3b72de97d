"""What a sampling run has found out about code of other packs, and how one forward uses it.

Every rank comes to the same verdicts at the same calls: they are kept by facts that are equal on all ranks, and the ranks tell one another
what they found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ...attention.sequence_group import SequenceGroup
from ...errors import SPError
from .probe import Probe, Verdict, filled
from .random_state import RandomState
from .visible_state import Hidden, VisibleState

#: what places in the transformer options begin with
_IN_OPTIONS = ("patches", "optimized_attention_override")


class Verdicts:
    """The verdicts of one sampling run. All ranks of a forward hold the same of those that concern it."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Verdict] = {}
        self._withdrawn: set[Hashable] = set()
        #: signature of forwards -> nothing is shared out in them, as some code in the model keeps state
        self.closed: dict[Hashable, bool] = {}
        self._watched: tuple[int, ...] = ()
        self._state: VisibleState | None = None
        #: why some code in the model cannot be looked into
        self.hidden = ""

    def of(self, key: Hashable) -> Verdict | None:
        return self._found.get(key)

    def hold(self, key: Hashable, verdict: Verdict) -> None:
        self._found[key] = verdict

    def withdraw(self, signature: Hashable, name: str) -> None:
        """This code did not do as in its probe: for the rest of the run it gets whole data."""
        self._withdrawn.add((signature, name))

    def withdrawn(self, signature: Hashable, name: str) -> bool:
        return (signature, name) in self._withdrawn

    def watch(self, functions: Sequence[Any]) -> bool:
        """Look at what all code of other packs inside the model can see now. False where some of it cannot be looked into."""
        watched = tuple(map(id, functions))
        if self._state is None or watched != self._watched or self._state.changed():
            self._watched = watched
            try:
                self._state = VisibleState(functions)
            except Hidden as hidden:
                self._state, self.hidden = None, str(hidden)
        return self._state is not None

    def state_changed(self) -> bool:
        """What the code can see is not what it was when it was looked at last."""
        return self._state is None or self._state.changed()


class Probing:
    """The verdicts in one forward of the ranks of ``sequence``.

    Args:
        signature: what the shapes of this forward follow from, equal on all ranks.
        functions: (place, function) of all code of other packs inside the model.
    """

    def __init__(
        self, verdicts: Verdicts, sequence: SequenceGroup, signature: Hashable, functions: Sequence[tuple[str, Any]], device: torch.device
    ) -> None:
        self.verdicts, self._sequence, self._signature = verdicts, sequence, signature
        self._functions, self._device = list(functions), device
        self._calls: Counter[str] = Counter()
        self._probed = False
        #: name of code that was shared out -> it did not see what it saw in its probe
        self._shared: dict[str, bool] = {}
        looked_into = verdicts.watch([function for _, function in self._functions])
        if signature not in verdicts.closed:
            [verdicts.closed[signature]] = self._any_rank([not looked_into])
        self._drawn = RandomState(device)

    @property
    def closed(self) -> bool:
        """Nothing is shared out."""
        return self.verdicts.closed[self._signature]

    def _close(self) -> None:
        self.verdicts.closed[self._signature] = True

    def site(self, place: str, name: str) -> Site:
        """The next call of code at ``place``."""
        self._calls[place] += 1
        key = (self._signature, place, name, self._calls[place])
        closed = self.closed or self.verdicts.withdrawn(self._signature, name)
        return Site(self, place, key, name, self.verdicts.of(key), closed)

    def probe(self, site: Site, function: Any, options: list[dict[str, Any]]) -> Probe:
        """A probe of ``function``, together with the code that may run inside it."""
        inside = [other for place, other in self._functions if place.startswith((f"{site.place}.", *_IN_OPTIONS))]
        return Probe(site.name, function, inside, options, self._device)

    def conclude(self, site: Site, probe: Probe) -> Verdict:
        """All ranks' verdict. Collective."""
        self._probed = True
        refused, keeps_state = self._any_rank([not probe.open, probe.keeps_state])
        if refused:
            probe.refuse("another rank found that it does not")
        if keeps_state:
            self._close()
        verdict = probe.verdict()
        self.verdicts.hold(site.key, verdict)
        return verdict

    def note_shared(self, name: str, as_probed: bool) -> None:
        self._shared[name] = self._shared.get(name, False) or not as_probed

    def settle(self) -> list[str]:
        """To be called behind the forward: names of code that did not do as in its probe. With any it has to be computed again. Collective.

        Raises:
            SPError: it has to, and cannot, as code in it keeps state.
        """
        if not self._probed and not self._shared:
            return []
        changed, *differ = self._any_rank([self.verdicts.state_changed(), *self._shared.values()])
        if changed:
            self._close()
        names = [name for name, differs in zip(self._shared, differ, strict=True) if differs]
        for name in names:
            self.verdicts.withdraw(self._signature, name)
        if names and changed:
            raise SPError(
                f"{' and '.join(names)} began to compute in another way in the middle of sampling, by something that other nodes' code "
                "changed in the same forward, so it can neither be shared nor computed again. Remove the node, or SP Model Patch"
            )
        if names:
            self._drawn.restore()
        return names

    def give_up(self) -> None:
        """The forward is computed again without this extension: what was drawn in it is drawn again. Collective.

        Raises:
            SPError: code in it keeps state, and would count the forward twice.
        """
        if self._any_rank([self.verdicts.state_changed()])[0]:
            raise SPError(
                "A forward cannot be shared between devices, and cannot be computed again as a whole, as other nodes' code in it keeps "
                "state. Remove the node, or SP Model Patch"
            )
        self._drawn.restore()

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is up on any rank."""
        own = torch.tensor([[[float(flag) for flag in flags]]], device=self._device)
        told = self._sequence.all_ranks.all_gather_tokens(own, [1] * self._sequence.world_size)
        return [bool(up) for up in (told[0].cpu().sum(0) > 0)]


class Site:
    """One call of code of another pack in one forward."""

    def __init__(self, probing: Probing, place: str, key: Hashable, name: str, verdict: Verdict | None, closed: bool) -> None:
        self.probing, self.place, self.key, self.name = probing, place, key, name
        self._verdict, self._closed = verdict, closed

    @property
    def apart(self) -> bool:
        """The call is shared out."""
        return not self._closed and self._verdict is not None and self._verdict.apart

    @property
    def unprobed(self) -> bool:
        return not self._closed and self._verdict is None

    @property
    def why_whole(self) -> str:
        """Why the call gets whole data, in words that follow the name of the code."""
        if self._verdict is not None and self._verdict.why:
            return self._verdict.why
        if self.probing.closed:
            hidden = self.probing.verdicts.hidden
            return f"code in the model cannot be looked into: {hidden}" if hidden else "code in the model keeps state"
        return "it did not do as in its first call"

    def shared(
        self, function: Any, options: list[dict[str, Any]], call: Callable[[], Any], instead: Callable[[], Any] | None = None
    ) -> Any:
        """The call on this rank's part. If it does not do as in its probe, the forward will be computed again.

        Args:
            instead: a result for a call that fails; None for one in the form of the probe's.
        """
        assert self._verdict is not None
        as_probed = self._verdict.holds(function, options)
        try:
            return call()
        except SPError:
            raise
        except Exception:
            as_probed = False
            return filled(self._verdict.outline) if instead is None else instead()
        finally:
            self.probing.note_shared(self.name, as_probed)
