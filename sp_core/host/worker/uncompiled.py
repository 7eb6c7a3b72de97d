"""Takes out of a replayed MODEL what torch.compile made, so that the plan finds the modules that it names."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..compiled import is_compiled, log_dropped, original


def uncompile(patcher: Any) -> None:
    """Put into a MODEL, before it is loaded, what its compiled parts were made of: in its object patches and in the model."""
    dropped = _uncompile_patches(patcher)
    for module in list(patcher.model.modules()):
        dropped |= _uncompile_parts(module)
    if dropped:
        log_dropped()


def _uncompile_patches(patcher: Any) -> bool:
    import comfy.utils

    compiled = {path: original(value) for path, value in patcher.object_patches.items() if is_compiled(value)}
    for path, inner in compiled.items():
        there = patcher.object_patches_backup.get(path)
        if inner == (comfy.utils.get_attr(patcher.model, path) if there is None else there):
            del patcher.object_patches[path]
        else:
            patcher.object_patches[path] = inner
    return bool(compiled)


def _uncompile_parts(module: nn.Module) -> bool:
    compiled = {name: original(child) for name, child in module._modules.items() if is_compiled(child)}
    module._modules.update(compiled)
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    if in_place:
        module._compiled_call_impl = None
    forward = module.__dict__.get("forward")
    # the object that torch.compile made of a module has such a forward as well, and nobody calls it any more
    if forward is None or not is_compiled(forward) or is_compiled(module):
        return bool(compiled) or in_place
    del module.forward
    if original(forward) != module.forward:
        module.forward = original(forward)
    return True
