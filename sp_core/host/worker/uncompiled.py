"""Takes out of a replayed MODEL what torch.compile made, so that the plan finds the modules that it names."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..compiled import COMPILE_ARGUMENTS, COMPILE_KEY, WISH, asked_for, is_compiled, original, plain_wish

#: WrappersMP.APPLY_MODEL of ComfyUI
_APPLY_MODEL = "apply_model"


def uncompile(patcher: Any) -> dict[str, Any] | None:
    """Put into a MODEL, before it is loaded, what its compiled parts were made of: in its object patches and in the model.

    Returns:
        what was asked of torch.compile (:func:`..compiled.plain_wish`); None where nothing was.
    """
    wishes = _uncompile_patches(patcher)
    for module in list(patcher.model.modules()):
        wishes += _uncompile_parts(module)
    if patcher.wrappers.get(_APPLY_MODEL, {}).get(COMPILE_KEY):
        return plain_wish(patcher.model_options.get(COMPILE_ARGUMENTS))
    if wishes:
        # the next load of the same MODEL finds nothing that is compiled any more
        patcher.attachments[WISH] = wishes[0]
    return patcher.attachments.get(WISH)  # type: ignore[no-any-return]


def _uncompile_patches(patcher: Any) -> list[dict[str, Any]]:
    import comfy.utils

    compiled = {path: value for path, value in patcher.object_patches.items() if is_compiled(value)}
    for path, value in compiled.items():
        inner = original(value)
        there = patcher.object_patches_backup.get(path)
        if inner == (comfy.utils.get_attr(patcher.model, path) if there is None else there):
            del patcher.object_patches[path]
        else:
            patcher.object_patches[path] = inner
    return [asked_for(value) for value in compiled.values()]


def _uncompile_parts(module: nn.Module) -> list[dict[str, Any]]:
    compiled = {name: child for name, child in module._modules.items() if is_compiled(child)}
    module._modules.update({name: original(child) for name, child in compiled.items()})
    wishes = [asked_for(child) for child in compiled.values()]
    if getattr(module, "_compiled_call_impl", None) is not None:
        wishes.append(asked_for(module._compiled_call_impl))
        module._compiled_call_impl = None
    forward = module.__dict__.get("forward")
    # the object that torch.compile made of a module has such a forward as well, and nobody calls it any more
    if forward is None or not is_compiled(forward) or is_compiled(module):
        return wishes
    del module.forward
    if original(forward) != module.forward:
        module.forward = original(forward)
    return [*wishes, asked_for(forward)]
