"""LTX-Video and LTX-2 (audio-video): keyframes, guides, inpainting, STG, modality switches, reference audio.

The video is split, audio and text are whole on every rank. Timesteps are prepared on all
tokens before the cut: prompt modulation and the audio-video gates take a maximum over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..plan import Attention, Blocks, HookPoint, SequencePlan, input_tiles
from ..shard_rules import by_token, compressed_timestep, item, rope_tables


def _guide_attention(module: nn.Module) -> Callable[..., Tensor]:
    """The host's attention for guide masks: it cuts the queries by whole-sequence positions, so it runs on whole sequences."""
    return sys.modules[type(module).__module__]._attention_with_guide_mask  # type: ignore[no-any-return]


def _stg(options: Mapping[str, Any]) -> bool:
    """Spatio-temporal guidance passes the values through: nothing attends."""
    return bool(options.get("stg_skip_self_attn"))


def _no_video(options: Mapping[str, Any]) -> bool:
    return not options.get("run_vx", True)


_SELF = Attention("attn1", skipped=_stg, mask_attention=_guide_attention, mask_in_raster=True)

LTXV = SequencePlan(
    architecture="LTXVModel",
    # timestep: (B, 1 or T, 6 C); pe: (table (B, T, H, D / 2, 2, 2), flag)
    blocks=(Blocks("transformer_blocks", "x", (_SELF,), {"timestep": by_token(1), "pe": rope_tables}),),
    sites=(HookPoint("_process_output", {"embedded_timestep": by_token(1)}), HookPoint("proj_out", gather=True)),
    tiles=input_tiles,
)

_AV_CUTS = {
    "v_timestep": compressed_timestep,
    "v_pe": rope_tables,
    "v_cross_pe": rope_tables,
    "v_cross_scale_shift_timestep": compressed_timestep,
    "v_cross_gate_timestep": compressed_timestep,
}

LTXAV = SequencePlan(
    architecture="LTXAVModel",
    blocks=(Blocks("transformer_blocks", "x", (_SELF, Attention("video_to_audio_attn", "from_stream")), _AV_CUTS, stream_item=0),),
    sites=(HookPoint("_process_output", {"embedded_timestep": item(0, compressed_timestep)}), HookPoint("proj_out", gather=True)),
    tiles=input_tiles,
    idle=_no_video,
    # text connectors: called once for each conditioning, outside the forward
    weight_methods=("preprocess_text_embeds",),
)
