"""How the bytes of a block lie over the ranks. Pure arithmetic: the planner and the tests use it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: bytes; enough for every element type, and for the vector loads of a processor
ALIGNMENT = 64
#: how many words of each shard are compared after a gather
SAMPLES = 16
#: bytes of a word that is compared
WORD = 8


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to the alignment of tensors in a block."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes lie in a block, and the block's bytes."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += aligned(size)
    return places, end


def shard_bytes(block: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` ranks holds of a block of ``block`` bytes: equally many, so the last may hold a tail of zeros."""
    return aligned(-(-block // ranks))


def gathered_bytes(blocks: Sequence[int], ranks: int) -> int:
    """Bytes that a rank sends in a forward that gathers each of these blocks once."""
    return sum((ranks - 1) * shard_bytes(block, ranks) for block in blocks)


def sample_places(block: int, ranks: int) -> list[int]:
    """Numbers of the words of a gathered block that are compared: some of each rank's shard, none of the tail.

    They are not evenly spaced, so that a shard that lies in another's place is noticed in weights with a pattern too.
    """
    words, shard = block // WORD, shard_bytes(block, ranks) // WORD
    found = {
        rank * shard + (shard * sample + 7 * sample * sample % 13) // SAMPLES for rank in range(ranks) for sample in range(SAMPLES) if shard
    }
    return sorted(place for place in found if place < words)
