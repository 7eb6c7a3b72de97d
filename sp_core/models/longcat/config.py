"""LongCat-Video as ComfyUI sees a model: configuration, sampling, conditioning frames. Needs ComfyUI."""

from __future__ import annotations

from typing import Any

import comfy.conds
import comfy.model_base
import comfy.supported_models
import torch
from torch import Tensor

from .avatar import LongCatAvatarModel
from .keys import AVATAR, VIDEO, to_official
from .kv_cache import HOOKS, KV_CACHE
from .model import LongCatVideoModel


class LongCatVideo(comfy.model_base.WAN22):
    """Conditioning frames as Wan 2.2 5B has them: a noise mask of zeros over clean latents, a timestep a frame."""

    transformer: type[LongCatVideoModel] = LongCatVideoModel

    def __init__(self, model_config: Any, model_type: Any = comfy.model_base.ModelType.FLOW, device: Any = None) -> None:
        # skips the constructors of Wan's classes, which make Wan's transformer
        super(comfy.model_base.WAN21, self).__init__(model_config, model_type, device=device, unet_model=self.transformer)
        self.image_to_video = False

    def concat_cond(self, **kwargs: Any) -> None:
        """No extra channels: conditioning lies in the first frames."""

    def process_timestep(self, timestep: Tensor, x: Tensor | None = None, denoise_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """(B,) or, with a mask, (B, F); rounded as in the model's training, where timesteps were bf16."""
        timestep = super().process_timestep(timestep, x=x, denoise_mask=denoise_mask, **kwargs)
        return timestep.to(torch.bfloat16).to(timestep.dtype)

    def _apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Tells the cache which hooks of a conditioning change the weights just now: a LoRA, at the strength of this step."""
        options = {} if transformer_options is None else transformer_options
        hooks = getattr(self.current_patcher, "current_hooks", None)
        if KV_CACHE in options and hooks is not None:
            options = {**options, HOOKS: tuple((id(hook.hook_ref), float(hook.strength)) for hook in hooks.hooks)}
        return super()._apply_model(x, t, c_concat, c_crossattn, control, options, **kwargs)  # type: ignore[no-any-return]


#: conditioning values of LongCat Avatar Conditioning, beside the audio and the reference frame
PEOPLE_MASKS, REFERENCE_FRAME, HIDDEN_AROUND = "longcat_people_masks", "longcat_reference_frame", "longcat_hidden_around"
#: conditioning value: what the model sees in the place of the latent's clean first frames, which are what comes out
SAMPLED_START = "longcat_sampled_start"
#: audio features a frame of Avatar 1.0 (layers x channels of wav2vec2-base)
AVATAR_10_FEATURES = 12 * 768


class LongCatAvatar(LongCatVideo):
    """Conditioning values have the names that the host's other talking models have, where these have any."""

    transformer = LongCatAvatarModel

    def __init__(self, model_config: Any, model_type: Any = comfy.model_base.ModelType.FLOW, device: Any = None) -> None:
        super().__init__(model_config, model_type, device)
        # the reference frame is one frame more
        self.memory_usage_factor_conds = ("reference_latent",)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        out = super().extra_conds(**kwargs)
        for name, argument in (("audio_embed", "audio_embed"), (PEOPLE_MASKS, "people_masks")):
            if kwargs.get(name) is not None:
                out[argument] = comfy.conds.CONDRegular(kwargs[name])
        if (start := kwargs.get(SAMPLED_START)) is not None:
            out["sampled_start"] = comfy.conds.CONDRegular(self.process_latent_in(start))
        if (references := kwargs.get("reference_latents")) is not None:
            out["reference_latent"] = comfy.conds.CONDRegular(self.process_latent_in(references[-1][:, :, :1]))
            for name, argument in ((REFERENCE_FRAME, "reference_frame"), (HIDDEN_AROUND, "hidden_around")):
                if kwargs.get(name) is not None:
                    out[argument] = comfy.conds.CONDConstant(kwargs[name])
        return out

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, Any]:
        references = kwargs.get("reference_latents")
        return {} if references is None else {"reference_latent": list(references[-1][:, :, :1].shape)}


class LongCatVideoConfig(comfy.supported_models.WAN21_T2V):
    """Wan 2.1's latents, VAE and umT5; the transformer and the schedule's shift are LongCat's."""

    unet_config = {"image_model": VIDEO}  # noqa: RUF012 (the host's convention)
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


class LongCatAvatarConfig(LongCatVideoConfig):
    """Avatar 1.0 and 1.5; 1.5 was trained with another shift."""

    unet_config = {"image_model": AVATAR}  # noqa: RUF012

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        first = unet_config["audio_features"] == AVATAR_10_FEATURES
        self.sampling_settings = {"shift": 12.0 if first else 7.0}

    def get_model(self, state_dict: dict[str, Any], prefix: str = "", device: Any = None) -> LongCatAvatar:
        return LongCatAvatar(self, device=device)
