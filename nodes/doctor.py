"""SP Doctor: what this machine has, what would be used, and what to expect of it."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.doctor import as_text, examine, heat_map


class SPDoctor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPDoctor",
            display_name="SP Doctor",
            category="advanced/multi-gpu",
            description=(
                "Measures the devices and the links between them, names the exchange that would be used and why not a faster one, "
                "and says what to expect for Wan, LTX-2 and HunyuanVideo, also where one device is faster. Takes some seconds."
            ),
            search_aliases=["multi gpu", "benchmark", "p2p", "nvlink", "diagnose"],
            inputs=[],
            outputs=[
                io.String.Output("report", tooltip="Conclusions first, then what they rest on."),
                io.Image.Output("links", tooltip="Measured GB/s between each two devices; brighter is faster."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls):
        # a link that was busy may be free now
        return float("nan")

    @classmethod
    def execute(cls) -> io.NodeOutput:
        found = examine()
        report = as_text(found)
        return io.NodeOutput(report, heat_map(found["links"].get("links") or [[0.0]]), ui={"text": [report]})
