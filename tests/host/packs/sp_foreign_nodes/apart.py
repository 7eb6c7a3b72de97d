"""Functions inside the model that keep heads or tokens apart, and some that seem to in the first step."""

import torch

from .base import ModelNode
from .inside import _blocks, _own_forward, mix_heads


def sharper(function, q, k, v, heads, *args, **kwargs):
    """Attention, a little sharper in every head."""
    return function(1.5 * q, k, v, heads, *args, **kwargs)


class SPForeignSharperHeads(ModelNode):
    """An attention override that treats each head by itself."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = sharper
        return (model,)


class SPForeignChunks(ModelNode):
    """Feed-forwards in chunks of tokens, which also weaken what they add."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "chunks": ("INT", {"default": 3})}}

    def patch(self, model, chunks):
        model = model.clone()
        for i, block in _blocks(model):
            model.add_object_patch(f"diffusion_model.blocks.{i}.ffn.forward", _in_chunks(_own_forward(block.ffn), chunks))
        return (model,)


def _in_chunks(plain, chunks):
    def forward(x):
        out = torch.empty_like(x)
        for to, part in zip(out.chunk(chunks, 1), x.chunk(chunks, 1), strict=True):
            to.copy_(0.8 * plain(part))
        return out

    return forward


class SPForeignStrongerText(ModelNode):
    """Cross-attention by a stronger text: each token of the video by itself."""

    def patch(self, model):
        model = model.clone()
        for i, block in _blocks(model):
            model.add_object_patch(f"diffusion_model.blocks.{i}.cross_attn.forward", _stronger(_own_forward(block.cross_attn)))
        return (model,)


def _stronger(plain):
    def forward(x, context, **kwargs):
        return 1.2 * plain(x, 1.5 * context, **kwargs)

    return forward


class SPForeignOutputScaled(ModelNode):
    """A patch behind self-attention that treats each token by itself, and tells the blocks apart."""

    def patch(self, model):
        model = model.clone()
        model.set_model_patch(lambda args: args["x"] * (1.2 - 0.1 * args["transformer_options"]["block_index"]), "attn1_patch")
        return (model,)


class SPForeignLateHeads(ModelNode):
    """An attention that mixes heads, but not in the first step: it asks for sigma."""

    def patch(self, model):
        model = model.clone()

        def override(function, *args, **kwargs):
            late = float(kwargs["transformer_options"]["sigmas"][0]) < 0.9
            return mix_heads(function, *args, **kwargs) if late else function(*args, **kwargs)

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        return (model,)


class SPForeignLateMean(ModelNode):
    """Feed-forwards that look at all tokens from the second forward on; a patch between the blocks counts forwards."""

    def patch(self, model):
        model = model.clone()
        state = {"blocks": 0}
        blocks = _blocks(model)

        def count(args):
            state["blocks"] += 1
            return args

        model.set_model_patch(count, "double_block")
        for i, block in blocks:
            model.add_object_patch(f"diffusion_model.blocks.{i}.ffn.forward", _late(_own_forward(block.ffn), state, len(blocks)))
        return (model,)


def _late(plain, state, blocks):
    def forward(x):
        out = plain(x)
        return out + 0.3 * out.mean(1, keepdim=True) if state["blocks"] >= blocks else out

    return forward
