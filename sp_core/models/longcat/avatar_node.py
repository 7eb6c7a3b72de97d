"""What LongCat Avatar Conditioning does: sound, picture, persons and the video so far, for one piece of a video. Needs ComfyUI.

Shape legend: n frames of a picture or mask, H and W in pixels, F latent frames, P voices, m masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ...errors import SPError
from .audio import Features, windows
from .config import HIDDEN_AROUND, PEOPLE_MASKS, REFERENCE_FRAME, SAMPLED_START
from .patches import conditioning_frames, latent_with_start

_NAME = "LongCat Avatar Conditioning"
#: pixels of a token, and of a latent value; frames of a latent frame after the first
_TOKEN, _STRIDE, _FRAMES = 16, 8, 4
#: how far proportions of masks and picture may lie apart: sizes in whole pixels differ by less
_PROPORTIONS = 0.02


@dataclass(frozen=True)
class Piece:
    """One piece of a video: its size, and what it begins with."""

    width: int
    height: int
    length: int
    #: (n, H, W, 3): how the persons look; the first frame of the video where there is none before it
    image: Tensor | None = None
    #: (n, H, W, 3): all frames that were made so far
    previous: Tensor | None = None
    #: the host's LATENT of the piece before, as it was sampled: what the model goes on from in the place of encoded frames
    previous_latent: dict[str, Any] | None = None
    #: how many of the frames so far are kept as the start of the piece
    kept: int = 13


@dataclass(frozen=True)
class Persons:
    """Masks (1, H, W) of the picture, one for each voice."""

    masks: tuple[Tensor, ...]

    def on(self, width: int, height: int) -> Tensor:
        """(1, m, height, width): person 1, person 2, background, others.

        Raises:
            SPError: a person is too small to be seen on the token grid.
        """
        one, two, *others = (mask[:1].float() for mask in self.masks)
        ordered = torch.stack([_cropped(mask, width, height) for mask in (one, two, ((one + two) == 0).float(), *others)])[None]
        seen = nnf.interpolate(ordered, size=(height // _TOKEN, width // _TOKEN), mode="nearest").amax((0, 2, 3)) > 0
        larger, smaller = "Paint a larger area", "Paint smaller areas for the persons"
        names = (("mask_1", larger), ("mask_2", larger), ("the background that mask_1 and mask_2 leave", smaller), ("mask_3", larger))
        for index, (name, advice) in enumerate(names[: ordered.size(1)]):
            if not seen[index]:
                raise SPError(f"{_NAME}: nothing of {name} is left at {width} x {height}. {advice}")
        return ordered


def _cropped(mask_1HW: Tensor, width: int, height: int) -> Tensor:
    """Resized until it covers the video, then the middle of it: (height, width)."""
    scale = max(height / mask_1HW.size(1), width / mask_1HW.size(2))
    size = max(height, int(mask_1HW.size(1) * scale)), max(width, int(mask_1HW.size(2) * scale))
    resized = nnf.interpolate(mask_1HW[None], size=size, mode="bilinear", align_corners=False)[0, 0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return resized[top : top + height, left : left + width]


def condition(
    positive: Any, negative: Any, vae: Any, piece: Piece, voices: list[Features], persons: Persons | None, reference: tuple[int, int]
) -> tuple[Any, Any, Any, dict[str, Any], int]:
    """What the sampler needs for one piece of a video.

    Args:
        reference: place of the reference frame in time, and how many frames around it do not see it.

    Returns:
        three conditionings (prompt with sound; negative prompt with sound; negative prompt with silence), the host's LATENT with
        its noise mask, and how many of its frames repeat the video so far.

    Raises:
        SPError: the inputs do not fit together.
    """
    import node_helpers

    _check(piece, voices, persons)
    first, start, kept = 0, None if piece.image is None else piece.image[:1], 0
    values: dict[str, Any] = {}
    if piece.previous is not None and piece.image is not None:
        kept = conditioning_frames(piece.previous.size(0), piece.kept)
        start, first = piece.previous[-kept:], piece.previous.size(0) - kept
        values["reference_latents"] = [_encoded(vae, piece.image[:1], piece)]
        values |= {REFERENCE_FRAME: reference[0], HIDDEN_AROUND: reference[1]}
        if piece.previous_latent is not None:
            values[SAMPLED_START] = _sampled_start(piece.previous_latent["samples"], piece, kept)
    latent = latent_with_start(vae, piece.width, piece.height, piece.length, start)
    # a voice's features are a row of its own, behind the batch: (1, P, f, W, layers, channels)
    sound = torch.stack([windows(voice, first, piece.length) for voice in voices])[None]
    if persons is not None:
        values[PEOPLE_MASKS] = persons.on(piece.width, piece.height)
    heard, silent = {**values, "audio_embed": sound}, {**values, "audio_embed": torch.zeros_like(sound)}
    conditionings = [node_helpers.conditioning_set_values(c, v) for c, v in ((positive, heard), (negative, heard), (negative, silent))]
    return conditionings[0], conditionings[1], conditionings[2], latent, kept


def _encoded(vae: Any, picture: Tensor, piece: Piece) -> Tensor:
    import comfy.utils

    pixels = comfy.utils.common_upscale(picture.movedim(-1, 1), piece.width, piece.height, "bilinear", "center").movedim(1, -1)
    return vae.encode(pixels[..., :3])  # type: ignore[no-any-return]


def _sampled_start(samples: Tensor, piece: Piece, kept: int) -> Tensor:
    """The last frames of the piece before, (1, 16, latent frames, height / 8, width / 8)."""
    frames, height, width = (kept - 1) // _FRAMES + 1, piece.height, piece.width
    if samples.size(2) < frames or samples.shape[3:] != (height // _STRIDE, width // _STRIDE):
        raise SPError(
            f"{_NAME}: previous_latent has {samples.size(2)} latent frames of {samples.size(4) * _STRIDE} x {samples.size(3) * _STRIDE} "
            f"pixels, this piece goes on from {frames} of {width} x {height}. Connect the latent of the piece before it"
        )
    return samples[:1, :, -frames:]


def _check(piece: Piece, voices: list[Features], persons: Persons | None) -> None:
    if piece.length % 4 != 1:
        raise SPError(f"{_NAME}: a video has 4 k + 1 frames, {piece.length} are none of these. Use {piece.length // 4 * 4 + 1}")
    if piece.width % _TOKEN or piece.height % _TOKEN:
        raise SPError(f"{_NAME}: width and height are multiples of {_TOKEN}, {piece.width} x {piece.height} are not")
    if piece.previous is not None and piece.image is None:
        raise SPError(f"{_NAME}: a video that goes on needs to know how the persons look. Connect the picture of its start to image")
    if piece.previous_latent is not None and piece.previous is None:
        raise SPError(f"{_NAME}: previous_latent stands for the last of the frames so far. Connect all these to previous_frames")
    if persons is not None:
        _check_persons(piece, voices, persons.masks)
    elif len(voices) > 1:
        raise SPError(f"{_NAME}: several voices need a mask for each person. Connect mask_1 and mask_2")


def _check_persons(piece: Piece, voices: list[Features], masks: tuple[Tensor, ...]) -> None:
    if len(voices) < 2:
        raise SPError(f"{_NAME}: masks tell who says what, and there is one voice. Disconnect the masks, or connect audio_2")
    if len(masks) != len(voices):
        raise SPError(f"{_NAME}: there are {len(voices)} voices and {len(masks)} masks. Connect a mask for each voice")
    if len({mask.shape[1:] for mask in masks}) > 1:
        raise SPError(f"{_NAME}: the masks have different sizes. Paint all of them over the same picture")
    if piece.image is None:
        raise SPError(f"{_NAME}: masks say where persons are in a picture. Connect it to image")
    (height, width), (of_picture_h, of_picture_w) = masks[0].shape[1:], piece.image.shape[1:3]
    if abs(height * of_picture_w / (width * of_picture_h) - 1) > _PROPORTIONS:
        raise SPError(
            f"{_NAME}: the masks have {width} x {height} pixels, the picture {of_picture_w} x {of_picture_h}. Paint each mask over the "
            "picture itself; where nothing is painted, Load Image gives an empty square"
        )
    if torch.equal(masks[0], masks[1]):
        raise SPError(f"{_NAME}: mask_1 and mask_2 are the same. Paint another one for each person")
    if len({(voice.stride, voice.values_nGC.shape[1:]) for voice in voices}) > 1:
        raise SPError(f"{_NAME}: the voices were encoded by different encoders. Encode all with the same")
