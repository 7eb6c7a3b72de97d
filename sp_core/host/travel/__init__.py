"""Objects that cross between ComfyUI's process and the workers as plain data, so that the other side can make them anew.

What crosses: data, tensors, functions and classes of files that both processes have, functions that such a file makes while
it runs (with what they hold), instances of such classes, and modules of the model by their paths. Nothing is pickled and no
code crosses, but the name of a module and a digest of the code in it. An object that two others hold is one object on
the other side too, and what it keeps can be told back.
"""

from __future__ import annotations

from .entries import LIBRARIES, CannotTravel, Own, Packed, from_wire, to_wire
from .module_code import ModuleCode
from .pack import changes, pack
from .unpack import World, absorb, unpack

__all__ = [
    "LIBRARIES",
    "CannotTravel",
    "ModuleCode",
    "Own",
    "Packed",
    "World",
    "absorb",
    "changes",
    "from_wire",
    "pack",
    "to_wire",
    "unpack",
]
