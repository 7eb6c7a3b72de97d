"""Attention over ranks: Ulysses, ring, their product USP, joint with replicated text, and partial results merged by log-sum-exp."""

from .joint import joint_attention
from .local import AttentionWithLse, attention_with_lse, merge
from .masks import to_rank_order
from .partial import exchanged_cross_attention, partial_cross_attention
from .ring import ring_attention, usp_attention
from .ulysses import Attend, ulysses_attention

__all__ = [
    "Attend",
    "AttentionWithLse",
    "attention_with_lse",
    "exchanged_cross_attention",
    "joint_attention",
    "merge",
    "partial_cross_attention",
    "ring_attention",
    "to_rank_order",
    "ulysses_attention",
    "usp_attention",
]
