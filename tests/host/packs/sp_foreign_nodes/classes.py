"""Other classes and compiled parts in the place of the model's."""

import torch

from .base import ModelNode


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


class SPForeignCompile(ModelNode):
    """Asks for compiling as ComfyUI's own node does, by ComfyUI's own function, with a backend that needs no compiler."""

    @classmethod
    def INPUT_TYPES(cls):
        optional = {
            "backend": ("STRING", {"default": "aot_eager"}),
            "keys": ("STRING", {"default": ""}),
            "mode": ("STRING", {"default": ""}),
        }
        return {"required": {"model": ("MODEL",)}, "optional": optional}

    def patch(self, model, backend="aot_eager", keys="", mode=""):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = model.clone()
        set_torch_compile_wrapper(model, backend, mode=mode or None, keys=[key for key in keys.split(",") if key])
        return (model,)
