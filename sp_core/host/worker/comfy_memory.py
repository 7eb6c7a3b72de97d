"""ComfyUI's memory management as a worker uses it: models on the device, what they hold, what is to spare."""

from __future__ import annotations

from typing import Any


def share_pinned_memory(processes: int) -> None:
    """Limit this process to its share of the memory to pin (``model_management.MAX_PINNED_MEMORY``), as one of ``processes``."""
    import comfy.model_management as management

    if management.MAX_PINNED_MEMORY > 0:
        management.MAX_PINNED_MEMORY /= processes


def is_loaded(patcher: Any) -> bool:
    """ComfyUI's memory management counts this model as loaded on its device, wholly or in part."""
    import comfy.model_management as management

    return any(entry.model is patcher for entry in management.current_loaded_models)


def models_to_load(patcher: Any) -> list[Any]:
    """A model and those that it brings along (``get_nested_additional_models``), which ComfyUI loads together with it."""
    return [patcher, *patcher.get_nested_additional_models()]


def clean_up(patcher: Any) -> None:
    """End a sampling run, as ComfyUI's guider does: ``cleanup`` of the model and of those that it brings along."""
    for model in models_to_load(patcher):
        model.cleanup()


def unload(patcher: Any, wholly: bool = True) -> None:
    """Take one model's weights off its device and give the memory back.

    Args:
        wholly: false leaves the copies that dynamic VRAM has in pinned memory, from where the weights are soon back.
    """
    import comfy.model_management as management

    if not wholly and is_loaded(patcher) and getattr(patcher, "is_dynamic", lambda: False)():
        patcher.partially_unload(patcher.offload_device, 1e32)
    elif hasattr(management, "unload_model_and_clones"):
        management.unload_model_and_clones(patcher)
    else:
        # older versions have no such function, and unload_all_models would take the weights of the active model off too
        leaving = models_to_load(patcher)
        loaded = [entry for entry in management.current_loaded_models if entry.model is not None]
        kept = [entry for entry in loaded if not any(model.is_clone(entry.model) for model in leaving)]
        management.free_memory(1e30, patcher.load_device, kept)
    management.soft_empty_cache()


def unload_others(patchers: list[Any]) -> None:
    """Take the weights off the device of every model that is none of ``patchers`` and no clone of one."""
    import comfy.model_management as management

    loaded = [entry.model for entry in management.current_loaded_models]
    for patcher in loaded:
        if patcher is not None and not any(patcher is kept or kept.is_clone(patcher) for kept in patchers):
            unload(patcher)


def loaded_weights(device: Any) -> int:
    """Bytes of weights that ComfyUI's memory management has on ``device``."""
    import comfy.model_management as management

    loaded = (entry for entry in management.current_loaded_models if entry.device == device and entry.model is not None)
    return sum(int(entry.model_loaded_memory()) for entry in loaded)


def spare_memory(patcher: Any) -> int:
    """Bytes of a device that this process holds and could compute in: torch's cache, and under dynamic VRAM the weights."""
    import comfy.model_management as management

    device = patcher.load_device
    if device.type == "cpu":
        return 0
    total, of_torch = management.get_free_memory(device, torch_free_too=True)
    return int(patcher.get_free_memory(device) - (total - of_torch))


def free_memory(device: Any) -> int:
    """Bytes that this process can still have on a device, as ComfyUI counts them."""
    import comfy.model_management as management

    return int(management.get_free_memory(device))


def give_back_freed() -> None:
    """Give memory back to the device that torch keeps for later."""
    import comfy.model_management as management

    management.soft_empty_cache()


def device_memory(device: Any) -> int:
    """Bytes in use on a device. For the CPU these are this process's own."""
    import comfy.model_management as management

    if device.type == "cpu":
        return process_memory()
    return int(management.get_total_memory(device)) - int(management.get_free_memory(device))


def process_memory() -> int:
    """Bytes of main memory that are this process's own. Mapped files do not count where the system tells them apart."""
    import psutil

    info = psutil.Process().memory_info()
    return int(info.rss) - int(getattr(info, "shared", 0))


def is_dynamic(patcher: Any) -> bool:
    """ComfyUI brings each weight of this model to the device when it is used."""
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


def patched_modules(patcher: Any) -> set[int]:
    """Ids of the modules whose weights ComfyUI patches when it loads the model: not all that have weights."""
    if is_dynamic(patcher):
        return {id(entry[-2]) for entry in patcher._load_list(for_dynamic=True)}
    return {id(entry[-2]) for entry in patcher._load_list()}


def patch_weight(patcher: Any, key: str, device: Any) -> None:
    """Put the weight with its patches into the model, on ``device``, in the place of what is there."""
    in_place, patcher.weight_inplace_update = patcher.weight_inplace_update, False
    try:
        patcher.patch_weight_to_device(key, device_to=device)
    finally:
        patcher.weight_inplace_update = in_place


def called_at_loading(patcher: Any) -> list[Any]:
    """Functions that nodes have ComfyUI call when the model's weights are on the device."""
    from comfy.patcher_extension import CallbacksMP

    return list(patcher.get_all_callbacks(CallbacksMP.ON_LOAD))
