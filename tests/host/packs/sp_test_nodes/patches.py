"""Patches of every kind, for both sides of SP Model Patch."""

import threading

import torch

from .base import ModelNode


class SPTestAttentionOverride(ModelNode):
    """Replaces the attention function by torch's, counting its calls: stands for Sage and Flash patches."""

    def patch(self, model):
        model = model.clone()

        def override(function, q, k, v, heads, mask=None, **kwargs):
            if kwargs.get("skip_reshape"):
                return function(q, k, v, heads, mask=mask, **kwargs)
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
            if mask is not None and mask.ndim == 3:
                mask = mask.unsqueeze(1)
            # a little sharper than stock, so that a test sees whether it ran
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.1 * q.shape[-1] ** -0.5)
            return out.transpose(1, 2).flatten(2)

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        return (model,)


class SPTestEscape:
    """Replaces a self-attention's forward by one that never calls the host's attention: what SP must not let pass."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "target": ("STRING", {"default": "blocks.1.self_attn"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, target):
        model = model.clone()
        model.add_object_patch(f"diffusion_model.{target}.forward", lambda x, *args, **kwargs: x)
        return (model,)


class SPTestBlockPatch(ModelNode):
    """A block patch that only the model's own code calls."""

    def patch(self, model):
        model = model.clone()
        model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 1)
        return (model,)


class SPTestCfgFunction(ModelNode):
    """A CFG function: runs in ComfyUI's process, so it may stand behind SP Model Patch."""

    def patch(self, model):
        model = model.clone()
        model.set_model_sampler_cfg_function(lambda args: args["uncond"] + 0.7 * args["cond_scale"] * (args["cond"] - args["uncond"]))
        return (model,)


class SPTestWait:
    """Holds memory or time: not idempotent."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "seconds": ("FLOAT", {"default": 0.0})}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "wait"
    CATEGORY = "test"

    def wait(self, latent, seconds):
        import time

        time.sleep(seconds)
        return (latent,)


class SPTestObjectPatch:
    """Replaces something inside the diffusion model or beside it."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {"default": "diffusion_model.blocks.0.ffn"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, name):
        model = model.clone()
        model.add_object_patch(name, model.get_model_object(name))
        return (model,)


class SPTestWeightPatch:
    """Adds half of a weight to itself: what a merge does, under any key."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "key": ("STRING", {"default": "diffusion_model.blocks.0.ffn.0.weight"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, key):
        model = model.clone()
        model.add_patches({key: (model.model_state_dict(key)[key],)}, 0.5)
        return (model,)


class SPTestSetOption:
    """Writes into a clone's options directly, as some packs do instead of calling the patcher's methods."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "option": ("STRING", {"default": "patches"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, option):
        model = model.clone()
        options = model.model_options["transformer_options"]
        if option == "patches":
            options["patches"] = {"double_block": [lambda args: {"img": args["img"]}]}
        elif option == "locked":
            lock = threading.Lock()
            options["patches"] = {"double_block": [lambda args: {"img": args["img"]} if lock else {}]}
        elif option == "attention":
            options["optimized_attention_override"] = lambda function, *args, **kwargs: function(*args, **kwargs)
        else:
            options[option] = threading.Lock()
        return (model,)


class SPTestModelOption:
    """Sets a plain value that the model's own code reads in every forward: {"run_vx": false}."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "options": ("STRING", {"default": "{}"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, options):
        import json

        model = model.clone()
        model.model_options["transformer_options"].update(json.loads(options))
        return (model,)


class SPTestMoveFile:
    """Moves a file away, in the process that gets here first."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "path": ("STRING", {})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "move"
    CATEGORY = "test"

    def move(self, model, path):
        import os

        if os.path.exists(path):
            os.replace(path, f"{path}.moved")
        return (model,)


class SPTestSabotage:
    """Spoils a plan of the process it runs in, which is how tests show that they would notice. ``nothing`` mends it."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "how": ("STRING", {}), "turn": ("INT", {"default": 0})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "spoil"
    CATEGORY = "test"

    def spoil(self, model, how, turn):
        from dataclasses import replace

        from sp_core.plans import LTXAV, PLANS, WAN, Attention, override
        from sp_core.plans.plan import HookPoint, flat_layout
        from sp_core.plans.shard_rules import by_token

        def by_rank(value, state):
            return value + 1e-3 * state.rank

        def alone(self, function, *args, **kwargs):
            self.state.attended += 1
            self.state.self_attended += self.kind != "replicated_queries"
            return function(*args, **{**kwargs, "transformer_options": self.options})

        exchanged = vars(override).setdefault("_exchanged_call", override.ExchangedAttention.__call__)
        override.ExchangedAttention.__call__ = alone if how == "no exchange" else exchanged

        def with_blocks(plan, **changes):
            return replace(plan, blocks=tuple(replace(blocks, **changes) for blocks in plan.blocks))

        [audio_video] = LTXAV.blocks
        plans = {
            # what a split of the tokens does that leaves per-frame modulation as it is
            "frames forgotten": replace(
                with_blocks(WAN, shard={"freqs": by_token(1)}), choose_layout=flat_layout, hook_points=(HookPoint("head", gather=True),)
            ),
            "video to audio forgotten": with_blocks(LTXAV, attentions=audio_video.attentions[:1]),
            "renamed": with_blocks(WAN, attentions=(Attention("attention_of_tomorrow"),)),
            "ranks differ": with_blocks(LTXAV, shard={**audio_video.shard, "a_timestep": by_rank}),
        }
        PLANS.update({plan.architecture: plan for plan in (WAN, LTXAV, *([plans[how]] if how in plans else []))})
        return (model,)
