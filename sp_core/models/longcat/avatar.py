"""LongCat-Video-Avatar: LongCat-Video whose frames hear a voice, or several, and that keeps a person's looks by a reference frame.

Needs ComfyUI. Shape legend: B batch, P voices, F latent frames, f pixel frames, W audio features
around a frame, G features of one moment (layers x channels), N audio tokens of a latent frame, A their width, m masks.

Source: LongCat-Video-Avatar 1.0 and 1.5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from comfy.ldm.wan.model_multitalk import MultiTalkAudioProjModel
from einops import rearrange
from torch import Tensor

from ...errors import SPError
from .avatar_layers import AvatarBlock, Sound
from .conditioning import Part, frame_parts, zero_mask_prefix
from .model import BLOCK_SPARSE, FrameRules, LongCatVideoModel
from .people import People

#: audio features around a frame, and frames of a latent after the first
WINDOW, LATENT = 5, 4
#: rows of a latent's window, out of four frames' windows (frame, place in its window)
_ROWS = ((0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 3), (3, 4))


def hidden_frames(reference: int, around: int, clean: int, noisy: int) -> range:
    """Which noisy frames do not see the reference frame: those near its place in time; none where they would not all be there.

    Args:
        reference: place of the reference frame in time.
        around: how many frames on each side.
        clean: conditioning frames, the reference among them.
        noisy: all noisy frames.
    """
    start, stop = reference - around - clean + 1, reference + around - clean + 2
    return range(start, stop) if around > 0 and start >= 0 and stop <= noisy else range(0)


def avatar_parts(clean: int, total: int, hidden: range) -> tuple[Part, ...]:
    """The reference frame stands first and attends to itself, conditioning frames to each other, noisy frames to everything.

    Only the noisy frames in ``hidden``, counted from the first noisy one, do not see the reference.
    """
    parts = [Part(range(1), range(1)), Part(range(1, clean), range(1, clean))]
    start, stop = (clean + hidden.start, clean + hidden.stop) if hidden else (total, total)
    parts += [Part(range(clean, start), range(total)), Part(range(start, stop), range(1, total)), Part(range(stop, total), range(total))]
    return tuple(part for part in parts if part.queries)


class LongCatAvatarModel(LongCatVideoModel):
    """Takes the host's arguments, gives what the host's flow samplers want: noise minus data, in fp32."""

    def __init__(
        self,
        audio_features: int = 5 * 1280,
        audio_hidden: int = 512,
        audio_dim: int = 768,
        audio_tokens: int = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
        operations: Any = None,
        **base: Any,
    ) -> None:
        super().__init__(**base, device=device, dtype=dtype, operations=operations, block=partial(AvatarBlock, audio_dim=audio_dim))
        self.audio_features = audio_features
        self.audio_proj = MultiTalkAudioProjModel(
            WINDOW, len(_ROWS), 1, audio_features, audio_hidden, audio_dim, audio_tokens, device, dtype, operations
        )

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: dict[str, Any] | None = None,
        denoise_mask: Tensor | None = None,
        num_cond_latents: int | None = None,
        audio_embed: Tensor | None = None,
        people_masks: Tensor | None = None,
        reference_latent: Tensor | None = None,
        reference_frame: int = 10,
        hidden_around: int = 3,
        sampled_start: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One prediction. Arguments that are not listed are those of the base model.

        Args:
            num_cond_latents: clean first frames of ``x``, without the reference.
            audio_embed: (B, P, f, W, layers, channels) of every pixel frame, conditioning frames among them; None is silence.
            people_masks: (B, m, height, width) in pixels of the first frame: person 1, person 2, background, others.
            reference_latent: (B, C, 1, H, W), a clean frame that stands before all others.
            reference_frame: its place in time, for the 3-D RoPE.
            hidden_around: noisy frames as near to that place as this do not see it.
            sampled_start: (B, C, n, H, W), clean first frames that the model sees in the place of those of ``x``.

        Raises:
            SPError: the arguments do not fit together.
        """
        options = {} if transformer_options is None else transformer_options
        frames = x.size(2)
        clean = zero_mask_prefix(denoise_mask, frames) if num_cond_latents is None else min(num_cond_latents, frames)
        self._check(x, clean, audio_embed, people_masks, options)
        if sampled_start is not None:
            x = torch.cat([sampled_start.to(x).expand(x.size(0), -1, -1, -1, -1), x[:, :, sampled_start.size(2) :]], 2)
        voices = 1 if audio_embed is None else audio_embed.size(1)
        people = None if people_masks is None or voices == 1 else self._people(people_masks, x, clean > 0 or reference_latent is not None)
        sound = Sound(self.project_audio(audio_embed, x)[:, clean:], voices, 0 if people is None else people.count)
        if reference_latent is None:
            rules = FrameRules(clean, frame_parts(clean, frames), people=people)
            return self.predict(x, timestep, context, options, rules, sound=sound)
        x = torch.cat([reference_latent.to(x).expand(x.size(0), -1, -1, -1, -1), x], 2)
        if timestep.ndim > 1:
            timestep = torch.cat([timestep.new_zeros(timestep.size(0), 1), timestep], 1)
        hidden = hidden_frames(reference_frame, hidden_around, clean + 1, frames - clean)
        parts = avatar_parts(clean + 1, frames + 1, hidden)
        rules = FrameRules(clean + 1, parts, (reference_frame, *range(frames)), people)
        return self.predict(x, timestep, context, options, rules, sound=sound)[:, :, 1:]

    def _people(self, people_masks: Tensor, x: Tensor, pictured: bool) -> People:
        if not pictured:
            raise SPError("Several persons need a picture that shows where they are: connect an image to LongCat Avatar Conditioning")
        height, width = (-(-size // patch) for size, patch in zip(x.shape[3:], self.patch_size[1:], strict=True))
        return People.over(people_masks, (height, width))

    def _check(self, x: Tensor, clean: int, audio_embed: Tensor | None, people_masks: Tensor | None, options: dict[str, Any]) -> None:
        if clean == x.size(2):
            raise SPError("The noise mask keeps every frame, so nothing is left to make. Use the latent of LongCat Avatar Conditioning")
        if BLOCK_SPARSE in options:
            raise SPError("LongCat Block-Sparse Attention is for refining with LongCat-Video, not for its Avatar: remove the node")
        if audio_embed is None:
            return
        pixel_frames = 1 + LATENT * (x.size(2) - 1)
        if audio_embed.size(2) != pixel_frames:
            raise SPError(
                f"The audio is for a video of {audio_embed.size(2)} frames, this one has {pixel_frames}: "
                "use the latent that LongCat Avatar Conditioning gives, and no context windows"
            )
        if audio_embed.size(4) * audio_embed.size(5) != self.audio_features:
            raise SPError(
                f"The audio has {audio_embed.size(4)} x {audio_embed.size(5)} features a frame, this Avatar model takes "
                f"{self.audio_features}. Avatar 1.0 takes those of chinese-wav2vec2-base, 1.5 those of Whisper large v3"
            )
        if audio_embed.size(1) > 1 and people_masks is None:
            raise SPError("Several voices need a mask for each person: connect mask_1 and mask_2 to LongCat Avatar Conditioning")

    def project_audio(self, audio_embed: Tensor | None, x: Tensor) -> Tensor:
        """Audio tokens of each latent frame, those of all voices end to end: (B, F, P * N, A)."""
        if audio_embed is None:
            # silence is zeros in the features, but not in the tokens
            audio_embed = x.new_zeros(x.size(0), 1, 1 + LATENT * (x.size(2) - 1), WINDOW, 1, self.audio_features)
        audio = rearrange(audio_embed.to(x), "B P f W S C -> (B P) f W S C")
        later = rearrange(audio[:, 1:], "B (F n) W S C -> B F n W S C", n=LATENT)
        rows = torch.stack([later[:, :, frame, place] for frame, place in _ROWS], 2)
        tokens = self.audio_proj(audio[:, :1], rows)
        return rearrange(tokens, "(B P) F N A -> B F (P N) A", P=audio_embed.size(1))
