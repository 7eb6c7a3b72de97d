"""Wan Animate 2: each frame attends to all tokens and to one frame of the pose video, which is a stream of its own beside the video's.

Every rank computes the pose video's stream in full, in the first step only where WanAnimate2Cache keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..host_functions import HostFunctions
from ..plan import Attention, Blocks, MaskRule, flat_layout
from ..shard_rules import by_frame, by_token, first_tokens
from .wan import WAN


def _attend_to_poses(module: nn.Module, host: HostFunctions) -> Callable[..., Tensor]:
    def attend(
        q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, heads: int, poses: Mapping[str, Tensor], precision: object, options: object
    ) -> Tensor:
        """The first frame is the reference picture, and has no pose."""
        k_poses, v_poses = poses["k_pose"].flatten(2), poses["v_pose"].flatten(2)
        tokens = q_BTC.size(1)
        frame = tokens - k_poses.size(1)
        k, v = (torch.cat([own, pose[:, :frame]], dim=1) for own, pose in ((k_BTC, k_poses), (v_BTC, v_poses)))
        out = [host.optimized_attention(q_BTC[:, :frame], k_BTC, v_BTC, heads, transformer_options=options)]
        for start in range(frame, tokens, frame):
            k[:, tokens:], v[:, tokens:] = k_poses[:, start - frame : start], v_poses[:, start - frame : start]
            out.append(host.optimized_attention(q_BTC[:, start : start + frame], k, v, heads, transformer_options=options))
        return torch.cat(out, dim=1)

    return attend


_POSES = MaskRule("k_pose", "k_pose", _attend_to_poses, withheld=True, together_with=("v_pose",), heads_dim=2)
ANIMATE2 = replace(
    WAN,
    architecture="WanAnimate2Model",
    title="Wan Animate 2",
    strict=False,
    covers="pose videos, reference picture, their strengths; with WanAnimate2Cache the pose video costs the first step only",
    blocks=(
        Blocks(
            "blocks",
            "x",
            (Attention("self_attn", mask=_POSES, method="forward_gen"),),
            # hw: tokens of the reference picture, which are the first
            {"e": by_frame(1), "freqs": by_token(1), "hw": first_tokens},
            method="forward_gen",
        ),
    ),
    choose_layout=flat_layout,
    tiles=None,
)
