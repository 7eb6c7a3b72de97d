"""Functions around and between blocks: replacements with a state, guiders that put them in, what is kept from step to step."""

import threading

from .base import ModelNode


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
