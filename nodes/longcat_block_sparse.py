"""LongCat Block-Sparse Attention: refining a large video at a fraction of the time."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import patches


class SPLongCatBlockSparse(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatBlockSparse",
            display_name="LongCat Block-Sparse Attention",
            category="advanced/multi-gpu/LongCat-Video",
            description=(
                "For refining with LongCat-Video's refinement LoRA: a tile of the video attends only to the tiles that look most like it. "
                "The model was trained for that, so use it in the refining pass only."
            ),
            search_aliases=["longcat bsa", "sparse attention", "longcat refine"],
            inputs=[
                io.Model.Input("model", tooltip="A LongCat-Video model, before or behind SP Model Patch."),
                io.Float.Input(
                    "sparsity",
                    default=0.9375,
                    min=0.0,
                    max=0.99,
                    step=0.0125,
                    round=False,
                    tooltip="Share of the video that each tile leaves out. The model was trained with 0.9375.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(patches.SPARSE_KERNELS),
                    default="gather",
                    optional=True,
                    advanced=True,
                    tooltip="gather: plain torch, on any device. flex_attention: a kernel that torch compiles, on CUDA; "
                    "it has not run on a GPU yet. A CPU gathers either way.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with this attention.")],
        )

    @classmethod
    def execute(cls, model, sparsity: float, kernel: str = "gather") -> io.NodeOutput:
        return io.NodeOutput(patches.with_block_sparse(model, sparsity, kernel))
