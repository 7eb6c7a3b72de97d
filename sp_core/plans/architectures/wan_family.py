"""Models built on Wan: control (VACE), camera, sound (S2V, HuMo), performance (Animate, SCAIL).

Sound and performance models attend frame by frame to something else: every rank then holds a
tile of every frame, so a frame's tokens are still equally many and in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import SPError
from ...layout import SequenceLayout, TileLayout
from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, flat_layout
from ..shard_rules import by_frame, by_token
from .wan import WAN

_SELF = Attention("self_attn")


def _frame(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of a frame in tokens; the models pad to whole patches."""
    height, width = arguments["input"].shape[-2:]
    return -(-height // model.patch_size[1]), -(-width // model.patch_size[2])  # type: ignore[index, operator]


def _whole_frames(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles of tokens that are all frames of one size; reference pictures count as frames.

    Raises:
        SPError: the tokens are no whole number of frames.
    """
    height, width = _frame(model, arguments)
    if tokens % (height * width):
        raise SPError(f"The {tokens} tokens are no whole frames of {height} x {width}, so they cannot be shared")
    return TileLayout.over((tokens // (height * width), height, width), world_size)


def _video_first(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles of the video's tokens; a reference picture and motion of other sizes lie behind them."""
    height, width = _frame(model, arguments)
    frames = arguments["input"].size(2)
    return TileLayout.over((frames, height, width), world_size, suffix=tokens - frames * height * width)


def _video_tokens(_: int, state: ForwardState) -> int:
    """How many of this rank's tokens are the video's."""
    layout = state.layout
    assert isinstance(layout, TileLayout)
    return prod(layout.local_grid(state.rank))


def _sound(audio: Tensor, state: ForwardState) -> Tensor:
    """HuMo's sound, (B, 16 a frame, C), with as many frames as the tokens have.

    Without sound ComfyUI makes one frame too many, and all frames are alike.

    Raises:
        SPError: the frames are too many or too few, and they differ.
    """
    layout = state.layout
    assert isinstance(layout, TileLayout)
    frames = rearrange(audio, "B (F s) C -> B F s C", s=16)
    if frames.size(1) == layout.grid[0]:
        return audio
    if not torch.allclose(frames, frames[:, :1].expand_as(frames), rtol=1e-4, atol=1e-5):
        raise SPError(f"The sound has {frames.size(1)} frames and the video {layout.grid[0]}, so they cannot be shared between devices")
    return rearrange(frames[:, :1].expand(-1, layout.grid[0], -1, -1), "B F s C -> B (F s) C")


_UNMODULATED = replace(
    WAN,
    # one timestep for all frames, e: (B, 6, C)
    blocks=(Blocks("blocks", "x", (_SELF,), {"freqs": by_token(1)}),),
    hook_points=(HookPoint("head", gather=True),),
    choose_layout=flat_layout,
    tiles=_whole_frames,
)
_FRAMED = replace(WAN, choose_layout=_whole_frames, tiles=_whole_frames, only_tiles=True)

# control blocks have a stream of their own for each control video; the main stream reaches them as the model was given it
_CONTROL = Blocks("vace_blocks", "c", (_SELF,), {"x": by_token(1), "freqs": by_token(1)}, own_stream=True)
VACE = replace(
    _UNMODULATED,
    architecture="VaceWanModel",
    title="Wan VACE",
    covers="one and several control videos, reference pictures",
    blocks=(*_UNMODULATED.blocks, _CONTROL),
)
CAMERA = replace(_UNMODULATED, architecture="CameraWanModel", title="Wan Fun Camera", covers="camera paths, first frame")
SCAIL = replace(WAN, architecture="SCAILWanModel", title="SCAIL", covers="poses, reference pictures", choose_layout=flat_layout, tiles=None)
SCAIL2 = replace(SCAIL, architecture="SCAIL2WanModel", title="SCAIL-2", covers="poses, masks, reference pictures")
HUMO = replace(
    _FRAMED,
    architecture="HumoWanModel",
    title="HuMo",
    covers="sound, reference pictures",
    blocks=(Blocks("blocks", "x", (_SELF,), {"e": by_frame(1), "freqs": by_token(1), "audio": _sound}),),
)
ANIMATE = replace(_FRAMED, architecture="AnimateWanModel", title="Wan Animate", covers="pose and face videos")
S2V = replace(
    _FRAMED,
    architecture="WanModel_S2V",
    title="Wan S2V",
    covers="sound, reference picture, control video, motion",
    # the audio injector works on the first seq_len tokens, frame by frame
    hook_points=(HookPoint("audio_injector", {"seq_len": _video_tokens}), HookPoint("head", {"e": by_frame(1)}, gather=True)),
    choose_layout=_video_first,
    tiles=_video_first,
)

WAN_FAMILY = (VACE, CAMERA, SCAIL, SCAIL2, HUMO, ANIMATE, S2V)
