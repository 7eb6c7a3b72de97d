"""What Python a diffusion model or a VAE consists of, remembered to notice that somebody changes a part of it.

Some packs change Python objects for the time of a step: a method of the model, its list of blocks, a block's forward, the
attention function of the model's module. The step computes in the workers, where nothing was swapped, so the swap would be
lost without a word. Others set a number or a flag of a module, such as a convolution's padding. A snapshot is taken where
sampling begins, or where the VAE is shared out, and compared before each forward.

ComfyUI itself changes the module, which all branches of one loader share: it applies and takes back object patches of
another branch, whose originals it keeps in a backup, and takes back what was injected. Neither is a swap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import eq
from types import MethodType
from typing import Any

from torch import nn

from ..module_settings import MISSING, Settings, containers_of, is_managed, plain_text, same, told

#: in ComfyUI's names the paths of a MODEL's patches begin with this
IN_A_MODEL = "diffusion_model."
_ATTENTION = "comfy.ldm.modules.attention"
#: modules whose functions no model calls by their global names
_NOT_READ = ("torch", "comfy.ops")


@dataclass(frozen=True)
class Change:
    """A part of the model that is another one now."""

    #: dotted name below the diffusion model or the VAE, or of a class or module
    place: str
    value: Any
    #: below the diffusion model or the VAE
    inside: bool = True
    #: what it said before, of a number, a flag or a text
    before: str | None = None
    #: a weight whose numbers are others
    written: bool = False


class _Dictionaries:
    """What the dictionaries of modules, classes and Python modules held. They are compared all at once, before each forward."""

    def __init__(self, where: Sequence[Mapping[Any, Any]]) -> None:
        self._where = where
        self._sizes = list(map(len, where))
        #: most have nothing in them, as few modules have hooks
        self._filled = [held for held in where if held]
        self._then = list(map(dict, self._filled))

    def same(self) -> bool:
        """Nothing is another object than it was, or at least everything equals what it was."""
        if list(map(len, self._where)) != self._sizes:
            return False
        try:
            # comparing dictionaries looks at identity first, and is the fastest way to do so
            return all(map(eq, self._filled, self._then))
        except Exception:  # another pack's object, or a tensor, that was put in and cannot be compared
            return False

    def changed(self) -> Iterator[list[tuple[str, Any, Any]]]:
        """(name, value then, value now) of what changed, for each dictionary; ``MISSING`` where there is none."""
        filled = iter(self._then)
        for now, size in zip(self._where, self._sizes, strict=True):
            then = next(filled) if size else {}
            pairs = ((name, then.get(name, MISSING), now.get(name, MISSING)) for name in sorted(then.keys() | now.keys(), key=str))
            yield [(name, before, value) for name, before, value in pairs if before is not value]


class _Modules:
    """The modules of a model: their classes, attributes, children and hooks."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._classes = list(map(type, modules.values()))
        held = [(m.__dict__, m._modules, m._forward_hooks, m._forward_pre_hooks) for m in modules.values()]
        self._held = _Dictionaries(list(chain.from_iterable(held)))
        #: what containers said that can change in place
        self._texts = [(path, *found) for path, module in modules.items() for found in containers_of(module)]

    @cached_property
    def settings(self) -> Settings:
        return Settings(self._modules.values())

    def same(self) -> bool:
        if list(map(type, self._modules.values())) != self._classes or not self._held.same():
            return False
        return all(plain_text(value) == text for _, _, value, text in self._texts)

    def changes(self) -> Iterator[Change]:
        changed = self._held.changed()
        for (path, module), kind in zip(self._modules.items(), self._classes, strict=True):
            if type(module) is not kind:
                yield Change(_below(path, "__class__"), type(module))
            for name, then, now in next(changed):
                if is_managed(name):
                    continue
                if _is_swap(module, name, then, now):
                    yield Change(_below(path, name), now)
                elif self._is_set_anew(kind, name, then, now):
                    yield Change(_below(path, name), now, before=told(then))
            for name, _, now in next(changed):
                yield Change(_below(path, name), None if now is MISSING else now)
            for _, _, now in chain(next(changed), next(changed)):
                if now is not MISSING:
                    yield Change(_below(path, "forward"), now)
        for path, name, value, text in self._texts:
            module = self._modules[path]
            if vars(module).get(name) is value and plain_text(value) != text and self.settings.is_setting(type(module), name):
                yield Change(_below(path, name), value, before=text)

    def _is_set_anew(self, kind: type, name: str, then: Any, now: Any) -> bool:
        """An attribute that is no function and that the model's code reads says something else."""
        if callable(then) or callable(now):
            return False
        before, after = (getattr(kind, name, MISSING) if value is MISSING else value for value in (then, now))
        return not same(before, after) and self.settings.is_setting(kind, name)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Snapshot:
    """What the Python of ``local`` was when this was made. It holds the objects, so that none of them is taken for another.

    Args:
        local: the diffusion model in ComfyUI's process, or the VAE's module.
        backup: what other branches' object patches replaced, by path, kept up by ComfyUI (``object_patches_backup``).
        prefix: in these paths, before what lies below ``local``.
    """

    def __init__(self, local: nn.Module, backup: Mapping[str, Any], prefix: str = IN_A_MODEL) -> None:
        self._backup, self._backup_then, self._prefix = backup, dict(backup), prefix
        modules = dict(local.named_modules())
        self._modules = _Modules(modules)
        classes = _classes_of(modules.values())
        names = {found.__module__ for found in classes} | {_ATTENTION}
        read = [name for name in sorted(names) if name in sys.modules and not _is_below(name, _NOT_READ)]
        self._places = [f"{found.__module__}.{found.__qualname__}" for found in classes] + read
        self._shared = _Dictionaries([vars(found) for found in classes] + [vars(sys.modules[name]) for name in read])

    def is_current(self) -> bool:
        """One that is taken now would say the same."""
        backup, then = self._backup, self._backup_then
        same_backup = backup.keys() == then.keys() and all(backup[path] is then[path] for path in then)
        return same_backup and self._modules.same() and self._shared.same()

    def changes(self) -> list[Change]:
        """What is another object now, beside what ComfyUI itself applied or took back."""
        found: list[Change] = []
        if not self._modules.same():
            found = [change for change in self._modules.changes() if not self._is_comfyuis(change)]
        if not self._shared.same():
            for place, changed in zip(self._places, self._shared.changed(), strict=True):
                found += [self._outside(f"{place}.{name}", then, now) for name, then, now in changed if self._counts(name, then, now)]
        return found

    def _counts(self, name: str, then: Any, now: Any) -> bool:
        """A function of a class or of a Python module is another one, or a number, flag or text that no code writes."""
        if callable(then):
            return True
        texts = (plain_text(then), plain_text(now))
        return None not in texts and texts[0] != texts[1] and not name.startswith("__") and not self._modules.settings.is_written(name)

    @staticmethod
    def _outside(place: str, then: Any, now: Any) -> Change:
        return Change(place, now, inside=False, before=None if callable(then) else told(then))

    def _is_comfyuis(self, change: Change) -> bool:
        path = f"{self._prefix}{change.place}"
        backups = (self._backup_then, self._backup)
        if any(path in backup and backup[path] is change.value for backup in backups):
            return True
        return path in self._backup and path not in self._backup_then


def _is_swap(module: nn.Module, name: str, then: Any, now: Any) -> bool:
    """An attribute that the model may call is another one, and not the one of the module's class."""
    if now is MISSING:
        return callable(then) and not hasattr(type(module), name)
    if not callable(now) and not callable(then):
        return False
    if then is MISSING and not hasattr(type(module), name):
        return False  # the model's code does not know this name
    own = getattr(type(module), name, None)
    return not (isinstance(now, MethodType) and now.__self__ is module and now.__func__ is own)


def _classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of the modules and their bases, without torch's."""
    kinds = {base: None for module in modules for base in type(module).__mro__}
    return [kind for kind in kinds if kind is not object and not _is_below(kind.__module__, ("torch",))]


def _is_below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
