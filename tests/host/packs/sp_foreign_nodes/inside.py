"""Functions that a node puts inside the model: attention, modules' forwards, patches between and around blocks.

Each of them needs something whole: all heads, all tokens, or all rows of the batch.
"""

import threading
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


# -- around blocks --------------------------------------------------------------------


class Switch:
    """Shared by the wrappers of one guider, which turns it on for one forward."""

    def __init__(self, on=False):
        self.on = on


class BlockWrapper:
    """A replacement of a block that weakens what the block adds, by the mean of all tokens. Its state is plain data."""

    def __init__(self, switch, block):
        self.switch, self.block = switch, block

    def __call__(self, args, extra):
        before = args["img"]
        out = extra["original_block"](args)
        if not self.switch.on:
            return out
        added = out["img"] - before
        return {**out, "img": before + 0.5 * added + 0.2 * added.mean(1, keepdim=True)}


class ValuesPassed:
    """A replacement of a block of LTX-Video whose self-attention gives back the values, as spatio-temporal guidance does."""

    def __init__(self, switch, block):
        self.switch, self.block = switch, block

    def __call__(self, args, extra):
        import comfy.ldm.modules.attention as host

        if not self.switch.on:
            return extra["original_block"](args)
        before, calls = (host.optimized_attention, host.optimized_attention_masked), []

        def passing(original):
            def attend(q, k, v, *args, **kwargs):
                calls.append(1)
                return v if len(calls) == 1 else original(q, k, v, *args, **kwargs)

            return attend

        host.optimized_attention, host.optimized_attention_masked = map(passing, before)
        try:
            return extra["original_block"](args)
        finally:
            host.optimized_attention, host.optimized_attention_masked = before


class Locked:
    """A replacement of a block that changes nothing, and holds what nobody can send."""

    def __init__(self, switch, block):
        self.lock = threading.Lock()

    def __call__(self, args, extra):
        with self.lock:
            return extra["original_block"](args)


WRAPPERS = {"weaker": BlockWrapper, "values": ValuesPassed, "locked": Locked}


class SPForeignBlockWrapper(ModelNode):
    """Replaces a block for the whole sampling run."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "kind": (list(WRAPPERS),), "block": ("INT", {"default": 1})}}

    def patch(self, model, kind, block):
        model = model.clone()
        model.set_model_patch_replace(WRAPPERS[kind](Switch(True), block), "dit", "double_block", block)
        return (model,)


class SPForeignGuider:
    """A guider that wraps blocks of its MODEL when it is made, and has them misbehave in a forward of their own."""

    @classmethod
    def INPUT_TYPES(cls):
        conditioning = ("CONDITIONING",)
        return {
            "required": {
                "model": ("MODEL",),
                "positive": conditioning,
                "negative": conditioning,
                "kind": (list(WRAPPERS),),
                "blocks": ("STRING", {"default": "0,2"}),
            }
        }

    RETURN_TYPES = ("GUIDER",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, model, positive, negative, kind, blocks):
        import comfy.samplers

        switch = Switch()

        class Guider(comfy.samplers.CFGGuider):
            def predict_noise(self, x, timestep, model_options=None, seed=None):
                def compute(*names):
                    conds = [self.conds.get(name) for name in names]
                    return comfy.samplers.calc_cond_batch(self.inner_model, conds, x, timestep, model_options)

                good, bad = compute("positive", "negative")
                switch.on = True
                try:
                    (perturbed,) = compute("positive")
                finally:
                    switch.on = False
                return bad + 3.0 * (good - bad) + 1.0 * (good - perturbed)

        model = model.clone()
        for block in map(int, blocks.split(",")):
            model.set_model_patch_replace(WRAPPERS[kind](switch, block), "dit", "double_block", block)
        guider = Guider(model)
        guider.set_conds(positive, negative)
        return (guider,)


class SPForeignCounting(ModelNode):
    """A residual that grows with each forward, keeps what it saw, and so depends on what it kept."""

    def patch(self, model):
        model = model.clone()
        count, seen = 0, []

        def add(args):
            nonlocal count
            if args["block_index"] != 1:
                return {"img": args["img"]}
            count += 1
            seen.append(args["img"].mean(1, keepdim=True))
            return {"img": args["img"] + 0.2 * count * sum(seen)}

        model.set_model_patch(add, "double_block")
        return (model,)


# -- objects in transformer_options ---------------------------------------------------


class State:
    """A state object of a pack. Its state is plain data."""

    def __init__(self, sharpness):
        self.sharpness = sharpness


def sharpened(function, q, k, v, heads, *args, **kwargs):
    """Attention whose sharpness a state object in the options says."""
    state = (kwargs.get("transformer_options") or {}).get("sp_foreign_state")
    sharpness = 1.0 if state is None else state.sharpness
    return function(q * (sharpness() if callable(sharpness) else sharpness), k, v, heads, *args, **kwargs)


class SPForeignReadsState(ModelNode):
    """Code inside the model that reads a state object in the options, if there is one."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = sharpened
        return (model,)


def growing(function, q, k, v, heads, *args, **kwargs):
    """Attention that counts its calls in plain data of the options, and grows sharper with each."""
    kept = kwargs["transformer_options"]["sp_foreign_kept"]
    kept["calls"].append(1)
    return function(q * (1.0 + 0.02 * len(kept["calls"])), k, v, heads, *args, **kwargs)


class SPForeignKept(ModelNode):
    """Puts plain data into the options that an attention function changes."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"].update(sp_foreign_kept={"calls": []}, optimized_attention_override=growing)
        return (model,)


class SPForeignState(ModelNode):
    """Puts the state object into the options; with ``closure`` it holds a function that nobody can import."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "closure": ("BOOLEAN", {"default": False})}}

    def patch(self, model, closure):
        model = model.clone()
        model.model_options["transformer_options"]["sp_foreign_state"] = State((lambda: 1.5) if closure else 1.5)
        return (model,)


# -- classes and compiled blocks ------------------------------------------------------


class SPForeignClass(ModelNode):
    """Gives the model a class of the pack's own, made of the model's class, which replaces ``method`` if it is named."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}, "optional": {"method": ("STRING", {"default": "forward_orig"})}}

    def patch(self, model, method="forward_orig"):
        model = model.clone()
        base = type(model.get_model_object("diffusion_model"))

        def stronger(self, x, *args, **kwargs):
            return getattr(super(ForeignWanModel, self), method)(x * 1.1, *args, **kwargs)

        class ForeignWanModel(base):
            def helper(self):
                return self.dim

        if method:
            setattr(ForeignWanModel, method, stronger)
        model.add_object_patch("diffusion_model.__class__", ForeignWanModel)
        return (model,)


class SPForeignClassOfItsOwn(ModelNode):
    """Gives the model a class that is made of torch's alone, with a forward of its own."""

    def patch(self, model):
        import comfy.ldm.wan.model as host

        model = model.clone()

        class ForeignModel(torch.nn.Module):
            forward_orig, rope_encode = host.WanModel.forward_orig, host.WanModel.rope_encode
            unpatchify, _forward = host.WanModel.unpatchify, host.WanModel._forward

            def forward(self, x, timestep, context, clip_fea=None, transformer_options=None, **kwargs):
                return self._forward(1.1 * x, timestep, context, clip_fea, None, transformer_options or {}, **kwargs)

        model.add_object_patch("diffusion_model.__class__", ForeignModel)
        return (model,)


class SPForeignCompiledBlock(ModelNode):
    """Puts a compiled module in the place of a block, as older compile nodes do."""

    def patch(self, model):
        model = model.clone()
        block = model.get_model_object("diffusion_model.blocks.1")
        model.add_object_patch("diffusion_model.blocks.1", torch.compile(block, backend="eager"))
        return (model,)
