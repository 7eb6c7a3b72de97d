"""Makes ComfyUI know the models of this folder: detection, configuration, LoRA files.

ComfyUI's own detection is asked first, and this extension's only where ComfyUI finds nothing. So
other models are detected as before, and a ComfyUI that learns LongCat-Video itself uses its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_MARK = "_sp_registered"


def register_models() -> bool:
    """Register with the ComfyUI of this process. Harmless when repeated; never raises.

    Returns:
        whether the models can be loaded.
    """
    try:
        _register()
    except Exception as error:  # a host that changed must still start: its own models do not depend on this
        log.warning("LongCat-Video cannot be loaded with this ComfyUI (%s: %s); everything else works", type(error).__name__, error)
        return False
    return True


def _register() -> None:
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_detection
    import comfy.supported_models

    from .longcat import keys
    from .longcat import lora as lora_files
    from .longcat.config import LongCatAvatarConfig, LongCatVideo, LongCatVideoConfig

    detection: Any = comfy.model_detection
    if hasattr(detection.detect_unet_config, _MARK):
        return

    def detect(original: Callable[..., Any], state_dict: Any, key_prefix: str, *args: Any, **kwargs: Any) -> Any:
        found = original(state_dict, key_prefix, *args, **kwargs)
        return keys.detect(state_dict, key_prefix) if found is None else found

    def convert_lora(original: Callable[..., Any], lora: Any, *args: Any, **kwargs: Any) -> Any:
        return original(lora_files.convert_lora(lora) if lora_files.is_official(lora) else lora, *args, **kwargs)

    def lora_keys(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        key_map = original(model, *args, **kwargs)
        if isinstance(model, LongCatVideo):
            shapes = {key: value.shape for key, value in model.state_dict().items()}
            key_map |= lora_files.key_aliases(shapes)
        return key_map

    for config in (LongCatVideoConfig, LongCatAvatarConfig):
        if config not in comfy.supported_models.models:
            comfy.supported_models.models.append(config)
    _wrap(comfy.lora_convert, "convert_lora", convert_lora)
    _wrap(comfy.lora, "model_lora_keys_unet", lora_keys)
    _wrap(detection, "detect_unet_config", detect)


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(module, name, wrapped)
