"""Functions that a node puts inside the model: attention, modules' forwards, patches on attention.

Each of them needs something whole: all heads, all tokens, or all rows of the batch.
"""

import types

import torch

from .base import ModelNode


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _blocks(model):
    return list(enumerate(model.get_model_object("diffusion_model").blocks))


def _own_forward(module):
    """The class's own: the host leaves the patch of the branch that ran last in the module, and a stand-in would wrap that one's."""
    return types.MethodType(type(module).forward, module)


# -- all heads ------------------------------------------------------------------------


def mix_heads(function, q, k, v, heads, *args, **kwargs):
    """Attention, then half of each head is the mean of all heads."""
    out = function(q, k, v, heads, *args, **kwargs).unflatten(2, (heads, -1))
    return (0.5 * out + 0.5 * out.mean(2, keepdim=True)).flatten(2)


class SPForeignHeadMixer(ModelNode):
    """An attention override that mixes heads."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = mix_heads
        return (model,)


# -- all rows of the batch ------------------------------------------------------------


class SPForeignBatchTelling(ModelNode):
    """A guidance inside cross-attention that tells the positive prompt by the batch: the first half of two rows, or a single row."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}, "optional": {"conditioning": ("CONDITIONING",)}}

    def patch(self, model, conditioning=None):
        model = model.clone()
        negative = random((1, 5, 384), 77)
        if conditioning is not None:
            negative = negative + conditioning[0][0].mean()
        for i, block in _blocks(model):
            model.add_object_patch(f"diffusion_model.blocks.{i}.cross_attn.forward", _guided(block.cross_attn, negative))
        return (model,)


def _guided(module, negative):
    plain = _own_forward(module)

    def forward(x, context, **kwargs):
        rows = max(1, x.shape[0] // 2)
        own = plain(x[:rows], context[:rows], **kwargs)
        other = plain(x[:rows], negative.to(context).expand(rows, -1, -1), **kwargs)
        guided = 3.0 * own - 2.0 * other
        return guided if rows == x.shape[0] else torch.cat([guided, plain(x[rows:], context[rows:], **kwargs)])

    return forward


# -- all tokens -----------------------------------------------------------------------


class SPForeignOwnAttention(ModelNode):
    """A self-attention that calls torch's attention itself and never the host's."""

    def patch(self, model):
        model = model.clone()
        for i, block in _blocks(model):
            forward = types.MethodType(_own_attention, block.self_attn)
            model.add_object_patch(f"diffusion_model.blocks.{i}.self_attn.forward", forward)
        return (model,)


def _own_attention(self, x, freqs, transformer_options=None):
    from comfy.ldm.flux.math import apply_rope1

    parts = ((self.norm_q, self.q), (self.norm_k, self.k))
    q, k = (apply_rope1(norm(to(x)).unflatten(2, (self.num_heads, -1)), freqs).transpose(1, 2) for norm, to in parts)
    v = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
    # a little sharper than stock, so that a test sees whether it ran
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.1 * q.shape[-1] ** -0.5)
    return self.o(out.transpose(1, 2).flatten(2))


class SPForeignFrameScore(ModelNode):
    """Scales each self-attention's output by how much the video's frames resemble one another, worked out from all queries and keys."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "frames": ("INT", {"default": 4})}}

    def patch(self, model, frames):
        model = model.clone()
        for i, block in _blocks(model):
            forward = types.MethodType(_scored(_own_forward(block.self_attn), frames), block.self_attn)
            model.add_object_patch(f"diffusion_model.blocks.{i}.self_attn.forward", forward)
        return (model,)


def _scored(plain, frames):
    def forward(self, x, *args, **kwargs):
        q, k = (norm(to(x)).unflatten(1, (frames, -1)).mean(2) for norm, to in ((self.norm_q, self.q), (self.norm_k, self.k)))
        between = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        score = (between.sum((1, 2)) - between.diagonal(dim1=1, dim2=2).sum(-1)) / (frames * (frames - 1))
        return plain(x, *args, **kwargs) * (1 + 4 * score.mean())

    return forward


class SPForeignTokenScore(ModelNode):
    """Scales each self-attention's output by a number that is worked out from all queries and keys at once."""

    def patch(self, model):
        model = model.clone()
        for i, block in _blocks(model):
            plain = _own_forward(block.self_attn)

            def forward(self, x, *args, _plain=plain, **kwargs):
                q, k = self.norm_q(self.q(x)), self.norm_k(self.k(x))
                return _plain(x, *args, **kwargs) * (1 + 4 * (q * k).mean().tanh())

            model.add_object_patch(f"diffusion_model.blocks.{i}.self_attn.forward", types.MethodType(forward, block.self_attn))
        return (model,)


def _and_the_mean(plain):
    """A forward whose every token also gets a part of the mean of all tokens."""

    def forward(x, *args, **kwargs):
        out = plain(x, *args, **kwargs)
        return out + 0.3 * out.mean(1, keepdim=True)

    return forward


class SPForeignModuleForward(ModelNode):
    """Replaces the forward of a block, or of a module in each block, by one that looks at all tokens."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "module": ("STRING", {"default": "ffn"})}}

    def patch(self, model, module):
        model = model.clone()
        for i, block in _blocks(model):
            path = f"diffusion_model.blocks.{i}.{module}".removesuffix(".")
            model.add_object_patch(f"{path}.forward", _and_the_mean(_own_forward(block.get_submodule(module))))
        return (model,)


class SPForeignAttentionPatch(ModelNode):
    """A patch on the output of self-attention that looks at all tokens."""

    def patch(self, model):
        model = model.clone()
        model.set_model_patch(lambda args: args["x"] + 0.3 * args["x"].mean(1, keepdim=True), "attn1_patch")
        return (model,)


class SPForeignAttentionBypassed(ModelNode):
    """A block of LTX-2 whose forward calls the parts of its self-attention itself, so that no hook of that module runs."""

    def patch(self, model):
        model = model.clone()
        for i, block in enumerate(model.get_model_object("diffusion_model").transformer_blocks):
            model.add_object_patch(f"diffusion_model.transformer_blocks.{i}.forward", _bypassing(block))
        return (model,)


class _Direct(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.call = _own_forward(inner)

    def forward(self, *args, **kwargs):
        return 0.9 * self.call(*args, **kwargs)


def _bypassing(block):
    plain = _own_forward(block)

    def forward(*args, **kwargs):
        attention = block.attn1
        block.attn1 = _Direct(attention)
        try:
            return plain(*args, **kwargs)
        finally:
            block.attn1 = attention

    return forward
