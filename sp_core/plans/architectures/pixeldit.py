"""PixelDiT: patches of a picture and text attend jointly; behind them a few blocks compute each patch's pixels, on every rank."""

from __future__ import annotations

from ..plan import Attention, Blocks, Replicated, SequencePlan
from ..shard_rules import by_token

PIXEL_DIT = SequencePlan(
    architecture="PixDiT_T2I",
    title="PixelDiT",
    covers="text to picture; its last blocks, those of pixels, are computed by every device",
    # pos_img: (T, D / 2, 2, 2)
    blocks=(Blocks("patch_blocks", "x", (Attention("attn", kind="joint"),), {"pos_img": by_token(0)}, replicated=Replicated("y")),),
    hook_points=(),
    gather_early=lambda inputs: True,
)
