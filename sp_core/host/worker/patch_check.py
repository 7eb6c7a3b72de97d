"""Code of other node packs inside the model, in the workers: what there is, and what it may be trusted to keep apart.

A function can treat heads, tokens and rows of the batch apart from one another, or mix them. :data:`KNOWN` lists
functions that were read and tested. ``docs/patches.md`` is the table for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import SPError
from ...plans.override import OVERRIDE
from ...plans.whole import Foreign
from ...settings import trust_patches
from ..options import CLASS, name_of, patches_in

_INSIDE = "diffusion_model."


@dataclass(frozen=True)
class Known:
    """A function that was read, by the place where it sits and the name that :func:`name_of` gives it."""

    #: what the place ends in: ".ffn.forward" is that of any block
    place: str
    #: qualified name of the function
    name: str
    #: what its module's name ends in, as packs lie in folders of any name
    module: str
    #: each token comes out the same whatever the other tokens are; of an attention function each head
    parts_apart: bool = True
    #: each row of the batch comes out the same whatever the other rows are
    rows_apart: bool = False


KNOWN = (
    # compares cond and uncond
    Known("patches.attn1_output_patch", "NAGuidance.execute.<locals>.nag_attention_output_patch", "nodes_nag"),
    # KJNodes: an attention kernel
    Known(OVERRIDE, "PathchSageAttentionKJ.patch.<locals>.attention_override_sage", ".model_optimization_nodes", rows_apart=True),
    # KJNodes: feed-forwards in chunks of tokens, and guidance by a second text, which tells rows by their number
    Known(".ffn.forward", "WanffnChunkPatch.__get__.<locals>.wrapped_forward", ".model_optimization_nodes", rows_apart=True),
    Known(".ff.forward", "LTXVffnChunkPatch.__get__.<locals>.wrapped_forward", ".ltxv_nodes", rows_apart=True),
    Known(".cross_attn.forward", "WanCrossAttentionPatch.__get__.<locals>.wrapped_attention", ".model_optimization_nodes"),
)


@dataclass(frozen=True)
class ForeignCode:
    """A function of another pack that runs inside the model."""

    #: "patches.attn1_patch", "blocks.0.ffn.forward", ...
    place: str
    #: module and name of the function
    name: str
    known: Known | None = None


def code_inside(patcher: Any, modules: Mapping[str, nn.Module], options: Mapping[str, Any] | None = None) -> list[tuple[str, Any]]:
    """(place, function or module) of all code of other packs inside a model.

    Args:
        modules: the model's, by their paths. A node can set a forward on one of them without ComfyUI's knowledge.
        options: those of a call, beside the MODEL's own.
    """
    placed = _placed(patcher, modules)
    return [*placed.items(), *patches_in(patcher.model_options.get("transformer_options", {})), *patches_in(dict(options or {}))]


def _placed(patcher: Any, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What stands in the place of modules and of their forwards."""
    # Before each forward all modules are looked through, of which hardly one has a forward of its own.
    own = ((path, module) for path, module in modules.items() if "forward" in module.__dict__)
    code = {f"{path}.forward": vars(module)["forward"] for path, module in own if path and _is_foreign_forward(module)}
    code |= {path.removeprefix(_INSIDE): value for path, value in patcher.object_patches.items() if path.startswith(_INSIDE)}
    return {path: value for path, value in code.items() if callable(value)}


def foreign_code(patcher: Any, modules: Mapping[str, nn.Module], options: Mapping[str, Any] | None = None) -> list[ForeignCode]:
    """What is known of :func:`code_inside`."""
    return [ForeignCode(place, name_of(value), _known(place, value)) for place, value in code_inside(patcher, modules, options)]


def unknown_functions(patcher: Any, modules: Mapping[str, nn.Module], options: Mapping[str, Any] | None = None) -> list[tuple[str, Any]]:
    """What of :func:`code_inside` nobody knows."""
    if trust_patches():
        return []
    return [(place, value) for place, value in code_inside(patcher, modules, options) if _known(place, value) is None]


def wants_whole_batch(patcher: Any, modules: Mapping[str, nn.Module], options: Mapping[str, Any] | None = None) -> bool:
    """Some code inside the model may tell the rows of the batch, so every rank needs all of them."""
    code = foreign_code(patcher, modules, options)
    return not trust_patches() and any(found.known is None or not found.known.rows_apart for found in code)


def gets_whole_data(patcher: Any, modules: Mapping[str, nn.Module], options: Mapping[str, Any] | None = None) -> bool:
    """Some code inside the model may need all tokens, and as much memory as on one device."""
    code = foreign_code(patcher, modules, options)
    return not trust_patches() and any(found.known is None or not found.known.parts_apart for found in code)


def foreign_inside(patcher: Any, modules: Mapping[str, nn.Module]) -> Foreign:
    """What of the code inside a model gets whole data.

    Args:
        modules: the model's, by their paths; its patches are in place.
    """
    if trust_patches():
        return Foreign(trusted=True)
    found: dict[str, str] = {}
    for place, value in _placed(patcher, modules).items():
        if not _parts_apart(place, value):
            found |= dict.fromkeys(_owners(patcher.model.diffusion_model, place, value), name_of(value))
    return Foreign(found, lambda place, function: None if _parts_apart(place, function) else name_of(function))


def _is_foreign_forward(module: nn.Module) -> bool:
    forward = vars(module)["forward"]
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        # ComfyUI leaves the module's own forward in this place when it takes a patch out
        return False
    # the host's own: LoRAs beside the weights instead of in them
    return not (getattr(forward, "__module__", None) or "").startswith("comfy.weight_adapter")


def _owners(model: nn.Module, path: str, value: Any) -> list[str]:
    """Paths of the modules whose computing is another's once ``value`` lies at ``path``."""
    if isinstance(value, nn.ModuleList):
        return [f"{path}.{i}" for i in range(len(value))]
    names, module = [], model
    for name in path.split("."):
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            break
        names.append(name)
        module = child
    return [".".join(names)] if names else []


def check_patches(patcher: Any) -> None:
    """Refuse a patch that computes on a part of the tokens and cannot be given all of them.

    Raises:
        SPError: names the patch and where it sits.
    """
    model: nn.Module = patcher.model.diffusion_model
    for path, function in patcher.object_patches.items():
        parent, _, name = path.rpartition(".")
        if path != CLASS and parent == "diffusion_model" and callable(getattr(type(model), name, None)):
            raise SPError(
                f"the model's own {name} is replaced ({name_of(function)}), which then computes on a part of the tokens; "
                "remove the node that replaces it"
            )


def methods_set_on(model: nn.Module) -> list[str]:
    """Methods of a model's class in whose place somebody has set a function on the model, without ComfyUI's knowledge."""
    placed = {name: value for name, value in vars(model).items() if callable(value) and callable(getattr(type(model), name, None))}
    return [name for name, value in placed.items() if getattr(value, "__func__", None) is not getattr(type(model), name)]


def _parts_apart(place: str, function: Any) -> bool:
    known = _known(place, function)
    return known is not None and known.parts_apart


def _known(place: str, function: Any) -> Known | None:
    name, _, module = name_of(function).partition(" of ")
    return next((known for known in KNOWN if place.endswith(known.place) and known.name == name and module.endswith(known.module)), None)
