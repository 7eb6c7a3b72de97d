"""What samplers of packs put into the options: the part of the MODEL that says what a sigma is."""

from .base import ModelNode


class SPForeignSamplingInOptions(ModelNode):
    """Puts the MODEL's ``model_sampling`` into the options, for code of the pack inside the model."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["model_sampling"] = model.get_model_object("model_sampling")
        return (model,)


def by_shift(function, q, k, v, heads, *args, **kwargs):
    """Attention whose sharpness the shift says."""
    found = (kwargs.get("transformer_options") or {}).get("model_sampling")
    return function(q * (1.0 if found is None else 1 + found.shift / 20), k, v, heads, *args, **kwargs)


class SPForeignReadsSampling(ModelNode):
    """Code inside the model that reads it, if it is there."""

    def patch(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = by_shift
        return (model,)
