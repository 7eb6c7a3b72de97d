"""Nodes that stand in for what is too large to ship with a demo: text encoders, VAEs, the audio VAE's sizes, other packs' patches."""

import importlib
import json
import types
import zlib

import torch
from comfy_api.latest import ComfyExtension, io


class SPDemoText(io.ComfyNode):
    """Random text embeddings, (1, tokens, dim), that depend on the text only."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SPDemoText",
            category="demo",
            inputs=[io.String.Input("text"), io.Int.Input("tokens", default=16, min=1), io.Int.Input("dim", default=64, min=1)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text, tokens, dim):
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return io.NodeOutput([[torch.randn(1, tokens, dim, generator=generator), {}]])


class SPDemoAudioLatent(io.ComfyNode):
    """An empty LTX audio latent, (B, 8, latents, 16), 25 latents a second."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SPDemoAudioLatent",
            category="demo",
            inputs=[
                io.Int.Input("frames_number", default=97, min=1),
                io.Float.Input("frame_rate", default=25.0),
                io.Int.Input("batch_size", default=1, min=1),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, frames_number, frame_rate, batch_size):
        return io.NodeOutput({"samples": torch.zeros(batch_size, 8, round(25 * frames_number / frame_rate), 16), "type": "audio"})


class SPDemoPatches(io.ComfyNode):
    """Code inside a Wan model that keeps heads and tokens apart, and that nobody knows: an attention, and feed-forwards in chunks."""

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="SPDemoPatches", category="demo", inputs=[io.Model.Input("model")], outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = _sharper
        for i, block in enumerate(model.get_model_object("diffusion_model").blocks):
            forward = _in_chunks(types.MethodType(type(block.ffn).forward, block.ffn))
            model.add_object_patch(f"diffusion_model.blocks.{i}.ffn.forward", forward)
        return io.NodeOutput(model)


def _sharper(function, q, *args, **kwargs):
    return function(1.1 * q, *args, **kwargs)


def _in_chunks(plain):
    def forward(x):
        return torch.cat([plain(part) for part in x.chunk(2, 1)], 1)

    return forward


_LTX = {
    "dims": 3,
    "latent_channels": 128,
    "encoder_blocks": [["res_x", 1], *[["compress_all_res", {"multiplier": 2}]] * 3, ["res_x", 1]],
    "decoder_blocks": [["res_x", 2], *[["compress_all", {"residual": True, "multiplier": 2}], ["res_x", 2]] * 3],
    "encoder_base_channels": 16,
    "decoder_base_channels": 32,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "timestep_conditioning": False,
}
_WAN = {"dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
#: kind -> (module, class, arguments, metadata), a fraction of the release's width
_VAES = {
    "wan": ("comfy.ldm.wan.vae", "WanVAE", _WAN, None),
    "ltx": (
        "comfy.ldm.lightricks.vae.causal_video_autoencoder",
        "VideoVAE",
        {"config": _LTX},
        {"config": json.dumps({"vae": _LTX})},
    ),
}


class SPDemoVAE(io.ComfyNode):
    """A VAE of the real class, narrow, with random weights that are the same everywhere."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SPDemoVAE",
            category="demo",
            inputs=[io.Combo.Input("kind", options=list(_VAES))],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, kind):
        import comfy.sd

        module, class_name, arguments, metadata = _VAES[kind]
        state = getattr(importlib.import_module(module), class_name)(**arguments).state_dict()
        generator = torch.Generator().manual_seed(7)
        # activations stay near one
        weights = {name: torch.randn(x.shape, generator=generator) / max(1, x[:1].numel()) ** 0.5 for name, x in state.items()}
        return io.NodeOutput(comfy.sd.VAE(sd=weights, metadata=metadata))


class SPDemoLatent(io.ComfyNode):
    """A random latent video, (1, channels, frames, height, width)."""

    @classmethod
    def define_schema(cls):
        sizes = [io.Int.Input(name, default=1, min=1) for name in ("channels", "frames", "height", "width")]
        return io.Schema(node_id="SPDemoLatent", category="demo", inputs=[*sizes, io.Int.Input("seed")], outputs=[io.Latent.Output()])

    @classmethod
    def execute(cls, channels, frames, height, width, seed):
        generator = torch.Generator().manual_seed(seed)
        return io.NodeOutput({"samples": torch.randn(1, channels, frames, height, width, generator=generator)})


class SPDemoTake(io.ComfyNode):
    """The end of a graph: takes a video and says how large it is."""

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="SPDemoTake", category="demo", inputs=[io.Image.Input("image")], outputs=[], is_output_node=True)

    @classmethod
    def execute(cls, image):
        return io.NodeOutput(ui={"shape": list(image.shape)})


class DemoNodes(ComfyExtension):
    async def get_node_list(self):
        return [SPDemoText, SPDemoAudioLatent, SPDemoPatches, SPDemoVAE, SPDemoLatent, SPDemoTake]


async def comfy_entrypoint():
    return DemoNodes()
