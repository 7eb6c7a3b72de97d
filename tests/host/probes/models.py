"""What is relied on in a MODEL: patches, wrappers, callbacks, attention."""

from __future__ import annotations

import inspect
from typing import Any

from .registry import expect, patcher, probe


@probe
def patches_behind_our_node_come_through_these_methods() -> None:
    from comfy.model_patcher import ModelPatcher

    from sp_core.host.ui.patcher import SPModelPatcher

    for name, mine in vars(SPModelPatcher).items():
        theirs = getattr(ModelPatcher, name, None)
        if not inspect.isfunction(mine) or theirs is None or name.startswith("__"):
            continue
        parameters = inspect.signature(theirs).parameters.values()
        wanted = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        have = inspect.signature(mine).parameters
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in have.values())
        expect(takes_any or set(wanted) <= set(have), f"ModelPatcher.{name} takes {wanted}, our override takes {list(have)}")
    for name in ("add_patches", "add_object_patch", "set_model_patch", "set_model_patch_replace", "clone", "pre_run", "cleanup"):
        expect(hasattr(ModelPatcher, name), f"ModelPatcher.{name} is gone: patches behind SP Model Patch would not be noticed")


@probe
def attention_asks_an_override() -> None:
    import torch
    from comfy.ldm.modules.attention import optimized_attention

    seen = []

    def override(function: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(heads)
        return function(q, k, v, heads, *args, **kwargs)

    x = torch.randn(1, 6, 8)
    out = optimized_attention(x, x, x, 2, transformer_options={"optimized_attention_override": override})
    expect(seen == [2] and out.shape == x.shape, "optimized_attention does not call transformer_options['optimized_attention_override']")


@probe
def wrappers_run_around_the_diffusion_model() -> None:
    from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

    options = {"wrappers": {WrappersMP.DIFFUSION_MODEL: {"key": [lambda executor, x: executor(x) + 1]}}}
    wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
    run = WrapperExecutor.new_class_executor(lambda x: 2 * x, None, wrappers)
    expect(run.execute(3) == 7, "DIFFUSION_MODEL wrappers are found or run in another way")


@probe
def a_model_has_what_a_twin_of_it_needs() -> None:
    import comfy.model_base
    from comfy.model_patcher import ModelPatcher

    source = inspect.getsource(ModelPatcher.__init__) + inspect.getsource(comfy.model_base.BaseModel.__init__)
    counted = ("model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram")
    for name in (*counted, "current_weight_patches_uuid", "memory_usage_factor"):
        expect(name in source, f"a model has no {name} any more, so a second patcher on one model would share what it replaces it by")
    expect(hasattr(comfy.model_base.BaseModel, "memory_required"), "BaseModel.memory_required is gone")


@probe
def clones_share_the_backup_of_what_they_patch() -> None:
    model, _ = patcher()
    other = model.clone()
    before = model.model.weight
    other.add_object_patch("in_features", 7)
    other.patch_model(load_weights=False)
    expect(model.model.in_features == 7, "object patches no longer land in the model that clones share")
    expect(
        model.object_patches_backup.get("in_features") == 4,
        "a clone no longer sees what another one replaced, so SP Model Patch would inherit another branch's patches",
    )
    other.unpatch_model()
    expect(model.model.in_features == 4 and model.model.weight is before, "unpatching does not restore what was there")


@probe
def a_patched_model_goes_with_its_last_clone() -> None:
    """What the workers hold for it goes then, and Python may look for circles of references much later."""
    import gc
    import weakref
    from types import SimpleNamespace

    import comfy.ldm.wan.model
    import comfy.ops
    import comfy.sample
    import comfy.sd
    import torch

    from sp_core.demo.checkpoints import WAN, random_weights
    from sp_core.host.ui.patcher import make_sp_patcher
    from sp_core.pool.devices import WorkerDevice

    shape = {name: WAN[name] for name in ("model_type", "in_dim", "out_dim")} | {"dim": 128, "ffn_dim": 64, "num_heads": 1, "num_layers": 1}
    module = comfy.ldm.wan.model.WanModel(**shape, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    source = comfy.sd.load_diffusion_model_state_dict(random_weights(module, 0))
    stats = {"exchange_s": 0, "exchange_bytes": 0, "exchanges": 0}
    stats |= {
        "whole": {},
        "why_whole": {},
        "apart": [],
        "compiled": "",
        "decision": "",
        "transport": "",
        "gathered_bytes": 0,
        "device_bytes": 0,
        "weights": "",
    }
    workers = SimpleNamespace(
        out_of_step=False, last_call=SimpleNamespace(bytes_sent=0, bytes_reused=0), shared_state=SimpleNamespace(ranks=[])
    )
    workers.call = lambda operation, body, **_: {"output": torch.zeros_like(body["named"]["x"]), "stats": stats}
    session: Any = SimpleNamespace(ensure=lambda _: workers, running_pool=lambda *_: None, holds=lambda _: True)
    session.finish = session.release = lambda *_: None
    devices = (WorkerDevice("cpu", 0), WorkerDevice("cpu", 1))
    words = [[torch.zeros(1, 7, 4096), {}]]
    gc.collect()
    gc.disable()
    try:
        model: Any = make_sp_patcher(source, SimpleNamespace(key="key"), session, devices)  # type: ignore[arg-type]
        parts = {"MODEL": model, "stand-in": model.model.diffusion_model, "remote model": model.sp}
        left = {name: weakref.ref(part) for name, part in parts.items()}
        parts.clear()
        latent = torch.zeros(1, 16, 1, 4, 4)
        settings = (2, 4.0, "euler", "simple", words, words, latent)
        out = comfy.sample.sample(model.clone(), latent, *settings, disable_pbar=True, seed=1)
        expect(out.shape == latent.shape, "nothing was sampled")
        expect(all(reference() is not None for reference in left.values()), "a MODEL goes while ComfyUI holds it")
        del model
        stays = [name for name, reference in left.items() if reference() is not None]
        expect(not stays, f"the {' and the '.join(stays)} of a patched MODEL stay until Python looks for circles")
    finally:
        gc.enable()


@probe
def callbacks_and_wrappers_have_the_names_that_are_looked_for() -> None:
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    from sp_core.host.compiled import COMPILE_KEY
    from sp_core.host.ui.late_callbacks import _WHERE_IT_COMPUTES

    known = {value for name, value in vars(CallbacksMP).items() if name.startswith("ON_")}
    expect(set(_WHERE_IT_COMPUTES) <= known, f"ComfyUI has no callbacks {sorted(set(_WHERE_IT_COMPUTES) - known)}")
    expect(WrappersMP.OUTER_SAMPLE == "outer_sample", "there is no wrapper around a sampling run")
    from comfy_api.torch_helpers import torch_compile

    expect(torch_compile.COMPILE_KEY == COMPILE_KEY, "a compiled model is no longer told by its wrapper's key")


@probe
def a_patch_of_a_shared_out_vae_is_refused_by_our_nodes_name() -> None:
    import torch

    from sp_core.errors import SPError
    from sp_core.host.ui.vae_node import SPVaePatcher

    cpu = torch.device("cpu")
    shared = SPVaePatcher(torch.nn.Linear(2, 2), cpu, cpu)
    for add in (lambda: shared.add_object_patch("weight", None), lambda: shared.add_patches({"weight": (torch.zeros(2, 2),)})):
        try:
            add()
        except SPError as error:
            expect("to the VAE behind SP VAE Patch" in str(error), f"the sentence is: {error}")
        else:
            raise AssertionError("a patch of a VAE that computes in the workers is taken, and lost")
