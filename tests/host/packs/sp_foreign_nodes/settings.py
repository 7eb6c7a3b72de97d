"""Changes deep in a module that no patcher knows of: what a node sets on the object that it got."""

import torch

from .base import ModelNode, rank


def _padding(module):
    for part in module.modules():
        if hasattr(part, "padding_mode"):
            part.padding_mode = "reflect"


def _number(module):
    module.decoder.head[0].scale = 9.0


def _forward(module):
    conv = module.decoder.conv1
    plain = conv.forward
    conv.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)


def _hook(module):
    module.decoder.register_forward_hook(lambda part, args, out: 2 * out)


def _weights(module):
    module.decoder.conv1.weight.data.copy_(module.decoder.conv1.weight.data.flip(0))


def _in_workers(module):
    if rank() is not None:
        _number(module)


def _little_memory(module):
    """Frames that are wider than 32 columns of the latent do not fit."""

    def look(part, args):
        if args[0].shape[-1] > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")

    module.decoder.conv1.register_forward_pre_hook(look)


CHANGES = {
    "padding": _padding,
    "number": _number,
    "forward": _forward,
    "hook": _hook,
    "weights": _weights,
    "in workers": _in_workers,
    "little memory": _little_memory,
}


class SPForeignVae:
    """Changes a VAE's module in place."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",), "how": (list(CHANGES),)}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "change"
    CATEGORY = "test"

    def change(self, vae, how):
        CHANGES[how](vae.first_stage_model)
        return (vae,)


class SPForeignHeads(ModelNode):
    """Sets a number deep in a model in place."""

    def patch(self, model):
        model = model.clone()
        model.get_model_object("diffusion_model").blocks[0].self_attn.num_heads = 1
        return (model,)
