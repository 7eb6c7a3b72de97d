"""Kandinsky 5: the worked example of ``docs/add-a-model.md``."""

from __future__ import annotations

from ..plan import Attention, Blocks, SequencePlan
from ..shard_rules import by_token

KANDINSKY5 = SequencePlan(
    architecture="Kandinsky5",
    title="Kandinsky 5",
    covers="text to video, first frame",
    # freqs: (1, T, 1, D / 2, 2, 2); the time embedding is one for all tokens, the text is replicated
    blocks=(Blocks("visual_transformer_blocks", "visual_embed", (Attention("self_attention"),), {"freqs": by_token(1)}),),
    hook_points=(),
    # behind the blocks the model puts its tokens back on their grid, for which it needs all of them
    gather_early=lambda inputs: True,
)
