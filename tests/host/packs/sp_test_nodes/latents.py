"""Seeded conditioning and latents, and saving them."""

import os

import torch


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SPTestConditioning:
    """Random text embeddings, (1, tokens, dim)."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1, "min": 0, "max": 1 << 30})
        return {"required": {"seed": integer, "tokens": integer, "dim": integer}, "optional": {"frame_rate": ("FLOAT", {"default": 25.0})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, seed, tokens, dim, frame_rate=None):
        extra = {} if frame_rate is None else {"frame_rate": frame_rate}
        return ([[random((1, tokens, dim), seed), extra]],)


class SPTestTextMask:
    """Hides the last ``hidden`` text tokens."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",), "hidden": ("INT", {"default": 1})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "mask"
    CATEGORY = "test"

    def mask(self, conditioning, hidden):
        out = []
        for tokens, extra in conditioning:
            mask = torch.ones(tokens.shape[:2], dtype=torch.int64)
            mask[:, -hidden:] = 0
            out.append([tokens, {**extra, "attention_mask": mask}])
        return (out,)


class SPTestKeyframeSlots:
    """Marks latent frames as generated keyframes, as LTX 2.4's keyframe workflows do."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 0})
        return {"required": {"conditioning": ("CONDITIONING",), "latent": ("LATENT",), "first": integer, "count": integer}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "mark"
    CATEGORY = "test"

    def mark(self, conditioning, latent, first, count):
        samples = latent["samples"]
        samples = samples.unbind()[0] if getattr(samples, "is_nested", False) else samples
        slots = {"tokens_per_frame": samples.shape[-2] * samples.shape[-1], "first_latent_frame": first, "num_keyframes": count}
        return ([[tokens, {**extra, "generated_keyframes": slots}] for tokens, extra in conditioning],)


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
        parts = [random(shape, seed + i) * scale for i, shape in enumerate(shapes)]
        kinds = [*mask.split(";"), *[""] * len(shapes)]
        masks = [self._mask(kind, shape) for kind, shape in zip(kinds, shapes, strict=False)]
        latent = {"samples": self._joined(parts)}
        if mask:
            latent["noise_mask"] = self._joined(masks)
        return (latent,)

    @staticmethod
    def _joined(parts):
        if len(parts) == 1:
            return parts[0]
        from comfy.nested_tensor import NestedTensor

        return NestedTensor(parts)

    @staticmethod
    def _mask(kind, shape):
        mask = torch.ones((shape[0], 1, *shape[2:]))
        if kind == "none":
            mask[:] = 0
        if kind == "first_frame":
            mask[:, :, 0] = 0
        if kind == "ramp":
            mask *= torch.linspace(0.2, 1, shape[2]).view(1, 1, -1, *[1] * (len(shape) - 3))
        if kind == "corner":
            mask[..., : shape[-2] // 2, : shape[-1] // 2] = 0.25
            mask[..., 0, 0] = 0
        return mask


class SPTestSaveLatent:
    """Writes a latent, nested or not, to the output folder, and passes on what the patched model reports."""

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"samples": ("LATENT",), "name": ("STRING", {})},
            "optional": {"report": ("STRING", {"forceInput": True}), "model": ("MODEL",)},
        }

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"
    CATEGORY = "test"

    def save(self, samples, name, report="", model=None):
        import folder_paths
        from safetensors.torch import save_file

        samples = samples["samples"]
        parts = samples.unbind() if getattr(samples, "is_nested", False) else [samples]
        path = os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors")
        save_file({f"part{i}": part.contiguous().float() for i, part in enumerate(parts)}, path)
        if model is not None:
            from sp_core.host.ui.report import report as report_of

            report = report_of(model)
        return {"ui": {"saved": [path], "report": [report]}}
