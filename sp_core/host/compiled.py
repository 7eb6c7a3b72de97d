"""Models and parts of models that torch.compile made: what it made them of, and what was asked of it.

What a node compiled computes in no process: in ComfyUI's there is no model, and in the workers a compiled block would pass by the
hooks that share the tokens out. Its wish is granted in another way: the workers compile the blocks (:mod:`.worker.compiling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: ComfyUI's compile node, and those of packs that follow it, compile by a wrapper under this key
COMPILE_KEY = "torch.compile"
#: and leave here, in the options of the MODEL, what they asked of torch.compile
COMPILE_ARGUMENTS = "torch_compile_kwargs"
#: transformer option by which a node behind SP Model Patch asks the workers: plain data, see :func:`plain_wish`
WISH = "sp_compile"


def original(value: Any) -> Any:
    """The module or function that ``value`` was compiled from; ``value`` itself where it was not compiled."""
    attributes = getattr(value, "__dict__", {})
    # torch.compile keeps a module as a child of what it returns, and a function as an attribute
    inner = attributes.get("_modules", {}).get("_orig_mod", attributes.get("_torchdynamo_orig_callable"))
    return value if inner is None else original(inner)


def is_compiled(value: Any) -> bool:
    return original(value) is not value


def plain_wish(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of ``torch.compile`` as plain data; what is a function, such as a filter of guards, is left out.

    A backend that is a function has its name, which torch knows by that, or nobody.
    """
    arguments = arguments or {}
    backend = arguments.get("backend") or "inductor"
    options = arguments.get("options") or {}
    return {
        "backend": backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__),
        "mode": arguments.get("mode"),
        "dynamic": arguments.get("dynamic"),
        "fullgraph": bool(arguments.get("fullgraph")),
        "options": {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))},
    }


def asked_for(value: Any) -> dict[str, Any]:
    """What was asked of ``torch.compile`` when it made ``value``, as :func:`plain_wish`, as far as the value tells."""
    context = getattr(value, "dynamo_ctx", None)
    backend = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    given = getattr(backend, "kwargs", {})
    return plain_wish(
        {
            "backend": getattr(backend, "compiler_name", None),
            "mode": given.get("mode"),
            "dynamic": getattr(backend, "dynamic", None),
            "fullgraph": getattr(context, "fullgraph", False),
            # of inductor, a mode is a name for some options
            "options": getattr(backend, "config", None) or given.get("options"),
        }
    )
