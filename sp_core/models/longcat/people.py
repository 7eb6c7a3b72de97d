"""Who speaks where: how much each token looks at each person of the first frame, and the places that follow from it.

Several voices reach the model as streams of audio tokens laid end to end. Keys of each stream have
a place on a line, queries a place that says whom the token belongs to: RoPE along that line lets a
person's tokens read that person's voice.

Shape legend: B batch, T tokens, S tokens of the first frame, H heads, D head_dim, m masks
(person 1, person 2, background, others), N audio tokens of a frame.

Source: LongCat-Video-Avatar.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from einops import rearrange
from torch import Tensor

#: places on the line: person 1 has the first interval, person 2 the last
LINE, INTERVAL = 24, 4
#: the background's place; where there are more than three masks it is far from everybody
MIDDLE, FAR = LINE // 2, 100
_SMALL = 1e-8


@dataclass(frozen=True, eq=False)
class People:
    """Masks over the tokens of the first frame, each divided by its area."""

    weights_BSm: Tensor

    @classmethod
    def over(cls, masks_BmHW: Tensor, frame: tuple[int, int]) -> People:
        """Masks of the picture on the token grid of ``frame``: a token counts where its nearest pixel is above zero."""
        on_grid = (nnf.interpolate(masks_BmHW.float(), size=frame, mode="nearest") > 0).float()
        weights = rearrange(on_grid, "B m h w -> B (h w) m")
        return cls(weights / weights.sum(1, keepdim=True).clamp_min(1))

    @property
    def count(self) -> int:
        return self.weights_BSm.size(2)

    def without_columns(self, v_BTC: Tensor, heads: int) -> Tensor:
        """What :func:`with_columns` was given."""
        v_BTHD = rearrange(v_BTC, "B T (H D) -> B T H D", H=heads)
        return rearrange(v_BTHD[..., : v_BTHD.size(-1) - self.count], "B T H D -> B T (H D)")

    def with_maps(self, out_BTC: Tensor, q_BTC: Tensor, k_BSC: Tensor, heads: int) -> Tensor:
        """An attention's output with m columns more in each head: the share of attention that each token pays each person.

        Args:
            k_BSC: keys of the first frame's tokens, in raster order.
        """
        q, k, out = (rearrange(x, "B T (H D) -> B H T D", H=heads) for x in (q_BTC, k_BSC, out_BTC))
        # as wide as the keys: the fast kernels want that
        weights = nnf.pad(self.weights_BSm, (0, q.size(3) - self.count)).to(q)
        maps = nnf.scaled_dot_product_attention(q, k, weights.unsqueeze(1).expand(-1, heads, -1, -1))
        return rearrange(torch.cat([out, maps[..., : self.count]], -1), "B H T D -> B T (H D)")


def with_columns(v_BTC: Tensor, heads: int, count: int) -> Tensor:
    """Values with ``count`` empty columns more in each head, so that an exchange of the output has room for the maps."""
    return rearrange(nnf.pad(rearrange(v_BTC, "B T (H D) -> B T H D", H=heads), (0, count)), "B T H D -> B T (H D)")


def split_maps(out_BTC: Tensor, heads: int, count: int) -> tuple[Tensor, Tensor]:
    """An attention's output (B, T, H * D) and the maps (B, T, m), the mean of all heads."""
    out = rearrange(out_BTC, "B T (H D) -> B T H D", H=heads)
    width = out.size(3) - count
    return rearrange(out[..., :width], "B T H D -> B T (H D)"), out[..., width:].mean(2)


def extremes(maps_BTm: Tensor) -> Tensor:
    """(B, 1, 4): the negative minimum and the maximum of the first two persons' maps over these tokens.

    All four grow with more tokens, so those of all ranks are the largest of each rank's.
    """
    two = maps_BTm[..., :2]
    return torch.cat([-two.amin(1, keepdim=True), two.amax(1, keepdim=True)], -1)


def query_places(maps_BTm: Tensor, extremes_B14: Tensor) -> Tensor:
    """Place of each token on the line, fp32 (B, T): of the person that it looks at most, or of the background.

    Args:
        extremes_B14: :func:`extremes` of all tokens.
    """
    low, high = -extremes_B14[..., :2].float(), extremes_B14[..., 2:].float()
    inside = (maps_BTm[..., :2].float() - low) / (high - low + _SMALL) * INTERVAL
    first, second = inside.unbind(-1)
    background = torch.full_like(first, _background(maps_BTm.size(2)))
    nearest = maps_BTm.argmax(-1)
    return torch.where(nearest == 0, first, torch.where(nearest == 1, second + LINE - INTERVAL, background))


def key_places(streams: int, tokens: int, masks: int, device: torch.device) -> Tensor:
    """Place of each audio token of a frame, fp32 (N,): ``tokens`` tokens of each of ``streams`` voices."""
    places = [INTERVAL / 2, LINE - INTERVAL / 2, *[float(_background(masks))] * (streams - 2)]
    return torch.tensor(places, device=device).repeat_interleave(tokens)


def _background(masks: int) -> int:
    return MIDDLE if masks <= 3 else FAR
