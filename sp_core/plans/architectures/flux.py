"""Flux, Flux 2, LongCat-Image, Chroma and Chroma Radiance: text and picture attend jointly, in double blocks and then in single blocks.

The picture and its reference latents are split, the text is replicated. A reference latent can have a timestep of its own,
so that each segment of the sequence has its row of the modulation.
"""

from __future__ import annotations

from ..plan import Attention, Blocks, HookPoint, Replicated, SequencePlan
from ..shard_rules import joint_by_token, joint_segments, segments

_JOINT = Attention(kind="joint")
#: pe: (B, 1, N + T, D / 2, 2, 2), the N text tokens first
_PE = {"pe": joint_by_token(2)}

FLUX = SequencePlan(
    architecture="Flux",
    title="Flux / Flux 2",
    covers="text to picture, reference latents (Kontext, Flux 2), Fill, Redux, ControlNets; LongCat-Image",
    # modulation_dims: (start, stop, row), in single blocks of [text | picture]
    blocks=(
        Blocks("double_blocks", "img", (_JOINT,), {**_PE, "modulation_dims_img": segments}, replicated=Replicated("txt")),
        Blocks("single_blocks", "x", (_JOINT,), {**_PE, "modulation_dims": joint_segments}, replicated=Replicated(in_stream=True)),
    ),
    hook_points=(HookPoint("final_layer", {"modulation_dims": segments}, gather=True),),
    # ControlNet: {"input": behind double blocks, "output": behind single blocks}
    residuals=("control",),
)
_CHROMA_BLOCKS = (
    Blocks("double_blocks", "img", (_JOINT,), _PE, replicated=Replicated("txt")),
    Blocks("single_blocks", "x", (_JOINT,), _PE, replicated=Replicated(in_stream=True)),
)
CHROMA = SequencePlan(
    architecture="Chroma",
    title="Chroma",
    covers="text to picture, ControlNets",
    blocks=_CHROMA_BLOCKS,
    hook_points=(HookPoint("final_layer", gather=True),),
    residuals=("control",),
)
CHROMA_RADIANCE = SequencePlan(
    architecture="ChromaRadiance",
    title="Chroma Radiance",
    covers="text to picture",
    blocks=_CHROMA_BLOCKS,
    hook_points=(),
    # behind the blocks each patch of the picture is computed by its token
    gather_early=lambda inputs: True,
    rows_where=lambda inputs: "with a ControlNet" if inputs.get("control") else "",
)

FLUX_FAMILY = (FLUX, CHROMA, CHROMA_RADIANCE)
