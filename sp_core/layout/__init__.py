"""Pure functions on shapes and indices. No communication, no torch.distributed."""

from .sharding import shard_offsets, shard_range, shard_sizes

__all__ = ["shard_offsets", "shard_range", "shard_sizes"]
