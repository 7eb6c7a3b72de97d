"""Models of ComfyUI's classes that are smaller than its detection of checkpoints allows (it takes the width of Qwen-Image as given)."""

import json
import math

import torch


class SPTestTinyModel:
    """A MODEL of a class of comfy.supported_models, with ``arguments`` (JSON) of its diffusion model and random weights."""

    @classmethod
    def INPUT_TYPES(cls):
        text = ("STRING", {"default": ""})
        return {"required": {"kind": text, "arguments": text, "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, kind, arguments, seed):
        import comfy.model_management
        import comfy.model_patcher
        import comfy.supported_models

        given = json.loads(arguments)
        config = getattr(comfy.supported_models, kind)(given)
        # some set sizes of the real model beside what is detected
        config.unet_config.update(given)
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, "")
        model.diffusion_model.load_state_dict(_random_weights(model.diffusion_model, seed))
        devices = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
        return (comfy.model_patcher.ModelPatcher(model, *devices),)


def _random_weights(model, seed):
    """Weights that keep activations near one, and no two rows alike."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        elif tensor.dim() > 1 and name.endswith("weight"):
            weights[name] = noise / math.sqrt(math.prod(tensor.shape[1:]))
        else:
            weights[name] = 0.1 * noise
    return weights


class SPTestBetweenBlocks:
    """Changes the picture between the blocks, as ControlNets of Z-Image and Qwen-Image do."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model):
        model = model.clone()
        model.set_model_patch(lambda args: {"img": 1.1 * args["img"], "txt": args["txt"]}, "double_block")
        return (model,)


class SPTestOwnAttention(SPTestBetweenBlocks):
    """Swaps the function that JoyImage attends with for one that reads no options, in the whole process and for good."""

    def patch(self, model):
        import comfy.ldm.joyimage.model as joyimage

        def attend(q, k, v, heads, **kwargs):
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        joyimage.optimized_attention = attend
        return (model.clone(),)


class SPTestNormBeforeAttention(SPTestOwnAttention):
    """Beside the swapped attention another pack's norm before it. With ``counts`` it does a little more with each call."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "counts": ("BOOLEAN", {"default": False})}}

    def patch(self, model, counts):
        (model,) = super().patch(model)
        calls = []

        def norm(x):
            if counts:
                calls.append(1)
            return torch.nn.functional.layer_norm(x, x.shape[-1:]) * (1 + 0.1 * len(calls))

        model.add_object_patch("diffusion_model.double_blocks.0.img_norm1.forward", norm)
        return (model,)
