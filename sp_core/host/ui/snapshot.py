"""What Python a diffusion model consists of, remembered to notice that somebody swaps a part of it while it is sampled.

Some packs change Python objects for the time of a step: a method of the model, its list of blocks, a block's forward, the
attention function of the model's module. The step computes in the workers, where nothing was swapped, so the swap would be
lost without a word. A snapshot is taken where sampling begins and compared before each forward.

ComfyUI itself changes the module, which all branches of one loader share: it applies and takes back object patches of
another branch, whose originals it keeps in a backup, and takes back what was injected. Neither is a swap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_not
from types import MethodType
from typing import Any

from torch import nn

from ...errors import SPError
from ..options import name_of
from .origin import pack_in_call

#: in ComfyUI's names the paths of a MODEL's patches begin with this
_MODEL = "diffusion_model"
_ATTENTION = "comfy.ldm.modules.attention"
#: modules whose functions no model calls by their global names
_NOT_READ = ("torch", "comfy.ops")
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """A part of the model that is another one now."""

    #: dotted name below the diffusion model, or of a class or module
    place: str
    value: Any
    #: below the diffusion model
    inside: bool = True


class _Names:
    """What a dictionary of a module, a class or an instance held."""

    def __init__(self, where: Mapping[Any, Any]) -> None:
        self._where = where
        self._values = dict(where)
        self._order = tuple(self._values.values())

    def changed(self) -> list[tuple[str, Any, Any]]:
        """(name, value then, value now); ``_MISSING`` where there is none."""
        where = self._where
        # this is asked for thousands of modules before each forward
        if len(where) == len(self._order) and not any(map(is_not, where.values(), self._order)):
            return []
        names = self._values.keys() | where.keys()
        pairs = ((name, self._values.get(name, _MISSING), where.get(name, _MISSING)) for name in sorted(names, key=str))
        return [(name, then, now) for name, then, now in pairs if then is not now]


class _Module:
    """One module: its class, its attributes, its children and its hooks."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module, self._class = path, module, type(module)
        self._attributes = _Names(module.__dict__)
        self._children = _Names(module._modules)
        self._hooks = [_Names(module._forward_hooks), _Names(module._forward_pre_hooks)]

    def changes(self) -> Iterator[Change]:
        module = self._module
        if type(module) is not self._class:
            yield Change(self._below("__class__"), type(module))
        for name, then, now in self._attributes.changed():
            if _is_swap(module, name, then, now):
                yield Change(self._below(name), now)
        for name, _, now in self._children.changed():
            yield Change(self._below(name), None if now is _MISSING else now)
        for hooks in self._hooks:
            for _, _, now in hooks.changed():
                if now is not _MISSING:
                    yield Change(self._below("forward"), now)

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


class Snapshot:
    """What the Python of ``local`` was when this was made. It holds the objects, so that none of them is taken for another.

    Args:
        local: the diffusion model in ComfyUI's process.
        backup: what other branches' object patches replaced, by path, kept up by ComfyUI (``object_patches_backup``).
    """

    def __init__(self, local: nn.Module, backup: Mapping[str, Any]) -> None:
        self._backup, self._backup_then = backup, dict(backup)
        modules = list(local.named_modules())
        self._modules = [_Module(path, module) for path, module in modules]
        classes = _classes_of(module for _, module in modules)
        self._classes = {f"{found.__module__}.{found.__qualname__}": _Names(vars(found)) for found in classes}
        names = {found.__module__ for found in classes} | {_ATTENTION}
        read = [name for name in sorted(names) if name in sys.modules and not _is_below(name, _NOT_READ)]
        self._globals = {name: _Names(vars(sys.modules[name])) for name in read}

    def changes(self) -> list[Change]:
        """What is another object now, beside what ComfyUI itself applied or took back."""
        found = [change for module in self._modules for change in module.changes() if not self._is_comfyuis(change)]
        for place, names in (self._classes | self._globals).items():
            found += [Change(f"{place}.{name}", now, inside=False) for name, then, now in names.changed() if callable(then)]
        return found

    def _is_comfyuis(self, change: Change) -> bool:
        path = f"{_MODEL}.{change.place}"
        backups = (self._backup_then, self._backup)
        if any(path in backup and backup[path] is change.value for backup in backups):
            return True
        return path in self._backup and path not in self._backup_then


def _is_swap(module: nn.Module, name: str, then: Any, now: Any) -> bool:
    """An attribute that the model may call is another one, and not the one of the module's class."""
    if now is _MISSING:
        return callable(then) and not hasattr(type(module), name)
    if not callable(now) and not callable(then):
        return False
    if then is _MISSING and not hasattr(type(module), name):
        return False  # the model's code does not know this name
    own = getattr(type(module), name, None)
    return not (isinstance(now, MethodType) and now.__self__ is module and now.__func__ is own)


def _classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of the modules and their bases, without torch's."""
    kinds = {base: None for module in modules for base in type(module).__mro__}
    return [kind for kind in kinds if kind is not object and not _is_below(kind.__module__, ("torch",))]


def _is_below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


class Watch:
    """Notices swaps during the sampling runs of one patched MODEL and its clones. Arguments as those of :class:`Snapshot`."""

    def __init__(self, local: nn.Module, backup: Mapping[str, Any]) -> None:
        self._local, self._backup = local, backup
        self._snapshot: Snapshot | None = None

    def begin(self) -> None:
        """What the model is now is what the workers have, unless a run is being watched already."""
        if self._snapshot is None:
            self.accept()

    def accept(self) -> None:
        """What the model is now is what the workers have."""
        self._snapshot = Snapshot(self._local, self._backup)

    def end(self) -> None:
        self._snapshot = None

    def check(self) -> None:
        """Before a forward.

        Raises:
            SPError: a part of the model was swapped in this process.
        """
        changes = self._snapshot.changes() if self._snapshot is not None else []
        if changes:
            raise swapped(changes[0])


def swapped(change: Change) -> SPError:
    """The sentence about a part of the model that somebody swaps while it is sampled."""
    place = f"The model's {change.place}" if change.inside else change.place
    by = pack_in_call()
    by_whom = f", by {by}" if by else ""
    return SPError(
        f"{place} was replaced while sampling ({name_of(change.value)}{by_whom}), which has no effect on the workers. "
        "Remove the node that replaces it (a cache or a guidance that patches the model's code), or SP Model Patch. "
        "ComfyUI's own caches, EasyCache and LazyCache, work with SP Model Patch"
    )
