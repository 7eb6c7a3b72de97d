"""Weights that lie once over the ranks of a forward: each rank holds a part of each block's bytes."""

from .block import shareable_bytes
from .layout import gathered_bytes, shard_bytes
from .shared import Gathering, SharedWeights

__all__ = ["Gathering", "SharedWeights", "gathered_bytes", "shard_bytes", "shareable_bytes"]
