"""Models and parts of models that torch.compile made, and what it made them of.

Compiling is a wish that changes nothing of what is computed. It is dropped on several devices: the compiled model would
compute in ComfyUI's process, and a compiled block would pass by the hooks that share the tokens out.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

#: ComfyUI's compile node, and those of packs that follow it, compile by a wrapper under this key
COMPILE_KEY = "torch.compile"


def original(value: Any) -> Any:
    """The module or function that ``value`` was compiled from; ``value`` itself where it was not compiled."""
    attributes = getattr(value, "__dict__", {})
    # torch.compile keeps a module as a child of what it returns, and a function as an attribute
    inner = attributes.get("_modules", {}).get("_orig_mod", attributes.get("_torchdynamo_orig_callable"))
    return value if inner is None else original(inner)


def is_compiled(value: Any) -> bool:
    return original(value) is not value


def log_dropped() -> None:
    log.info("SP: torch.compile is not used on several devices yet, so what is compiled of the model runs uncompiled")
