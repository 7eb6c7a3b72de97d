"""What ComfyUI's process sends of a MODEL's objects, and what it takes back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from ...errors import SPError
from ..travel import ModuleCode, Own, Packed, World, absorb, pack


class Departure:
    """Packs objects of the options of one patched MODEL.

    Args:
        local: the diffusion model in this process, whose modules cross as their paths.
        own: id of an object -> what it is in the workers.
    """

    def __init__(self, local: nn.Module, own: Mapping[int, Own]) -> None:
        self._local, self._own = local, own
        self._code = ModuleCode()
        self._paths: dict[int, str] = {}
        #: the stand-in that nodes see as the model
        self.stand_in: weakref.ref[nn.Module] | None = None

    def pack(self, value: Any, label: str) -> Packed:
        """``value`` as plain data.

        Raises:
            CannotTravel: says what cannot cross, and why.
        """
        return pack(value, label, self._path_of, self._code, self._own)

    def take_back(self, packed: Packed, changed: list[list[Any]]) -> None:
        """Bring the objects that were packed to what they are in the workers now."""
        if changed:
            absorb(packed.objects, changed, World(self._code, _imported, self._part))

    def _path_of(self, module: nn.Module) -> str | None:
        module = module.__dict__.get("_sp_local", module)
        for _ in range(2):
            path = self._paths.get(id(module))
            if path is not None and self._local.get_submodule(path) is module:
                return path
            # nobody asked yet, or a module was replaced meanwhile
            self._paths = {id(part): name for name, part in self._local.named_modules()}
        return None

    def _part(self, path: str) -> nn.Module:
        stand_in = self.stand_in() if self.stand_in is not None else None
        return self._local.get_submodule(path) if path or stand_in is None else stand_in


def _imported(name: str) -> ModuleType:
    if name not in sys.modules:
        raise SPError(f"a patch inside the model keeps something of {name}, which ComfyUI's process has not imported. Remove its node")
    return sys.modules[name]
