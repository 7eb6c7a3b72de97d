"""Cases of ComfyUI-KJNodes."""

from __future__ import annotations

from typing import Any

from host.graphs import Branch, Link, latent, sample
from host.real_packs.cases import FAILS, GUIDED, MODELS, REFUSED, SAME, SHARED, THREE, UNGUIDED, Case, loader, sampler

PACK = "ComfyUI-KJNodes"
ALL = (GUIDED, SHARED, THREE)
ONE = (GUIDED,)
NO_FORWARD = "No forward was computed."
#: nodes that want one row of the batch
BY_ITSELF = (UNGUIDED, THREE)
ALONE = "one device computes: the class has a forward of its own"
IN_WORKERS = "the workers compile the blocks"


def kj(node: str, model: str = "wan", /, **more: Any) -> Case:
    return Case(PACK, node, model, **more)


def start(model: str) -> Any:
    """An input that is the latent which is sampled."""
    return lambda branch: latent(branch, MODELS[model].start)


def positive(model: str) -> Any:
    return lambda branch: MODELS[model].words(branch)[0]


def other_words(branch: Branch) -> Link:
    """A third text, as wide as Wan's."""
    return branch.add("SPTestConditioning", seed=7, tokens=9, dim=4096)[0]


def mask(branch: Branch) -> Link:
    return branch.add("SPTestMask", frames=1, height=10, width=14, right=0.4)[0]


def video_latent(model: str) -> Any:
    """Only the video of a model that also makes sound."""
    return lambda branch: latent(branch, MODELS[model].start.split(";")[0])


# -- nodes that are more than MODEL to MODEL --------------------------------------------


def differential(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    node = branch.add(case.node, model=model, samples=case.start(branch, scale=1.0), mask=mask(branch))
    return sample(branch, node[0], case.words(branch), node[1], cfg=cfg, denoise=0.7)


def through_time(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    node = branch.add(case.node, model=model, steps=3, mask=mask(branch))
    return sample(branch, node[0], case.words(branch), case.start(branch, scale=1.0), cfg=cfg, steps=3)


def debug(branch: Branch, case: Case, model: Link) -> Link:
    return branch.add(case.node, model_pass=model, unload_all_models=case.label == "unload")[2]


def switched(branch: Branch, case: Case, model: Link) -> Link:
    return branch.add(case.node, switch=True, on_false=model, on_true=model)[0]


def advanced(branch: Branch, case: Case, model: Link, cfg: float, **parts: Link) -> Link:
    """SamplerCustomAdvanced, with the parts that a case brings."""
    words = case.words(branch)
    made = {
        "guider": lambda: branch.add("CFGGuider", model=model, positive=words[0], negative=words[1], cfg=cfg)[0],
        "sigmas": lambda: branch.add("BasicScheduler", model=model, scheduler="simple", steps=case.steps, denoise=1.0)[0],
        "sampler": lambda: branch.add("KSamplerSelect", sampler_name="euler")[0],
        "noise": lambda: branch.add("RandomNoise", noise_seed=5)[0],
        "latent_image": lambda: case.start(branch),
    }
    return branch.add("SamplerCustomAdvanced", **{name: parts[name] if name in parts else make() for name, make in made.items()})[0]


def scheduled(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    guider = branch.add(case.node, model=model, positive=words[0], negative=words[1], cfg=cfg, start_percent=0.0, end_percent=0.05)[0]
    return advanced(branch, case, model, cfg, guider=guider)


def refined(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    mode = {"input_mode": "from_string", "input_mode.stochastic_plan": "0-1:2"}
    return advanced(branch, case, model, cfg, sampler=branch.add(case.node, **mode, seed=3)[0])


def generated(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    sigmas = branch.add("BasicScheduler", model=model, scheduler="simple", steps=2, denoise=1.0)[0]
    size = {"width": 112, "height": 80, "batch_size": 3, "latent_channels": "16", "shape": "BCTHW", "seed": 7}
    noise = branch.add(case.node, model=model, sigmas=sigmas, **size)[0]
    words = case.words(branch)
    settings = {"add_noise": "disable", "noise_seed": 5, "steps": 2, "cfg": cfg, "sampler_name": "euler", "scheduler": "simple"}
    settings |= {"start_at_step": 0, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    return branch.add("KSamplerAdvanced", model=model, positive=words[0], negative=words[1], latent_image=noise, **settings)[0]


def with_blocks(select: str, block: str) -> Any:
    return lambda branch: branch.add(select, **{block: 0.6})[0]


def leapfusion(branch: Branch, case: Case, model: Link) -> Link:
    return branch.add(case.node, model=model, latent=latent(branch, "1,16,1,10,14", scale=1.0, seed=3))[0]


def saved(branch: Branch, case: Case, model: Link) -> Link:
    branch.add(case.node, model=model, filename_prefix="diffusion_models/kept")
    return model


def keyframes(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    pictures = [branch.add("SPTestImage", frames=1, height=80, width=112, seed=seed)[0] for seed in (3, 4)]
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    frames = {"start_frame": pictures[0], "end_frame": pictures[1], "num_frames": 9}
    made = branch.add(case.node, model=model, positive=words[0], negative=words[1], vae=vae, **frames)
    return sample(branch, made[0], (made[1], made[2]), made[3], cfg=cfg)


def extra_weights(branch: Branch) -> Link:
    return branch.add("DiffusionModelSelector", model_name="tiny_wan_t2v_low.safetensors")[0]


def load_kj(label: str, **inputs: Any) -> Case:
    tolerance, note = inputs.pop("tolerance", 2e-5), inputs.pop("note", "")
    changes, before = inputs.pop("changes", True), inputs.pop("before", SAME)
    files = {"model_name": "tiny_wan_t2v.safetensors", "sage_attention": "disabled", **inputs}
    return loader(PACK, "DiffusionModelLoaderKJ", label=label, inputs=files, before=before, changes=changes, tolerance=tolerance, note=note)


#: the attention's inputs are rounded to fp16, as its kernel needs it: now and then to the other neighbour
HALF: dict[str, Any] = {"changes": None, "tolerance": 1e-4, "note": "rounds to fp16: 1e-4"}
LORA, LTX_LORA = {"lora_name": "tiny_wan_lora.safetensors"}, {"lora_name": "tiny_ltx_lora.safetensors"}

CASES: list[Case] = [
    kj("PathchSageAttentionKJ", inputs={"sage_attention": "auto"}, settings=ALL, **HALF),
    kj("PathchSageAttentionKJ", "ltxav", inputs={"sage_attention": "sageattn_qk_int8_pv_fp16_cuda"}, **HALF),
    kj("PatchFlashAttentionKJ", **HALF),
    kj("WanVideoMemoryEfficientSageAttentionPatch", settings=ALL, changes=False),
    kj("LTX2MemoryEfficientSageAttentionPatch", "ltxav", settings=ALL, changes=False),
    kj("LTX2MemoryEfficientSageAttentionPatch", "ltx23", changes=False),
    kj("MiniMaxH3MemoryEfficientSageAttentionPatch", "minimax", changes=False),
    kj("MiniMaxLowVRAMAttention", "minimax", inputs={"head_chunks": 3}, changes=False),
    kj("MiniMaxChunkFeedForward", "minimax", inputs={"chunks": 3, "seq_threshold": 256}, changes=False),
    kj("WanVideoNAG", inputs={"conditioning": other_words}, settings=ALL),
    kj("WanVideoNAG", inputs={"conditioning": other_words, "input_type": "batch", "inplace": True}, label="batch"),
    kj("LTX2_NAG", "ltxav", inputs={"nag_cond_video": positive("ltxav"), "nag_cond_audio": positive("ltxav")}, settings=ALL),
    kj("LTX2_NAG", "ltx23", inputs={"nag_cond_video": positive("ltx23"), "nag_cond_audio": positive("ltx23"), "inplace": False}),
    kj("WanVideoEnhanceAVideoKJ", inputs={"latent": start("wan"), "weight": 8.0}, settings=ALL),
    kj("LTXVEnhanceAVideoKJ", "ltxv", inputs={"latent": start("ltxv"), "weight": 80.0}, settings=ALL),
    kj("LTXVEnhanceAVideoKJ", "ltxav", inputs={"latent": video_latent("ltxav"), "weight": 80.0}),
    kj("LTX2AttentionTunerPatch", "ltxav", inputs={"blocks": "0,2", "video_scale": 0.7, "audio_to_video_scale": 1.3}, settings=ALL),
    kj("LTX2AttentionTunerPatch", "ltx23", inputs={"video_scale": 0.7, "audio_scale": 1.2, "triton_kernels": False}, label="eager"),
    kj("WanChunkFeedForward", inputs={"chunks": 3, "dim_threshold": 1024}, changes=False),
    kj("LTXVChunkFeedForward", "ltxav", inputs={"chunks": 3, "dim_threshold": 1024}, changes=False),
    kj("ApplyRifleXRoPE_WanVideo", behind=REFUSED, inputs={"latent": start("wan")}, settings=ALL),
    kj("ApplyRifleXRoPE_HunuyanVideo", "hunyuan", behind=REFUSED, inputs={"latent": start("hunyuan")}),
    kj("NABLA_AttentionKJ", inputs={"latent": start("wan"), "torch_compile": False}, changes=False),
    kj("SkipLayerGuidanceWanVideo", inputs={"blocks": "1"}, before=FAILS, behind=None, settings=ONE),
    kj("CheckpointPerturbWeights", inputs={"rest_of_the_blocks": 0.5}, before=FAILS, behind=None, settings=ONE),
    kj("LeapfusionHunyuanI2VPatcher", "hunyuan", applied=leapfusion, settings=BY_ITSELF),
    kj("WanVideoTeaCacheKJ", changes=False, settings=ONE, note="does nothing any more"),
    kj("PatchModelPatcherOrder", changes=False, settings=ONE, note="does nothing any more"),
    kj("TorchCompileModelAdvanced", plain_stock=True, changes=False, note=IN_WORKERS),
    kj(
        "TorchCompileModelAdvanced",
        inputs={"compile_transformer_blocks_only": False, "dynamic": "auto", "mode": "reduce-overhead"},
        label="whole",
        settings=(SHARED,),
        plain_stock=True,
        changes=False,
        note=IN_WORKERS,
    ),
    kj("TorchCompileModelAdvanced", "ltxav", settings=(SHARED,), plain_stock=True, changes=False, note=IN_WORKERS),
    kj("TorchCompileModelAdvanced", "hunyuan", settings=(SHARED,), plain_stock=True, changes=False, note=IN_WORKERS),
    kj("TorchCompileModelWanVideoV2", plain_stock=True, changes=False, note=IN_WORKERS),
    kj("CFGZeroStarAndInit", settings=ONE),
    sampler(PACK, "DifferentialDiffusionAdvanced", "wan", differential),
    sampler(PACK, "LatentInpaintTTM", "wan", through_time, steps=3, settings=BY_ITSELF),
    kj("ModelPreviewOverrideKJ", changes=False, settings=ONE),
    kj("LTX2SamplingPreviewOverride", "ltxav", changes=False, settings=ONE),
    kj("LTX2AudioLatentNormalizingSampling", "ltxav", inputs={"audio_normalization_factors": "0.5,0.25"}, report=NO_FORWARD),
    kj("ContextWindowsVisualizerKJ", inputs={"frame_units": "latent", "context_length": 2, "context_overlap": 1}),
    kj("ModelMemoryUsageFactorOverride", changes=False, settings=ONE),
    kj("ModelPatchTorchSettings", inputs={"enable_fp16_accumulation": True}, changes=False, settings=ONE),
    kj("ModelMemoryUseReportPatch", before=FAILS, behind=None, settings=ONE, note="needs a GPU"),
    kj("VRAM_Debug", applied=debug, changes=False, settings=ONE),
    kj("VRAM_Debug", applied=debug, changes=False, settings=ONE, label="unload"),
    kj("ModelPassThrough", changes=False, settings=ONE),
    kj("LazySwitchKJ", applied=switched, changes=False, settings=ONE),
    sampler(PACK, "ScheduledCFGGuidance", "wan", scheduled),
    sampler(PACK, "SamplerSelfRefineVideo", "wan", refined),
    sampler(PACK, "GenerateNoise", "wan", generated, settings=ONE),
    kj("DiTBlockLoraLoader", behind=REFUSED, inputs={**LORA, "blocks": with_blocks("Wan21BlockLoraSelect", "blocks.1.")}),
    kj("LTX2LoraLoaderAdvanced", "ltxav", behind=REFUSED, inputs={**LTX_LORA, "blocks": with_blocks("LTX2BlockLoraSelect", "blocks.1.")}),
    sampler(
        PACK, "HunyuanVideoEncodeKeyframesToCond", "hunyuan_i2v", keyframes, behind=FAILS, settings=ONE, note="wants a model of 32 channels"
    ),
    kj("ModelSaveKJ", behind=REFUSED, applied=saved, changes=False, settings=ONE),
    load_kj("default", changes=False),
    load_kj("fp8", weight_dtype="fp8_e4m3fn"),
    load_kj("bf16 compute", compute_dtype="bf16", before=FAILS),
    load_kj("Sage", sage_attention="auto", **HALF),
    load_kj("extra weights", extra_state_dict=extra_weights),
    loader(PACK, "CheckpointLoaderKJ", inputs={"ckpt_name": "tiny_wan_whole.safetensors", "sage_attention": "disabled"}),
    loader(PACK, "GGUFLoaderKJ", inputs={"model_name": "tiny_wan_q8.gguf"}, before=FAILS, note="asks for a fork of ComfyUI-GGUF"),
]
