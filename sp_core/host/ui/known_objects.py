"""Objects in a MODEL's transformer options that the workers have as well, by the nodes before SP Model Patch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from ...errors import SPError
from ...pool.wire import unsendable
from ..options import AROUND_THE_MODEL, INSIDE_THE_MODEL, MODEL_SAMPLING, READ_AROUND_THE_MODEL, name_of
from ..travel import Own

_NOT_OBJECTS = frozenset({*AROUND_THE_MODEL, *INSIDE_THE_MODEL, *READ_AROUND_THE_MODEL})
_DEEP = 6


class KnownObjects:
    """What was in the options when SP Model Patch ran.

    Args:
        transformer_options: of the MODEL that SP Model Patch got.
        foreign_code: the MODEL has code of other packs inside it, which may read any of these objects.
        model_sampling: of the MODEL, which samplers of packs put into the options.
        may_read: what is known to be read around the model only, and this model may read as well.
    """

    def __init__(
        self, transformer_options: dict[str, Any], foreign_code: bool, model_sampling: Any = None, may_read: Collection[str] = ()
    ) -> None:
        self.foreign_code, self._model_sampling = foreign_code, model_sampling
        self._not_objects = _NOT_OBJECTS - {*may_read}
        self._objects = self._objects_in(transformer_options)
        self._states = {key: _state(value) for key, value in self._objects.items()}

    def check(self, transformer_options: dict[str, Any], late_code: bool = False) -> None:
        """Refuse an object of the workers' own that code inside the model would find there as it was.

        Args:
            late_code: nodes behind SP Model Patch put code inside the model.

        Raises:
            SPError: names the option, the class of the object and its module.
        """
        if not (self.foreign_code or late_code):
            return
        for key, value in self._objects_in(transformer_options).items():
            if self.has(key, value) and _state(value) != self._states[key]:
                raise SPError(
                    f"{self.described(key, value)} changes while sampling, which the workers do not see, where another node's code inside "
                    "the model may read it. Remove the node that adds it, or SP Model Patch"
                )

    def new(self, transformer_options: dict[str, Any], late_code: bool = False) -> dict[str, Any]:
        """The objects that the workers do not have by that key.

        Args:
            late_code: as above.
        """
        new = {key: value for key, value in self._objects_in(transformer_options).items() if not self.has(key, value)}
        if new.get(MODEL_SAMPLING, self._model_sampling) is not self._model_sampling and not (self.foreign_code or late_code):
            # that of a node behind SP Model Patch. ComfyUI's models do not read it, and other code is not there
            del new[MODEL_SAMPLING]
        return new

    def has(self, key: str, value: Any) -> bool:
        """The workers have an object of this class by this key."""
        return key in self._objects and type(value) is type(self._objects[key])

    def _objects_in(self, transformer_options: dict[str, Any]) -> dict[str, Any]:
        """The options that cannot be sent and that code inside the model may read."""
        return {key: value for key, value in transformer_options.items() if key not in self._not_objects and unsendable(value) is not None}

    @staticmethod
    def described(key: str, value: Any) -> str:
        return f"transformer_options['{key}'], an object ({name_of(_culprit(value))}),"

    @property
    def own(self) -> dict[int, Own]:
        """By the ids of the objects: what they are in the workers."""
        sampling = {} if self._model_sampling is None else {id(self._model_sampling): Own((MODEL_SAMPLING,))}
        return sampling | {id(value): Own(("option", key)) for key, value in self._objects.items()}


def _culprit(value: Any) -> Any:
    """The first object in a tree that cannot be sent."""
    parts = _parts(value)
    return value if parts is None else next((_culprit(part) for part in parts if unsendable(part) is not None), value)


def _parts(value: Any) -> Iterator[Any] | None:
    """What a container holds; None for anything else."""
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value) if isinstance(value, (list, tuple, set, frozenset)) else None


def _state(value: Any, depth: int = 0) -> Any:
    """What an object is and holds, to be compared. ComfyUI copies dictionaries and lists of options, and keeps the rest."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if depth > _DEEP:
        return id(value)
    if isinstance(value, dict):
        return tuple((str(key), _state(part, depth + 1)) for key, part in value.items())
    parts = _parts(value)
    if parts is not None:
        return tuple(_state(part, depth + 1) for part in parts)
    return id(value), _state(getattr(value, "__dict__", None), depth + 1)
