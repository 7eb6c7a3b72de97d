"""A worker's weights in main memory are the pages of the checkpoint's file, or a copy that all workers of the machine share.

ComfyUI copies each weight out of the file where it has no dynamic VRAM, as on CPU workers, so each process would have a
copy. Here a weight that the file has in the model's dtype stays in the file, and one that has to be cast is cast by the
worker that comes first. What does not lie in a file is loaded as ComfyUI loads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...copy_store import CopyStore
from ...mapped_file import FileRange, Mappings, give_back_freed, let_pages_go

log = logging.getLogger(__name__)

#: whose loading of a state dict is torch's own, given that ComfyUI has no dynamic VRAM
_PLAIN_LOADING = ("disable_weight_init.Linear._load_from_state_dict", "disable_weight_init.Embedding._load_from_state_dict")


def install(directory: str | Path) -> None:
    """From now on this process's diffusion models share their weights' memory. For a worker's own process."""
    import comfy.model_base

    if not CopyStore.available():
        return
    kind = comfy.model_base.BaseModel
    kind.load_model_weights = _loading(kind.load_model_weights, directory)


def _loading(load: Callable[..., Any], directory: str | Path) -> Callable[..., Any]:
    def load_model_weights(self: Any, sd: dict[str, Any], unet_prefix: str = "", assign: bool = False) -> Any:
        model = self.diffusion_model
        if assign:  # nothing is copied
            return load(self, sd, unet_prefix, assign)
        model.load_state_dict = partial(_load_state_dict, model, directory)
        try:
            return load(self, sd, unet_prefix, assign)
        finally:
            del model.load_state_dict

    return load_model_weights


def _load_state_dict(model: nn.Module, directory: str | Path, weights: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """torch's ``load_state_dict``, but for weights that need no copy of this process's own."""
    mappings = Mappings()
    owners = {path: module for path, module in model.named_modules() if _loads_plainly(module)}
    there, stores = set(), dict[str, CopyStore]()
    cast: list[Tensor] = []
    for name, weight in weights.items():
        path, _, own = name.rpartition(".")
        old = owners[path]._parameters.get(own) if path in owners else None
        if old is None or not _same_kind(old, weight):
            continue
        try:
            if (found := mappings.range_of(weight)) is None:
                continue
            if weight.dtype == old.dtype and _is_aligned(weight):
                new = weight
            else:
                new = _cast(weight, old.dtype, found, directory, stores)
                cast.append(weight)
        except OSError as error:
            log.warning("weights are copied by each worker: %s", error)
            break
        owners[path]._parameters[own] = nn.Parameter(new, requires_grad=old.requires_grad)
        there.add(name)
    let_pages_go(cast)
    give_back_freed()
    for store in stores.values():
        weakref.finalize(model, store.close)
    rest = {name: weight for name, weight in weights.items() if name not in there}
    result = type(model).load_state_dict(model, rest, *args, **kwargs)
    missing = [name for name in result.missing_keys if name not in there]
    return type(result)(missing, result.unexpected_keys)


def _loads_plainly(module: nn.Module) -> bool:
    how = type(module)._load_from_state_dict
    if how is not nn.Module._load_from_state_dict and not (how.__module__ == "comfy.ops" and how.__qualname__ in _PLAIN_LOADING):
        return False
    return not module._load_state_dict_pre_hooks


def _same_kind(old: nn.Parameter, new: Any) -> bool:
    """A weight of the checkpoint can be had without torch's loading."""
    plain = type(old) is nn.Parameter and type(new) is Tensor and old.device.type == "cpu" and not old.is_meta
    return plain and old.shape == new.shape and old.dtype.is_floating_point == new.dtype.is_floating_point


def _is_aligned(weight: Tensor) -> bool:
    return weight.data_ptr() % weight.element_size() == 0


def _cast(weight: Tensor, dtype: torch.dtype, found: FileRange, directory: str | Path, stores: dict[str, CopyStore]) -> Tensor:
    status = os.stat(found.path)
    group = f"{found.path} {status.st_ino} {status.st_mtime_ns}"
    if group not in stores:
        stores[group] = CopyStore(directory, group)
    place = stores[group].range_of(f"{found.offset} {weight.dtype} {dtype}", lambda: weight.to(dtype, copy=True).contiguous())
    return place.mapped().view(dtype).view(weight.shape)


def places(module: nn.Module) -> list[list[Any]]:
    """Where weights of a model lie in files: [name, path, inode, offset, bytes]."""
    mappings, found = Mappings(), []
    for name, weight in module.named_parameters():
        if type(weight) is nn.Parameter:
            with contextlib.suppress(OSError):
                place = mappings.range_of(weight)
                if place is not None:
                    found.append([name, place.path, place.inode, place.offset, place.nbytes])
    return found
