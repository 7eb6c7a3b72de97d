"""The patched MODELs that ComfyUI holds: a MODEL is dropped when the last of its clones is gone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from .recipe import Recipe

if TYPE_CHECKING:
    from ...pool.devices import WorkerDevice
    from .remote_model import RemoteModel


class HeldModels:
    """A remote model lives as long as ComfyUI keeps a clone of its MODEL, and the workers keep the model as long.

    Args:
        dropped: called in a thread of its own with the recipe of a MODEL that ComfyUI has dropped.
    """

    def __init__(self, dropped: Callable[[Recipe], None]) -> None:
        self._dropped = dropped
        #: names of the loaders in the prompt that patched a MODEL last
        self.loaders: Collection[str] = ()
        self._ends: weakref.WeakKeyDictionary[RemoteModel, weakref.finalize] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[RemoteModel]:
        return iter(list(self._ends))

    def add(self, model: RemoteModel) -> None:
        """Count ``model`` among those that ComfyUI holds, or take notice that its recipe is another one now."""
        former = self._ends.get(model)
        if former is not None:
            former.detach()
        end = self._ends[model] = weakref.finalize(model, _in_a_thread, self._dropped, model.recipe)
        end.atexit = False

    def recipes(self, devices: tuple[WorkerDevice, ...]) -> list[Recipe]:
        """How the models on this device list are made."""
        return [model.recipe for model in self if model.devices == devices]


def _in_a_thread(dropped: Callable[[Recipe], None], recipe: Recipe) -> None:
    # a finalizer can run in the middle of a call that this very thread makes, so another thread does the work
    threading.Thread(target=dropped, args=(recipe,), name="sp-forget", daemon=True).start()
