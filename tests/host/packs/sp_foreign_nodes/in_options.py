"""Objects and plain data in the transformer options that an attention function reads or changes."""

from .base import ModelNode


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
