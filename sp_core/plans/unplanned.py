"""What stands in the place of a plan for a model that has none: nothing is split inside it, and whole batch rows can be shared out.

What is known of such a model is what ComfyUI asks of every model: ``forward(x, timestep, context=..., ...)``, whose tensors
have one batch row for each latent and conditioning.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import FunctionType

from torch import nn

from .plan import SequencePlan
from .subclass import base_of_pack

#: ComfyUI calls this outside the forward, and of some classes the forward calls it too; it needs weights and keeps nothing
_PREPARING = ("preprocess_text_embeds",)
#: what a forward may touch of its model and still run in ComfyUI's process, in which the model has no weights on a device
_DISPATCHING = ("_forward", *_PREPARING)

#: classes that nothing samples: ComfyUI's nodes for them (depth, detection, masks) call methods of their own, with objects
NOT_SAMPLED = ("DepthAnything3Net", "RTv4", "SAM3Model")
#: ComfyUI's class that runs them
_EXECUTOR = "WrapperExecutor"


@functools.cache
def plan_without(kind: type) -> SequencePlan:
    """What is known of a model's class without a plan."""
    named = base_of_pack(kind)
    named = kind if named.__module__.startswith("torch.") else named
    return SequencePlan(named.__name__, named.__name__, (), (), forward=entry_of(kind), weight_methods=tuple(_public_methods(kind)))


def entry_of(kind: type) -> str:
    """The method that computes in the workers: ``_forward`` where ``forward`` only runs the wrappers around it, else ``forward``."""
    return "_forward" if callable(getattr(kind, "_forward", None)) and runs_wrappers(kind) and _only_dispatches(kind) else "forward"


def runs_wrappers(kind: type) -> bool:
    """The class's forward runs wrappers that other nodes put around the model."""
    return any(
        _EXECUTOR in [*(found.attr for found in _attributes(tree)), *(found.id for found in _names(tree))] for tree in _forwards(kind)
    )


def _only_dispatches(kind: type) -> bool:
    for tree in _forwards(kind):
        own = tree.args.args[0].arg if tree.args.args else ""
        touched = {found.attr for found in _attributes(tree) if isinstance(found.value, ast.Name) and found.value.id == own}
        if not touched <= {*_DISPATCHING}:
            return False
    return True


def _forwards(kind: type) -> list[ast.FunctionDef]:
    """The forward of a class, and those of its bases as far as each calls the next one's. Empty where the code cannot be read."""
    found: list[ast.FunctionDef] = []
    for base in kind.__mro__:
        function = vars(base).get("forward")
        if base is nn.Module or not isinstance(function, FunctionType):
            continue
        tree = _tree(function)
        if tree is None:
            return []
        found.append(tree)
        if not any(name.id == "super" for name in _names(tree)):
            break
    return found


def _tree(function: FunctionType) -> ast.FunctionDef | None:
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, IndexError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None


def _attributes(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def _names(tree: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _public_methods(kind: type) -> list[str]:
    """Methods that somebody may call from outside, and that may need weights. Not those of torch."""
    classes = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch.")]
    names = dict.fromkeys(name for base in classes for name, value in vars(base).items() if isinstance(value, FunctionType))
    return [name for name in names if not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)]


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """What of a model can be called its blocks, to tell how far a forward is: the members of its lists, list after list."""
    found: list[nn.Module] = []
    for child in model.children():
        found += _members(child) if isinstance(child, nn.ModuleList) else blocks_in(child)
    return found


def _members(blocks: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """Those of a list and of lists in it. A UNet takes the members of a sequence one by one, so that the sequence is not called."""
    found: list[nn.Module] = []
    for block in blocks:
        found += _members(block) if isinstance(block, (nn.ModuleList, nn.Sequential)) else [block]
    return found
