"""Pure functions on shapes and indices. No communication, no torch.distributed."""

from .sequence import FlatLayout, SequenceLayout, TileLayout, too_coarse
from .sharding import Weights, shard_offsets, shard_range, shard_sizes
from .shares import Shares, uneven
from .tiles import choose_split, get_optimal_split

__all__ = [
    "FlatLayout",
    "SequenceLayout",
    "Shares",
    "TileLayout",
    "Weights",
    "choose_split",
    "get_optimal_split",
    "shard_offsets",
    "shard_range",
    "shard_sizes",
    "too_coarse",
    "uneven",
]
