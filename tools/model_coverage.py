"""How each class of diffusion model that a ComfyUI knows is shared out: the table of docs/models.md.

A class that a newer ComfyUI brings appears by itself, as one without a plan.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sp_core.plans import NOT_SAMPLED, PLANS

PLAN, ROWS, ONE_DEVICE = "plan", "shared rows", "one device"
_KEYWORD = "unet_model"


def classes(model_base: ModuleType) -> dict[type, list[str]]:
    """ComfyUI's classes of diffusion models, and of each the names of the models that use it.

    Args:
        model_base: ComfyUI's module ``comfy.model_base``.
    """
    own = {node.name: found for node in ast.parse(inspect.getsource(model_base)).body if (found := _class_in(node, model_base)) is not None}
    users: dict[type, list[str]] = {}
    for name, value in vars(model_base).items():
        if isinstance(value, type) and issubclass(value, model_base.BaseModel):
            named = next((own[base.__name__] for base in value.__mro__ if base.__name__ in own), None)
            if named is not None:
                users.setdefault(named, []).append(name)
    for named in own.values():
        users.setdefault(named, [])
    return users


def _class_in(node: ast.stmt, model_base: ModuleType) -> Any:
    """The class that a BaseModel's __init__ names, as an argument of a call or as a default."""
    if not isinstance(node, ast.ClassDef):
        return None
    for found in ast.walk(node):
        if isinstance(found, ast.Call):
            value = next((keyword.value for keyword in found.keywords if keyword.arg == _KEYWORD), None)
            # a class hands on what it was given
            if value is not None and not (isinstance(value, ast.Name) and value.id == _KEYWORD):
                return eval(ast.unparse(value), vars(model_base))
    for found in ast.walk(node):
        if isinstance(found, ast.arguments):
            names = [argument.arg for argument in found.args[len(found.args) - len(found.defaults) :]]
            if _KEYWORD in names:
                return eval(ast.unparse(found.defaults[names.index(_KEYWORD)]), vars(model_base))
    return None


def how(kind: type) -> str:
    """How a class is shared out."""
    if kind.__name__ in PLANS:
        return PLAN
    return ONE_DEVICE if kind.__name__ in NOT_SAMPLED else ROWS


def table(model_base: ModuleType) -> str:
    """One row a class, those with a plan first."""
    users = classes(model_base)
    order = (PLAN, ROWS, ONE_DEVICE)
    rows = sorted(((how(kind), kind.__name__, sorted(users[kind])) for kind in users), key=lambda row: (order.index(row[0]), row[1]))
    lines = [f"| `{name}` | {', '.join(models)} | {told} |" for told, name, models in rows]
    return "\n".join(["| ComfyUI's class | its models | shared out by |", "| --- | --- | --- |", *lines, ""])


def main(host: str) -> None:
    """Print the version of a ComfyUI and its table."""
    sys.path[:0] = [host]
    from comfy.cli_args import args

    args.cpu = True
    import comfy.model_base
    from comfyui_version import __version__

    print(__version__)
    print(table(comfy.model_base), end="")


if __name__ == "__main__":
    _, checkout = sys.argv
    # ComfyUI reads its own arguments from here
    del sys.argv[1:]
    main(checkout)
