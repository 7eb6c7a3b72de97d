"""Pure functions on shapes and indices. No communication, no torch.distributed."""

from .sequence import FlatLayout, SequenceLayout, TileLayout
from .sharding import shard_offsets, shard_range, shard_sizes
from .tiles import choose_split, get_optimal_split

__all__ = [
    "FlatLayout",
    "SequenceLayout",
    "TileLayout",
    "choose_split",
    "get_optimal_split",
    "shard_offsets",
    "shard_range",
    "shard_sizes",
]
