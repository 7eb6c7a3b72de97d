"""Nodes that get in the way: they want memory, are slow in the workers, or fail on one rank."""

import itertools
import logging
import os
import time

import torch

from .base import ModelNode
from .base import rank as own_rank


class SPTestMemoryDemand:
    """What a VAE decode does: asks the host for memory, then loads a model of its own and uses it."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "megabytes": ("INT", {"default": 64}), "all": ("BOOLEAN", {"default": True})}}

    RETURN_TYPES = ("LATENT",)
    OUTPUT_NODE = True
    FUNCTION = "demand"
    CATEGORY = "test"

    def demand(self, samples, megabytes, all):
        import comfy.model_management as management
        import comfy.model_patcher

        from sp_core.host.ui.status import status

        def held():
            return [worker["weight_bytes"] for worker in status()["workers"]]

        device = management.get_torch_device()
        before = held()
        # on a CPU the host never wants memory by itself
        if all:
            management.free_memory(1e30, device)
        else:
            _free_a_megabyte(management, device)
        during = held()
        module = torch.nn.Linear(1024, 256 * megabytes, bias=False)
        patcher = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=management.unet_offload_device())
        management.load_models_gpu([patcher], memory_required=megabytes << 20)
        module(torch.ones(1, 1024, device=device))
        return {"ui": {"before": before, "during": during}, "result": (samples,)}


def _free_a_megabyte(management, device):
    """As if nothing were free: what is free of main memory changes by more than that from one moment to the next."""
    measured = management.get_free_memory
    management.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
    try:
        management.free_memory(1 << 20, device)
    finally:
        management.get_free_memory = measured


class SPTestTakeOver:
    """What the host asks when a clone of a loaded model is to sample: how much more memory that needs."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "model": ("MODEL",)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "ask"
    CATEGORY = "test"

    def ask(self, samples, model):
        import comfy.model_management as management

        clone = management.LoadedModel(model.clone())
        asked = [clone.model_memory_required(clone.device)]
        for entry in management.current_loaded_models:
            if clone.model.is_clone(entry.model):
                # on a CPU this is where the model is loaded, too
                before, entry.model.offload_device = entry.model.offload_device, torch.device("meta")
                entry.model.detach(unpatch_all=False)
                entry.model.offload_device = before
        asked.append(clone.model_memory_required(clone.device))
        return {"ui": {"size": [model.model_size()], "required": asked}}


class SPTestReleaseOneRank:
    """What a memory demand on one GPU does to its worker: the others keep their weights."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "model": ("MODEL",), "rank": ("INT", {"default": 0})}}

    RETURN_TYPES = ("LATENT",)
    OUTPUT_NODE = True
    FUNCTION = "release"
    CATEGORY = "test"

    def release(self, samples, model, rank):
        from sp_core.host.ui.pool_models import release_body
        from sp_core.host.ui.session import session

        pool = session().running_pool(model.sp)
        pool.call("release", {**release_body(pool, model.sp.recipe.key), "ranks": [rank], "wholly": False})
        return {"ui": {"held": [state.weight_bytes for state in pool.shared_state.ranks]}, "result": (samples,)}


class SPTestUnsteadyLink(ModelNode):
    """What GPUs do at sizes between: the link is fast in one step and slow in the next, so that other ranks stay idle each time."""

    #: FLOP/s, bytes/s, seconds a collective
    RATES = ((1e9, 1e12, 0.0), (1e15, 1e3, 1.0), (1e9, 1e6, 0.0))

    @classmethod
    def INPUT_TYPES(cls):
        # what was run once is not run again, so each use has a number of its own
        return {"required": {"model": ("MODEL",), "number": ("INT", {"default": 0})}}

    def patch(self, model, number):
        if own_rank() is not None:
            from sp_core.host.worker.decide import Decider
            from sp_core.planner.cost import MeasuredRates

            if not hasattr(Decider, "steady"):
                Decider.steady = (Decider.rates, Decider.may_idle, Decider.choice)
            unsteady = itertools.cycle(MeasuredRates("test", *rates) for rates in self.RATES)
            link, steady_choice = [next(unsteady)], Decider.steady[2]

            def choice(decider, model, call):
                link[0] = next(unsteady)
                return steady_choice(decider, model, call)

            Decider.rates = lambda decider, dtype: link[0]
            Decider.may_idle, Decider.choice = lambda decider, model: True, choice
        return (model.clone(),)


class SPTestSteadyLink(SPTestUnsteadyLink):
    """Undoes that."""

    def patch(self, model, number):
        if own_rank() is not None:
            from sp_core.host.worker.decide import Decider

            if hasattr(Decider, "steady"):
                Decider.rates, Decider.may_idle, Decider.choice = Decider.steady
        return (model.clone(),)


class SPTestCountLoads(ModelNode):
    """Tells in the log whenever a worker's host is asked to load models."""

    def patch(self, model):
        import comfy.model_management as management

        if own_rank() is not None and not hasattr(management, "unwatched_load"):
            management.unwatched_load = management.load_models_gpu

            def load(*args, **kwargs):
                logging.info("SPTestCountLoads: asked to load")
                return management.unwatched_load(*args, **kwargs)

            management.load_models_gpu = load
        return (model.clone(),)


class SPTestCountWalks(ModelNode):
    """Tells in the log whenever a worker walks over the parameters of a block."""

    def patch(self, model):
        if own_rank() is not None and not hasattr(torch.nn.Module, "unwatched_named_parameters"):
            torch.nn.Module.unwatched_named_parameters = torch.nn.Module.named_parameters

            def named_parameters(module, *args, **kwargs):
                if type(module).__name__ == "WanAttentionBlock":
                    logging.info("SPTestCountWalks: a block's parameters")
                return module.unwatched_named_parameters(*args, **kwargs)

            torch.nn.Module.named_parameters = named_parameters
        return (model.clone(),)


class SPTestSlowInWorkers:
    """Takes its time when a worker runs it, and as much memory as the model: a loader of a big file."""

    @classmethod
    def INPUT_TYPES(cls):
        until = ("STRING", {"default": ""})
        return {"required": {"model": ("MODEL",), "seconds": ("FLOAT", {"default": 1.0})}, "optional": {"until": until}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "wait"
    CATEGORY = "test"

    def wait(self, model, seconds, until=""):
        if own_rank() is not None:
            if until:
                _wait_until(until)
            parts = []
            for _ in range(10):
                time.sleep(seconds / 10)
                parts.append(os.urandom(model.model_size() // 10))
        return (model.clone(),)


class SPTestFault:
    """Does something bad in one rank's ``call``-th attention call."""

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 0})
        return {"required": {"model": ("MODEL",), "rank": integer, "call": integer, "kind": ("STRING", {"default": "error"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model, rank, call, kind):
        model = model.clone()
        seen = 0

        def override(function, *args, **kwargs):
            nonlocal seen
            seen += 1
            if own_rank() == rank and seen == call + 1:
                _fail(kind)
            return function(*args, **kwargs)

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        return (model,)


def _wait_until(path):
    """Until the test makes this file."""
    while not os.path.exists(path):
        time.sleep(0.02)


def _fail(kind):
    if kind == "device memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.64 GiB")
    if kind == "main memory":
        raise MemoryError
    if kind == "device lost":
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    if kind in ("hang", "slow"):
        time.sleep(3600 if kind == "hang" else 5)
        return
    if kind.startswith("until "):
        _wait_until(kind.removeprefix("until "))
        return
    if kind == "exit":
        os._exit(7)
    raise ValueError("a fault that a test put there")
