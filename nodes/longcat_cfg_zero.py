"""LongCat CFG-Zero: LongCat-Video's guidance."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.models.longcat import patches


class SPLongCatCFGZero(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPLongCatCFGZero",
            display_name="LongCat CFG-Zero",
            category="advanced/multi-gpu/LongCat-Video",
            description="LongCat-Video's guidance: the negative prediction is scaled to fit. Not what CFGZeroStar does.",
            search_aliases=["longcat guidance", "cfg zero star"],
            inputs=[io.Model.Input("model", tooltip="A LongCat-Video model, before or behind SP Model Patch.")],
            outputs=[io.Model.Output(tooltip="The model with this guidance.")],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        return io.NodeOutput(patches.with_cfg_zero(model))
