"""Nodes that stand in for what is too large to ship with a demo: text encoders, the audio VAE's sizes, other packs' patches."""

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


class DemoNodes(ComfyExtension):
    async def get_node_list(self):
        return [SPDemoText, SPDemoAudioLatent, SPDemoPatches]


async def comfy_entrypoint():
    return DemoNodes()
