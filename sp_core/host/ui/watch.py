"""Looks whether somebody changed the Python of a shared-out model or VAE in ComfyUI's process, where the workers do not see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ...errors import SPError
from .. import comfy_api
from ..module_settings import MISSING, Settings, same, told
from ..options import name_of
from ..vae_digest import first_difference, values_of
from .origin import pack_in_call
from .snapshot import Change, Snapshot

#: characters of a value in a message
_SHOWN = 60


@dataclass(frozen=True)
class Words:
    """How a person calls what is watched, and the node that shared it out."""

    what: str
    node: str


MODEL = Words("model", "SP Model Patch")
VAE = Words("VAE", "SP VAE Patch")


class SwapWatch:
    """Notices changes of one patched MODEL and its clones: by nodes behind SP Model Patch, and while it is sampled.

    All branches of one loader share the module, and what other branches do to it is theirs. So it is looked at before
    sampling only where the stand-in has handed out a part of it.

    Args:
        local, backup: as those of :class:`Snapshot`.
    """

    words = MODEL

    def __init__(self, local: nn.Module, backup: Mapping[str, Any]) -> None:
        self._local, self._backup = local, backup
        #: of the newest sampling run
        self._snapshot: Snapshot | None = None
        #: a sampling run is being watched
        self.sampling = False
        #: when a node got a part of the model, before the sampling run
        self._handed_out: Snapshot | None = None
        #: the nodes that got one
        self._hands: dict[str, None] = {}

    def handing_out(self) -> None:
        """Somebody gets a part of the model from the stand-in, and may change it."""
        node_id, class_type = comfy_api.executing_node()
        if class_type is not None:
            self._hands[f"{class_type} (node {node_id})"] = None
        if not self.sampling and self._handed_out is None:
            self._handed_out = Snapshot(self._local, self._backup)

    def begin(self) -> None:
        """What the model is now is what the workers have, unless a run is being watched already.

        Raises:
            SPError: a node behind SP Model Patch changed a part of the model.
        """
        if not self.sampling:
            if changes := self._handed_out.changes() if self._handed_out is not None else []:
                raise found_changed(changes[0], self.words, self._hands)
            self._handed_out = None
            self._hands.clear()
            self.sampling = True
            self.accept()

    def accept(self) -> None:
        """What the model is now is what the workers have."""
        if self._snapshot is None or not self._snapshot.is_current():
            self._snapshot = Snapshot(self._local, self._backup)

    def end(self) -> None:
        self.sampling = False

    def check(self) -> None:
        """Before a forward.

        Raises:
            SPError: a part of the model was swapped in this process.
        """
        changes = self._snapshot.changes() if self.sampling and self._snapshot is not None else []
        if changes:
            raise swapped(changes[0])

    @cached_property
    def _settings(self) -> Settings:
        return Settings(self._local.modules())

    def check_setting(self, module: nn.Module, name: str, value: Any) -> None:
        """Before somebody sets an attribute of the stand-in of ``module``.

        Raises:
            SPError: the model's code reads it, and it says something else than what the workers have.
        """
        then = getattr(module, name, MISSING)
        if not callable(value) and not same(then, value) and self._settings.is_setting(type(module), name):
            raise swapped(Change(name, value, before=told(then)), self.sampling, self.words)


class VaeWatch(SwapWatch):
    """Notices changes of a shared-out VAE since SP VAE Patch: also of its weights, which no patches of other branches change.

    Args:
        local: the VAE's module in ComfyUI's process.
        patcher: of the VAE that SP VAE Patch got.
    """

    words = VAE

    def __init__(self, local: nn.Module, patcher: Any) -> None:
        super().__init__(local, patcher.object_patches_backup)
        self._patcher = patcher
        # all of it is watched from the beginning
        self._handed_out = self._since = Snapshot(local, patcher.object_patches_backup, prefix="")
        self._values = values_of(local, patcher)

    def check(self) -> None:
        """Before a decode or an encode.

        Raises:
            SPError: a part of the VAE was changed in this process.
        """
        if changes := self._since.changes():
            raise found_changed(changes[0], self.words, self._hands)
        if name := first_difference(self._values, values_of(self._local, self._patcher)):
            raise found_changed(Change(name, None, written=True), self.words, self._hands)


def swapped(change: Change, sampling: bool = True, words: Words = MODEL) -> SPError:
    """The sentence about a part of the model that somebody swaps while it is sampled, or sets on its stand-in before that."""
    by = pack_in_call()
    by_whom = f"by {by}" if by else ""
    if not sampling:
        return SPError(
            f"{_what_changed(change, words, f'behind {words.node}', by_whom)}, which has no effect on the workers. "
            f"Place {words.node} after the node that replaces it, or remove that node"
        )
    return SPError(
        f"{_what_changed(change, words, 'while sampling', by_whom)}, which has no effect on the workers. "
        "Remove the node that replaces it (a cache or a guidance that patches the model's code), or SP Model Patch. "
        "ComfyUI's own caches, EasyCache and LazyCache, work with SP Model Patch"
    )


def found_changed(change: Change, words: Words, hands: Collection[str]) -> SPError:
    """The sentence about a part that somebody changed behind our node, in the module that ComfyUI's process keeps.

    Args:
        hands: the nodes that had a part of it in hand.
    """
    had = f" ({', '.join(hands)} had it in hand)" if hands else ""
    return SPError(
        f"{_what_changed(change, words, f'behind {words.node}')}, which has no effect on the workers. "
        f"Place {words.node} after the node that changes it{had}. Or remove that node, and free the models and the node cache: "
        f"ComfyUI's {words.what} stays changed until it is loaded anew"
    )


def _what_changed(change: Change, words: Words, when: str, by_whom: str = "") -> str:
    place = f"The {words.what}'s {change.place}" if change.inside else change.place
    if change.written:
        return f"{place} was written in place {when}"
    if change.before is None:
        return f"{place} was replaced {when} ({', '.join(filter(None, (name_of(change.value), by_whom)))})"
    before, now = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in (change.before, told(change.value)))
    return f"{place} was changed from {before} to {now} {when}{f' ({by_whom})' if by_whom else ''}"
