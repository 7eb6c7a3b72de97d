"""Callbacks that a node behind SP Model Patch added to a MODEL, and that would have acted where the model computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ..options import name_of

log = logging.getLogger(__name__)

#: ComfyUI's ``ModelPatcher.callbacks``: by kind and key
Callbacks = dict[str, dict[Any, list[Callable[..., Any]]]]
#: the kinds that run when a model is loaded, begins and ends a run, or computes (``CallbacksMP`` of ComfyUI)
BEFORE_A_RUN = "on_pre_run"
_WHERE_IT_COMPUTES = (
    *("on_load_after", "on_detach_after", BEFORE_A_RUN, "on_cleanup"),
    *("on_prepare_state", "on_apply_hooks", "on_inject_model", "on_eject_model"),
)


class LateCallbacks:
    """Shared by the clones of one patched MODEL.

    Args:
        given: the callbacks of the MODEL that SP Model Patch got. The workers have them as well.
    """

    def __init__(self, given: Callbacks) -> None:
        self._given = [function for _, function in _each(given)]
        self._named: list[Callable[..., Any]] = []

    def warn(self, callbacks: Callbacks) -> None:
        """Name each late callback in a warning, once."""
        for kind, function in self._late(callbacks):
            if not any(function is named for named in self._named):
                self._named.append(function)
                log.warning(
                    "SP: the callback %s (%s) was added to the model after SP Model Patch. It acts in ComfyUI's process only, "
                    "not in the workers, where the model computes. Place SP Model Patch after the node that adds it",
                    name_of(function),
                    kind,
                )

    def workers_run_the_same(self, callbacks: Callbacks) -> bool:
        """There are callbacks before a run, and the workers have all of them."""
        if not any(kind == BEFORE_A_RUN for kind, _ in _each(callbacks)):
            return False
        return not any(kind == BEFORE_A_RUN for kind, _ in self._late(callbacks))

    def _late(self, callbacks: Callbacks) -> Iterator[tuple[str, Callable[..., Any]]]:
        for kind, function in _each(callbacks):
            if kind in _WHERE_IT_COMPUTES and not any(function is given for given in self._given):
                yield kind, function


def _each(callbacks: Callbacks) -> Iterator[tuple[str, Callable[..., Any]]]:
    for kind, by_key in callbacks.items():
        for functions in by_key.values():
            for function in functions:
                yield kind, function
