"""Objects that come with forwards, in a worker: made anew, put where they belong, and told back where a forward changed them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from ..options import LATE_FORWARDS, MODEL_SAMPLING
from ..travel import ModuleCode, Packed, World, changes, unpack
from .forward_call import ForwardCall
from .residency import LoadedModel


class Arrivals:
    """Of one worker.

    Args:
        module: a Python module by its name, if it may be used here.
    """

    def __init__(self, module: Callable[[str], ModuleType]) -> None:
        self._module, self._code = module, ModuleCode()
        #: of the last forward that had any. The next one's are the same objects, so that who knows one knows it again
        self._last: tuple[LoadedModel, Packed] | None = None

    def complete(self, call: ForwardCall, tree: dict[str, Any] | None, model: LoadedModel) -> ForwardCall:
        """``call`` with the objects of ``tree`` among its options.

        Raises:
            SPError: this worker has no such function, class or part of the model, or has other code by that name.
        """
        if tree is None:
            self.forget()
            return call
        previous = self._last[1] if self._last is not None and self._last[0] is model else None
        world = World(self._code, self._module, model.diffusion_model.get_submodule, lambda place: own_object(model.patcher, place))
        objects, packed = unpack(tree, world, previous)
        self._last = model, packed
        return replace(call, options={**call.options, **objects})

    def forget(self) -> None:
        """A sampling run is over."""
        self._last = None

    def changed(self) -> list[list[Any]]:
        """What the forward changed in the objects, as ComfyUI's process takes it back."""
        if self._last is None:
            return []
        model, packed = self._last

        def path_of(module: nn.Module) -> str | None:
            return next((path for path, found in model.modules.items() if found is module), None)

        return changes(packed, "what a patch keeps between forwards", path_of, self._code)


def own_object(patcher: Any, place: tuple[Any, ...]) -> Any:
    """What a node before SP Model Patch put into the options of this worker's MODEL, or what says what its sigmas are."""
    if place == (MODEL_SAMPLING,):
        return patcher.get_model_object(MODEL_SAMPLING)
    found = patcher.model_options["transformer_options"]
    for key in place[1:] if place[0] == "option" else place:
        found = found[key]
    return found


@contextlib.contextmanager
def late_forwards(model: nn.Module, options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the forwards that nodes behind SP Model Patch replaced are in the model, as ComfyUI puts object patches there."""
    with contextlib.ExitStack() as undo:
        for place, function in (options.get(LATE_FORWARDS) or {}).items():
            attributes = vars(model.get_submodule(place.removeprefix("diffusion_model.").removesuffix(".forward")))
            if "forward" in attributes:
                undo.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                undo.callback(attributes.pop, "forward", None)
            attributes["forward"] = function
        yield
