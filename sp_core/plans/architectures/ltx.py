"""LTX-Video and LTX-2 (audio-video): keyframes, guides, inpainting, STG, modality switches, reference audio.

The video is split, audio and text are replicated. The model prepares timesteps from all tokens,
before they are sharded: prompt modulation and the audio-video gates take a maximum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..host_functions import HostFunctions
from ..ltx_arguments import compressed_timestep, item, rope_tables
from ..plan import Attention, Blocks, HookPoint, MaskRule, SequencePlan, input_tiles
from ..shard_rules import by_token


def _guide_attention(module: nn.Module, host: HostFunctions) -> Callable[..., Tensor]:
    """ComfyUI's attention for guide masks: it picks queries by their places among all tokens, so it runs on all tokens."""
    return host.guide_mask_attention


def _stg(options: Mapping[str, Any]) -> bool:
    """Spatio-temporal guidance passes the values through: nothing attends."""
    return bool(options.get("stg_skip_self_attn"))


def _no_video(options: Mapping[str, Any]) -> bool:
    return not options.get("run_vx", True)


_SELF = Attention("attn1", skipped=_stg, mask=MaskRule("mask", "self_attention_mask", _guide_attention, in_raster=True))

LTXV = SequencePlan(
    architecture="LTXVModel",
    strict=True,
    title="LTX-Video",
    covers="text and image to video, guides and keyframes, masks",
    # timestep: (B, 1 or T, 6 C); pe: (table (B, T, H, D / 2, 2, 2), flag)
    blocks=(Blocks("transformer_blocks", "x", (_SELF,), {"timestep": by_token(1), "pe": rope_tables}),),
    hook_points=(HookPoint("_process_output", {"embedded_timestep": by_token(1)}), HookPoint("proj_out", gather=True)),
    tiles=input_tiles,
)

_AV_SHARD = {
    "v_timestep": compressed_timestep,
    "v_pe": rope_tables,
    "v_cross_pe": rope_tables,
    "v_cross_scale_shift_timestep": compressed_timestep,
    "v_cross_gate_timestep": compressed_timestep,
}

LTXAV = SequencePlan(
    architecture="LTXAVModel",
    strict=True,
    title="LTX-2 / 2.3",
    covers="with and without audio, guides and keyframes, masks",
    blocks=(Blocks("transformer_blocks", "x", (_SELF, Attention("video_to_audio_attn", "replicated_queries")), _AV_SHARD, stream_item=0),),
    hook_points=(HookPoint("_process_output", {"embedded_timestep": item(0, compressed_timestep)}), HookPoint("proj_out", gather=True)),
    tiles=input_tiles,
    skips_stream=_no_video,
    # text connectors: called once for each conditioning, outside the forward
    weight_methods=("preprocess_text_embeds",),
)
