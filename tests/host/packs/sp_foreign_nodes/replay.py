"""Nodes above a MODEL that come out differently, or cost something, when a worker runs them again."""

import os
import random

import torch

from .base import ModelNode, note, rank


class SPForeignDrawn:
    """A number that whoever runs the node draws anew."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls):
        return float("nan")

    RETURN_TYPES = ("FLOAT",)
    FUNCTION = "draw"
    CATEGORY = "test"

    def draw(self):
        return (random.SystemRandom().uniform(0.2, 2.0),)


class SPForeignDiffers(ModelNode):
    """Changes a weight in some processes only, as a node does that reads the clock, a file or the free memory."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "where": (["one rank", "all workers"],)}}

    def patch(self, model, where):
        model = model.clone()
        if rank() == 1 or (rank() is not None and where == "all workers"):
            key = "diffusion_model.blocks.0.ffn.0.weight"
            model.add_patches({key: (model.model_state_dict(key)[key],)}, 0.5)
        return (model,)


class SPForeignEncoder:
    """A text encoder's loader: a CLIP that LoRA loaders can patch and that holds ``megabytes`` of weights."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"megabytes": ("INT", {"default": 1, "max": 4096})}}

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, megabytes):
        return (_Encoder(megabytes),)


class _Encoder:
    def __init__(self, megabytes):
        self.cond_stage_model = torch.nn.Linear(1024, 256 * megabytes, bias=False)

    def clone(self):
        return self

    def add_patches(self, patches, *args):
        return []


class SPForeignControl(ModelNode):
    """A control that is worked out of a latent and added between blocks: what stands behind a VAE encode."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    def patch(self, model, latent):
        model = model.clone()
        strength = float(latent["samples"].mean())
        model.set_model_patch(lambda args: {"img": args["img"] * (1.0 + strength)}, "double_block")
        return (model,)


class SPForeignEncode:
    """What a VAE encode does: pixels to a latent."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",), "pixels": ("IMAGE",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "test"

    def encode(self, vae, pixels):
        return ({"samples": vae.encode(pixels)},)


_held = []


class SPForeignHolds(ModelNode):
    """Keeps every MODEL that it has seen, until it is told to let go."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "hold": ("BOOLEAN", {"default": True}), "number": ("INT", {"default": 0})}}

    def patch(self, model, hold, number):
        if hold:
            _held.append(model)
        else:
            _held.clear()
        return (model,)


class SPForeignPerRun(ModelNode):
    """An attention that grows sharper with each call of a sampling run, begins anew with each run, and tells of its life."""

    def patch(self, model):
        from comfy.patcher_extension import CallbacksMP

        model = model.clone()
        calls = []

        def override(function, q, *args, **kwargs):
            calls.append(1)
            return function(q * (1.0 + 0.02 * len(calls)), *args, **kwargs)

        def begin(patcher):
            calls.clear()
            note("lives", "pre_run")

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        model.add_callback(CallbacksMP.ON_PRE_RUN, begin)
        model.add_callback(CallbacksMP.ON_CLEANUP, lambda patcher: note("lives", "cleanup"))
        return (model,)


class SPForeignCompanion(ModelNode):
    """Brings a second model along, which the host loads together with the first, and whose companion it loads too."""

    def patch(self, model):
        import comfy.model_patcher
        from comfy.patcher_extension import CallbacksMP

        def companion(name):
            made = comfy.model_patcher.ModelPatcher(
                torch.nn.Linear(4, 4), load_device=model.load_device, offload_device=model.offload_device
            )
            made.add_callback(CallbacksMP.ON_LOAD, lambda *args: note("companions", name))
            return made

        model = model.clone()
        first, second = companion("first"), companion("second")
        first.set_additional_models("sp_foreign_nodes", [second])
        model.set_additional_models("sp_foreign_nodes", [first])
        return (model,)


class SPForeignCallback(ModelNode):
    """Has something done at the start of each run, wherever the model computes."""

    def patch(self, model):
        from comfy.patcher_extension import CallbacksMP

        model = model.clone()
        model.add_callback(CallbacksMP.ON_PRE_RUN, set_fast_sums)
        return (model,)


def set_fast_sums(patcher):
    note("callbacks", "set_fast_sums")


class SPForeignSaveEach:
    """Saves every latent of a list."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {})}}

    INPUT_IS_LIST = True
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"
    CATEGORY = "test"

    def save(self, samples, name):
        import folder_paths
        from safetensors.torch import save_file

        paths = [os.path.join(folder_paths.get_output_directory(), f"{name[0]}-{i}.safetensors") for i in range(len(samples))]
        for path, latent in zip(paths, samples, strict=True):
            save_file({"part0": latent["samples"].contiguous()}, path)
        return {"ui": {"saved": paths}}
