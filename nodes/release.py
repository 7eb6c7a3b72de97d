"""SP Release: gives the devices back at a chosen place of the graph."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.host.ui.release_node import RELEASES, release


class SPRelease(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPRelease",
            display_name="SP Release",
            category="advanced/multi-gpu",
            description=(
                "Takes the workers' weights off the devices, or ends the workers, when the graph comes to this node, and passes "
                "its input on. ComfyUI asks for the memory by itself when it needs it; use this to give it to other programs."
            ),
            search_aliases=["free vram", "unload", "stop workers", "multi gpu"],
            inputs=[
                io.AnyType.Input(
                    "anything",
                    optional=True,
                    tooltip="Passed on unchanged. Wire it behind the sampler, so that the memory is given back after sampling.",
                ),
                io.Combo.Input(
                    "what",
                    options=list(RELEASES),
                    default="weights",
                    tooltip="weights: off the devices, the workers stay and the next sampling brings them back. "
                    "workers: end the processes; the next sampling starts them again.",
                ),
            ],
            outputs=[
                io.AnyType.Output("passed", tooltip="The input, unchanged."),
                io.String.Output("report", tooltip="What was given back."),
            ],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, what: str, anything=None):
        # memory may be taken again between two prompts, whatever the inputs are
        return float("nan")

    @classmethod
    def execute(cls, what: str, anything=None) -> io.NodeOutput:
        report = release(what)
        return io.NodeOutput(anything, report, ui={"text": [report]})
