"""SP VAE Patch: VAE in, VAE out, decoding and encoding on all devices."""

from __future__ import annotations

from comfy_api.latest import io

from sp_core.host.ui.device_input import check_devices
from sp_core.host.ui.vae_node import patch_vae, supported_vaes


class SPVAEPatch(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SPVAEPatch",
            display_name="SP VAE Patch",
            category="advanced/multi-gpu",
            description=(
                "Decodes and encodes on several devices at once: each computes a band of every frame, and the rows at the "
                "edges come from its neighbours. The result is the one that a single device gives, without tiles and seams. "
                "Place it between the VAE's loader and the nodes that use the VAE."
            ),
            search_aliases=["multi gpu", "parallel vae", "vae decode", "multiple gpus"],
            inputs=[
                io.Vae.Input(
                    "vae",
                    tooltip=f"The VAE of {', '.join(supported_vaes())}. "
                    "Of another VAE only the tiles are shared out, with a line in the log.",
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto: all accelerators that ComfyUI sees. 0,1,3: these. cpu:4: four CPU workers (for tests). "
                    "With one device the VAE is returned unchanged. Name the devices of SP Model Patch: both then use one set of workers.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="The same VAE; use it with any node that takes a VAE.")],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, devices: str | None) -> bool | str:
        # ComfyUI gives None for what comes over a wire; execute sees it and checks again.
        return True if devices is None else check_devices(devices)

    @classmethod
    def execute(cls, vae, devices: str) -> io.NodeOutput:
        return io.NodeOutput(patch_vae(vae, devices, cls.hidden.dynprompt, cls.hidden.unique_id))
