"""Weights of blocks as ComfyUI would bring them to the device, taken block by block to be shared out over the ranks.

Between two forwards the model has its own weights in main memory, unpatched, as ComfyUI left them. So whatever reads
or patches weights outside of a forward finds them: nodes that are replayed, merges, unloading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...mapped_file import give_back_freed, let_pages_go
from ...weights import SharedWeights
from ...weights.block import BlockShard, Place, places_of
from ...weights.tensors import Apart, NotShareable, take_apart
from . import comfy_memory


def share(patcher: Any, blocks: list[nn.Module], rank: int, ranks: int, device: torch.device, behind: Callable[[], None]) -> SharedWeights:
    """This rank's part of every block, with the patches of ``patcher`` as ComfyUI applies them. No more than a block is on the device.

    Args:
        behind: called behind each block.
    """
    names = {id(module): name for name, module in patcher.model.named_modules()}
    patched = comfy_memory.patched_modules(patcher)
    shards, kept = [], dict[str, None]()
    for number, block in enumerate(blocks):
        weights: dict[int, tuple[list[Place], Apart]] = {}
        for place in places_of(block):
            known = weights.get(id(place.weight))
            if known is not None:  # tied
                known[0].append(place)
                continue
            try:
                apart = _on_the_device(patcher, place, f"{names[id(place.module)]}.{place.name}", id(place.module) in patched, device)
            except NotShareable as error:
                kept[str(error)] = None
                continue
            weights[id(place.weight)] = ([place], apart)
        shards.append(BlockShard(number, weights.values(), rank, ranks, device))
        # what was read of a file, which has it still
        let_pages_go(weight for place in places_of(block) if (weight := place.weight).device.type == "cpu" and type(weight) is nn.Parameter)
        give_back_freed()
        behind()
    return SharedWeights(shards, ranks, list(kept))


def _on_the_device(patcher: Any, place: Place, key: str, is_patched: bool, device: torch.device) -> Apart:
    """A weight as ComfyUI would have it on the device; the model keeps its own."""
    own = place.weight
    # what ComfyUI's loading has patched already lies in the model
    if not (is_patched and key in patcher.patches) or key in patcher.backup:
        return take_apart(_in_models_dtype(place, own))
    attributes = dict(vars(own))
    try:
        comfy_memory.patch_weight(patcher, key, device)
        return take_apart(_in_models_dtype(place, place.weight))
    finally:
        place.weight = own
        patcher.backup.pop(key, None)
        # ComfyUI-GGUF notes a patch at the weight itself
        vars(own).clear()
        vars(own).update(attributes)


def _in_models_dtype(place: Place, weight: Tensor) -> Tensor:
    """Under dynamic VRAM weights lie in the file's dtype until they are used."""
    dtype = getattr(place.module, f"{place.name}_comfy_model_dtype", None)
    return weight.to(dtype) if dtype is not None and type(weight) in (Tensor, nn.Parameter) else weight


@contextlib.contextmanager
def left_out(patcher: Any, blocks: list[nn.Module]) -> Iterator[None]:
    """While ComfyUI loads the model, its blocks have no weights, so that only the others go to the device.

    Dynamic VRAM brings no weight to the device that is not used there, so there nothing needs to be left out.
    """
    if comfy_memory.is_dynamic(patcher):
        yield
        return
    # a clone that is loaded has its patches in these weights, and takes them out while another one is loaded
    comfy_memory.unload(patcher)
    size, patcher.size = patcher.size, 0
    modules = [module for block in blocks for module in block.modules()]
    places = [place for block in blocks for place in places_of(block) if type(place.weight) is not Tensor]
    own = [place.weight for place in places]
    try:
        for place, weight in zip(places, own, strict=True):
            place.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=weight.device), requires_grad=False)
        for module in modules:
            vars(module)["comfy_patched_weights"] = True  # so ComfyUI takes them for loaded
        yield
    finally:
        for place, weight in zip(places, own, strict=True):
            place.weight = weight
        for module in modules:
            vars(module).pop("comfy_patched_weights", None)
        patcher.size = size
