"""LongCat-Video as ComfyUI sees a model: configuration, sampling, conditioning frames. Needs ComfyUI."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.supported_models
import torch
from torch import Tensor

from .keys import to_official
from .model import LongCatVideoModel


class LongCatVideo(comfy.model_base.WAN22):
    """Conditioning frames as Wan 2.2 5B has them: a noise mask of zeros over clean latents, a timestep a frame."""

    def __init__(self, model_config: Any, model_type: Any = comfy.model_base.ModelType.FLOW, device: Any = None) -> None:
        # skips the constructors of Wan's classes, which make Wan's transformer
        super(comfy.model_base.WAN21, self).__init__(model_config, model_type, device=device, unet_model=LongCatVideoModel)
        self.image_to_video = False

    def concat_cond(self, **kwargs: Any) -> None:
        """No extra channels: conditioning lies in the first frames."""

    def process_timestep(self, timestep: Tensor, x: Tensor | None = None, denoise_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """(B,) or, with a mask, (B, F); rounded as in the model's training, where timesteps were bf16."""
        timestep = super().process_timestep(timestep, x=x, denoise_mask=denoise_mask, **kwargs)
        return timestep.to(torch.bfloat16).to(timestep.dtype)


class LongCatVideoConfig(comfy.supported_models.WAN21_T2V):
    """Wan 2.1's latents, VAE and umT5; the transformer and the schedule's shift are LongCat's."""

    unet_config = {"image_model": "longcat_video"}  # noqa: RUF012 (the host's convention)
    sampling_settings = {"shift": 12.0}  # noqa: RUF012
    # fp16 overflows in a transformer of this depth that was trained in bf16
    supported_inference_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        self.memory_usage_factor = unet_config["hidden_size"] / 2222

    def get_model(self, state_dict: dict[str, Any], prefix: str = "", device: Any = None) -> LongCatVideo:
        return LongCatVideo(self, device=device)

    def process_unet_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return to_official(state_dict)
