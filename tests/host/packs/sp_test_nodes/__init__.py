"""Nodes for host tests: seeded conditioning and latents, and what their tests need to look at."""

import os

import torch


def _random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SPTestConditioning:
    """Random text embeddings, (batch, tokens, dim)."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1, "min": 0, "max": 1 << 30})
        return {"required": {"seed": integer, "tokens": integer, "dim": integer}, "optional": {"frame_rate": ("FLOAT", {"default": 25.0})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, seed, tokens, dim, frame_rate=None):
        extra = {} if frame_rate is None else {"frame_rate": frame_rate}
        return ([[_random((1, tokens, dim), seed), extra]],)


class SPTestLatent:
    """Random latents: one shape, or two (video; audio) for a nested latent. ``scale`` 0 is an empty latent."""

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"shapes": ("STRING", {}), "seed": ("INT", {"default": 0}), "scale": ("FLOAT", {"default": 0.0})},
            "optional": {"mask": ("STRING", {"default": ""})},
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, shapes, seed, scale, mask=""):
        shapes = [tuple(map(int, shape.split(","))) for shape in shapes.split(";")]
        parts = [_random(shape, seed + i) * scale for i, shape in enumerate(shapes)]
        masks = [self._mask(mask, shape) if i == 0 else torch.ones((shape[0], 1, *shape[2:])) for i, shape in enumerate(shapes)]
        if len(parts) == 1:
            latent = {"samples": parts[0]}
            if mask:
                latent["noise_mask"] = masks[0]
            return (latent,)
        from comfy.nested_tensor import NestedTensor

        latent = {"samples": NestedTensor(parts)}
        if mask:
            latent["noise_mask"] = NestedTensor(masks)
        return (latent,)

    @staticmethod
    def _mask(kind, shape):
        mask = torch.ones((shape[0], 1, *shape[2:]))
        if kind == "first_frame":
            mask[:, :, 0] = 0
        if kind == "corner":
            mask[..., : shape[-2] // 2, : shape[-1] // 2] = 0.25
            mask[..., 0, 0] = 0
        return mask


class SPTestSaveLatent:
    """Writes a latent, nested or not, to the output folder."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {})}, "optional": {"report": ("STRING", {"forceInput": True})}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"
    CATEGORY = "test"

    def save(self, samples, name, report=""):
        import folder_paths
        from safetensors.torch import save_file

        samples = samples["samples"]
        parts = samples.unbind() if getattr(samples, "is_nested", False) else [samples]
        path = os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors")
        save_file({f"part{i}": part.contiguous().float() for i, part in enumerate(parts)}, path)
        return {"ui": {"saved": [path], "report": [report]}}


class SPTestAttentionOverride:
    """Replaces the attention function by torch's, counting its calls: stands for Sage and Flash patches."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

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


class SPTestBlockPatch:
    """A block patch that only the model's own code calls."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model):
        model = model.clone()
        model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 1)
        return (model,)


class SPTestCfgFunction:
    """A CFG function: runs in the UI process, so it may stand behind SP Model Patch."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

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


NODE_CLASS_MAPPINGS = {
    name: value for name, value in list(globals().items()) if name.startswith("SPTest")
}
