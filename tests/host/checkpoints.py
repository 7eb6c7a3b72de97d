"""Tiny checkpoints that only tests need. Run as a script: ``python checkpoints.py <ComfyUI> <folder>``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_WAN = {"model_type": "t2v", "dim": 384, "ffn_dim": 256, "num_heads": 3, "num_layers": 3, "in_dim": 16, "out_dim": 16}
_LTX = {"attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128, "caption_channels": 48, "num_layers": 3}
_LTXAV = {
    **_LTX,
    "audio_attention_head_dim": 16,
    "audio_num_attention_heads": 4,
    "audio_cross_attention_dim": 64,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "use_middle_indices_grid": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
}
#: as LTX 2.3: text comes in at the widths of the two streams, connectors of those widths, gates, prompt modulation
_LTX23 = {
    **_LTXAV,
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "connector_apply_gated_attention": True,
    "connector_attention_head_dim": 32,
    "connector_num_attention_heads": 4,
    "audio_connector_attention_head_dim": 16,
    "audio_connector_num_attention_heads": 4,
    "connector_num_layers": 1,
}
_WAN_CLASS = ("comfy.ldm.wan.model", "WanModel")
_AV_CLASS = ("comfy.ldm.lightricks.av_model", "LTXAVModel")

#: file name -> (module, class, arguments, metadata config or None)
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "tiny_wan22_i2v": (*_WAN_CLASS, {**_WAN, "in_dim": 36}, None),
    "tiny_ltxv_adaln": (
        "comfy.ldm.lightricks.model",
        "LTXVModel",
        {**_LTX, "cross_attention_adaln": True},
        {**_LTX, "cross_attention_adaln": True},
    ),
    "tiny_ltx23": (*_AV_CLASS, _LTX23, _LTX23),
    "tiny_ltx24": (*_AV_CLASS, {**_LTX23, "use_keyframes_abs_pos_embedding": True}, _LTX23),
    # removed and put back by a test
    "tiny_wan_fleeting": (*_WAN_CLASS, _WAN, None),
}


def write(folder: Path, checkpoints: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = CHECKPOINTS) -> None:
    from sp_core.demo.checkpoints import write_all

    write_all(folder, {f"{name}.safetensors": checkpoint for name, checkpoint in checkpoints.items()}, first_seed=100)


if __name__ == "__main__":
    host, target, *families = sys.argv[1:]
    sys.argv[1:] = []
    # after the host's own folder: both have a module called nodes
    sys.path[:0] = [host, str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
    from comfy.cli_args import args

    args.cpu = True
    if families:
        from host.family_checkpoints import FAMILY_CHECKPOINTS

        write(Path(target), {name: FAMILY_CHECKPOINTS[name] for name in families})
    else:
        write(Path(target))
