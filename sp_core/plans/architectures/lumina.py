"""Lumina 2 and Z-Image: some blocks for the picture alone, then blocks for one sequence of text and picture.

Both sequences are split, one after the other: between them the model reckons with all tokens of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..forward_state import ForwardState
from ..plan import Attention, Blocks, HookPoint, SequencePlan
from ..shard_rules import by_token, segments

#: lists of patches that get text and picture apart, by their places among all tokens
_PATCHES = ("noise_refiner", "double_block")


def _spans(value: Sequence[tuple[int, int]], state: ForwardState) -> list[tuple[int, int]]:
    """Of (start, stop) of the tokens with a timestep of their own, those of this rank's tokens, in its own numbering."""
    return [(start, stop) for start, stop, _ in segments([(start, stop, 0) for start, stop in value], state)]  # type: ignore[misc]


def _patched(inputs: Mapping[str, Any]) -> str:
    patches = (inputs.get("transformer_options") or {}).get("patches") or {}
    return "with a patch between the blocks (a ControlNet)" if any(patches.get(kind) for kind in _PATCHES) else ""


_SHARD = {"freqs_cis": by_token(1), "timestep_zero_index": _spans}

LUMINA2 = SequencePlan(
    architecture="NextDiT",
    title="Lumina 2 / Z-Image",
    covers="text to picture, reference latents",
    # freqs_cis: (1 or B, T, 1, D / 2, 2, 2)
    blocks=(
        Blocks("noise_refiner", "x", (Attention("attention"),), _SHARD, gathers=True),
        Blocks("layers", "x", (Attention("attention"),), _SHARD),
    ),
    hook_points=(HookPoint("final_layer", {"timestep_zero_index": _spans}, gather=True),),
    rows_where=_patched,
)
PIXEL_SPACE = replace(
    LUMINA2,
    architecture="NextDiTPixelSpace",
    title="Z-Image in pixel space",
    covers="text to picture",
    hook_points=(),
    # behind the blocks each patch of the picture is computed by its token
    gather_early=lambda inputs: True,
)

LUMINA_FAMILY = (LUMINA2, PIXEL_SPACE)
