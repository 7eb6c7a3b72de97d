"""Cases of the packs that load models, sample in their own ways, or cache."""

from __future__ import annotations

from typing import Any

from host.graphs import Branch, Link, latent, sample
from host.real_packs.cases import FAILS, GUIDED, REFUSED, SAME, SHARED, Case, loader, sampler
from host.real_packs.kjnodes import ALL, ALONE, BY_ITSELF, IN_WORKERS, ONE, advanced, mask, start

WAN_FILE, WHOLE = {"unet_name": "tiny_wan_t2v.safetensors"}, {"ckpt_name": "tiny_wan_whole.safetensors"}
Q8, Q4, LTXV_Q8 = ({"unet_name": f"tiny_{name}.gguf"} for name in ("wan_q8", "wan_q4", "ltxv_q8"))
#: with the official names, and with Wan's
AVATAR_Q8, AVATAR_Q4 = ({"unet_name": f"tiny_avatar_{name}.gguf"} for name in ("q8", "rekeyed_q4"))


def then_lora(node: str, count: int = 1, lora: str = "tiny_wan_lora", **inputs: Any) -> Any:
    def loaded(branch: Branch, case: Case) -> Link:
        model = branch.add(node, **inputs)[0]
        for strength in (0.8, -0.5)[:count]:
            model = branch.add("LoraLoaderModelOnly", model=model, lora_name=f"{lora}.safetensors", strength_model=strength)[0]
        return model

    return loaded


# -- ComfyUI-GGUF, ComfyUI-MultiGPU -----------------------------------------------------

_GGUF, _MULTI = "ComfyUI-GGUF", "ComfyUI-MultiGPU"
GGUF: list[Case] = [
    loader(_GGUF, "UnetLoaderGGUF", inputs=Q8, label="Q8_0", changes=True, settings=ALL),
    loader(_GGUF, "UnetLoaderGGUF", inputs=Q4, label="Q4_0", changes=True, settings=ALL),
    loader(_GGUF, "UnetLoaderGGUF", "ltxv", inputs=LTXV_Q8, label="Q8_0", changes=True),
    Case(_GGUF, "UnetLoaderGGUF", label="Q4_0, one LoRA", behind=None, loaded=then_lora("UnetLoaderGGUF", 1, **Q4)),
    Case(_GGUF, "UnetLoaderGGUF", label="Q8_0, two LoRAs", behind=None, loaded=then_lora("UnetLoaderGGUF", 2, **Q8)),
    loader(_GGUF, "UnetLoaderGGUF", "avatar", inputs=AVATAR_Q8, label="Q8_0", changes=True),
    Case(
        _GGUF,
        "UnetLoaderGGUF",
        "avatar",
        label="Q4_0, one LoRA",
        behind=None,
        loaded=then_lora("UnetLoaderGGUF", 1, "tiny_avatar_lora", **AVATAR_Q4),
    ),
    loader(
        _GGUF,
        "UnetLoaderGGUFAdvanced",
        inputs={**Q4, "dequant_dtype": "float32", "patch_dtype": "float32", "patch_on_device": True},
        changes=True,
    ),
]


def multi(node: str, label: str = "", *, changes: bool = False, **inputs: Any) -> Case:
    return loader(_MULTI, node, inputs=inputs, label=label, changes=changes)


EXPERT = {"expert_mode_allocations": "cpu,100%"}
MULTI: list[Case] = [
    multi("UNETLoaderMultiGPU", **WAN_FILE),
    multi("UNETLoaderDisTorch2MultiGPU", **WAN_FILE),
    multi("UNETLoaderDisTorch2MultiGPU", "expert", **WAN_FILE, **EXPERT),
    multi("UNetLoaderLP", **WAN_FILE),
    multi("CheckpointLoaderSimpleMultiGPU", **WHOLE),
    multi("CheckpointLoaderSimpleDisTorch2MultiGPU", **WHOLE),
    multi("CheckpointLoaderAdvancedMultiGPU", **WHOLE),
    multi("CheckpointLoaderAdvancedDisTorch2MultiGPU", **WHOLE),
    multi("UnetLoaderGGUFMultiGPU", **Q8, changes=True),
    multi("UnetLoaderGGUFAdvancedMultiGPU", **Q8, changes=True),
    multi("UnetLoaderGGUFDisTorchMultiGPU", **Q4, changes=True),
    multi("UnetLoaderGGUFDisTorch2MultiGPU", **Q4, changes=True),
    multi("UnetLoaderGGUFAdvancedDisTorch2MultiGPU", **Q4, changes=True),
    Case(_MULTI, "UnetLoaderGGUFMultiGPU", label="two LoRAs", behind=None, loaded=then_lora("UnetLoaderGGUFMultiGPU", 2, **Q8)),
    Case(_MULTI, "UNETLoaderMultiGPU", label="two LoRAs", behind=None, loaded=then_lora("UNETLoaderMultiGPU", 2, **WAN_FILE)),
]

# -- rgthree-comfy ----------------------------------------------------------------------

_RGTHREE = "rgthree-comfy"
STACK = {"lora_01": "tiny_wan_lora.safetensors", "strength_01": 0.7}
POWER = {"lora_1": {"on": True, "lora": "tiny_wan_lora.safetensors", "strength": 0.7}}


def any_switch(branch: Branch, case: Case, model: Link) -> Link:
    return branch.add(case.node, any_01=model)[0]


def context(branch: Branch, case: Case, model: Link) -> Link:
    kept = branch.add("Context (rgthree)", model=model)[0]
    if case.node != "Context (rgthree)":
        kept = branch.add(case.node, ctx_01=kept)[0]
    return branch.add("Context (rgthree)", base_ctx=kept)[1]


RGTHREE: list[Case] = [
    Case(_RGTHREE, "Power Lora Loader (rgthree)", inputs=POWER, behind=REFUSED, settings=ALL),
    Case(_RGTHREE, "Lora Loader Stack (rgthree)", inputs=STACK, before=FAILS, behind=None, settings=ONE, note="wants a CLIP"),
    Case(_RGTHREE, "Any Switch (rgthree)", applied=any_switch, changes=False),
    Case(_RGTHREE, "Context (rgthree)", applied=context, changes=False),
    Case(_RGTHREE, "Context Switch (rgthree)", applied=context, changes=False),
    Case(_RGTHREE, "Context Merge (rgthree)", applied=context, changes=False),
    Case(_RGTHREE, "Context Big (rgthree)", applied=lambda b, c, m: b.add(c.node, model=m)[1], changes=False),
]

# -- RES4LYF ----------------------------------------------------------------------------

_RES = "RES4LYF"


def clown(node: str, model: str, label: str = "", guide_mode: str = "", *, behind: str = SAME, **inputs: Any) -> Case:
    def sampled(branch: Branch, case: Case, wire: Link, cfg: float) -> Link:
        words = case.words(branch)
        settings: dict[str, Any] = {"steps": 3, "seed": 4, "cfg": cfg, **inputs}
        if guide_mode:
            guide = latent(branch, case.latent.split(";")[0], scale=1.0, seed=12)
            made = {"guide": guide, "guide_mode": guide_mode, "weight": 0.5, "weight_scheduler": "constant", "end_step": 3}
            settings["guides"] = branch.add("ClownGuide_Beta", **made)[0]
        kept = {name: value for name, value in settings.items() if value is not None}
        return branch.add(node, model=wire, positive=words[0], negative=words[1], latent_image=case.start(branch), **kept)[0]

    settings = ONE if guide_mode or behind == FAILS else (GUIDED, SHARED)
    return sampler(_RES, node, model, sampled, label=label, behind=behind, settings=settings)


def shark(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    inner = branch.add("ClownSampler_Beta", sampler_name="exponential/res_2s", seed=3, eta=0.25)[0]
    inputs = {"model": model, "positive": words[0], "negative": words[1], "sampler": inner, "latent_image": case.start(branch)}
    return branch.add("SharkSampler_Beta", steps=2, cfg=cfg, seed=4, **inputs)[0]


def chained(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    texts = {"positive": words[0], "negative": words[1]}
    first = branch.add("ClownsharKSampler_Beta", model=model, steps=4, steps_to_run=2, cfg=cfg, latent_image=case.start(branch), **texts)
    return branch.add("ClownsharkChainsampler_Beta", model=model, cfg=cfg, latent_image=first[0], **texts)[0]


def by_name(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    """The host's KSampler with a sampler that the pack added to its list."""
    return sample(branch, model, case.words(branch), case.start(branch), cfg=cfg, steps=3, sampler_name=case.label, scheduler="beta57")


def ultra(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    sigmas = branch.add("BasicScheduler", model=model, scheduler="simple", steps=2, denoise=1.0)[0]
    inner = branch.add("KSamplerSelect", sampler_name="euler")[0]
    texts = {"positive": words[0], "negative": words[1], "latent_image": case.start(branch)}
    return branch.add(case.node, model=model, sampler=inner, sigmas=sigmas, cfg=cfg, noise_type="gaussian", noise_seed=5, **texts)[0]


def with_noise(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    noise = branch.add("AdvancedNoise", noise_seed=5, noise_type="fractal")[0]
    return advanced(branch, case, model, cfg, noise=noise)


def scheduled(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    weights = branch.add("Linear Quadratic Advanced", model=model, steps=3, denoise=1.0, inflection_percent=0.5)[0]
    return advanced(branch, case, model, cfg, sigmas=weights)


def regional(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    """Two texts on the two halves of the picture: attention with a mask, on a model of ReWanPatcher."""
    words = case.words(branch)
    other = branch.add("SPTestConditioning", seed=7, tokens=7, dim=4096)[0]
    both = branch.add("ClownRegionalConditioning2", conditioning_masked=words[0], conditioning_unmasked=other, mask=mask(branch))[0]
    settings = {"steps": 2, "cfg": cfg, "seed": 4, "sampler_name": "multistep/res_2m"}
    texts = {"positive": both, "negative": words[1]}
    return branch.add("ClownsharKSampler_Beta", model=model, latent_image=case.start(branch), **texts, **settings)[0]


def rewan(branch: Branch, case: Case, model: Link) -> Link:
    return branch.add("ReWanPatcherAdvanced", model=model, **case.wires(branch))[0]


COMPILED: dict[str, Any] = {"plain_stock": True, "own": True, "changes": False, "behind": None, "note": IN_WORKERS}
RES4LYF: list[Case] = [
    clown("ClownsharKSampler_Beta", "wan", "res_2m", sampler_name="multistep/res_2m"),
    clown("ClownsharKSampler_Beta", "wan", "res_2s", sampler_name="exponential/res_2s", eta=0.5),
    clown("ClownsharKSampler_Beta", "ltxv", "res_2m", sampler_name="multistep/res_2m"),
    clown("ClownsharKSampler_Beta", "ltxav", "res_2m", sampler_name="multistep/res_2m", behind=FAILS),
    *(clown("ClownsharKSampler_Beta", "wan", f"guide {mode}", mode) for mode in ("epsilon", "flow", "lure", "data", "sync")),
    clown("BongSampler", "wan", sampler_name="res_2s_sde", behind=FAILS),
    clown("ClownsharKSampler", "wan", "legacy", seed=None, noise_seed=4),
    sampler(_RES, "SharkSampler_Beta", "wan", shark),
    sampler(_RES, "UltraSharkSampler", "wan", ultra, behind=FAILS, settings=ONE),
    sampler(_RES, "ClownsharkChainsampler_Beta", "wan", chained),
    sampler(_RES, "KSampler", "wan", by_name, label="res_2s"),
    sampler(_RES, "KSampler", "wan", by_name, label="deis_2m"),
    sampler(_RES, "AdvancedNoise", "wan", with_noise, settings=ONE),
    sampler(_RES, "Linear Quadratic Advanced", "wan", scheduled, settings=ONE),
    Case(_RES, "ModelSamplingAdvanced", inputs={"shift": 7.0}),
    Case(_RES, "ModelSamplingAdvancedResolution", inputs={"latent_image": start("wan"), "max_shift": 7.0}),
    Case(_RES, "ModelTimestepPatcher", inputs={"shift": 7.0}),
    loader(_RES, "ClownModelLoader", inputs={"model_name": "tiny_wan_t2v.safetensors", "weight_dtype": "default", "vae_name": ".none"}),
    Case(_RES, "ReWanPatcherAdvanced", applied=rewan, own=True, behind=REFUSED, settings=ALL, changes=False, note=ALONE),
    Case(
        _RES,
        "ReWanPatcherAdvanced",
        applied=rewan,
        inputs={"sliding_window_self_attn": "standard", "sliding_window_frames": 4},
        own=True,
        behind=REFUSED,
        settings=ALL,
        label="sliding window",
        note=ALONE,
    ),
    Case(
        _RES,
        "ReWanPatcherAdvanced",
        applied=rewan,
        sampled=regional,
        before=FAILS,
        behind=None,
        own=True,
        settings=ONE,
        label="regional",
        note="needs a GPU",
    ),
    Case(_RES, "ReLTXVPatcher", "ltxv", before=FAILS, behind=None, settings=ONE),
    Case(_RES, "TorchCompileModels", "hunyuan", **COMPILED),
    Case(_RES, "ClownpileModelWanVideo", inputs={"skip_self_attn_blocks": "9"}, **COMPILED),
]

# -- caches, sparse attention -----------------------------------------------------------

CACHE: dict[str, Any] = {"sentence": "EasyCache", "before": REFUSED, "behind": REFUSED, "steps": 4, "note": "EasyCache and LazyCache work"}
TEA, MAG, WAVE, RADIAL = "ComfyUI-TeaCache", "ComfyUI-MagCache", "Comfy-WaveSpeed", "ComfyUI-RadialAttn"
SPARSE = {"dense_block": 0, "dense_timestep": 0, "last_dense_timestep": 0, "block_size": 64}
CACHES: list[Case] = [
    Case(TEA, "TeaCache", inputs={"model_type": "wan2.1_i2v_720p_14B", "rel_l1_thresh": 10.0, "cache_device": "cpu"}, **CACHE),
    Case(TEA, "TeaCache", "ltxv", inputs={"model_type": "ltxv", "rel_l1_thresh": 10.0, "cache_device": "cpu"}, **CACHE),
    Case(TEA, "TeaCache", "hunyuan", inputs={"model_type": "hunyuan_video", "rel_l1_thresh": 10.0, "cache_device": "cpu"}, **CACHE),
    Case(TEA, "CompileModel", **COMPILED),
    Case(MAG, "MagCache", inputs={"model_type": "wan2.1_t2v_1.3B", "magcache_thresh": 0.3, "retention_ratio": 0.1}, **CACHE),
    Case(MAG, "MagCache", "hunyuan", inputs={"model_type": "hunyuan_video", "magcache_thresh": 0.3, "retention_ratio": 0.1}, **CACHE),
    Case(MAG, "MagCache", "hunyuan15", inputs={"model_type": "hunyuan_video1.5", "magcache_thresh": 0.3, "retention_ratio": 0.1}, **CACHE),
    Case(MAG, "MagCacheCalibration", "hunyuan15", inputs={"model_type": "hunyuanvideo1.5"}, **{**CACHE, "changes": None}),
    Case(WAVE, "ApplyFBCacheOnModel", "ltxv", inputs={"residual_diff_threshold": 1.0}, **CACHE),
    Case(WAVE, "ApplyFBCacheOnModel", "hunyuan", inputs={"residual_diff_threshold": 1.0}, **CACHE),
    loader(WAVE, "EnhancedLoadDiffusionModel", inputs={**WAN_FILE, "weight_dtype": "default"}),
    Case(WAVE, "EnhancedCompileModel", **COMPILED),
    Case(RADIAL, "PatchRadialAttn", inputs=SPARSE, before=REFUSED, behind=REFUSED, settings=BY_ITSELF, note="its attention needs a GPU"),
    Case(RADIAL, "PatchRadialAttn", before=SAME, changes=False, settings=BY_ITSELF, label="dense steps", note="no sparse step"),
]

CASES = [*GGUF, *MULTI, *RGTHREE, *RES4LYF, *CACHES]
