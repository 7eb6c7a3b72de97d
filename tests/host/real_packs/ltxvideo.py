"""Cases of ComfyUI-LTXVideo."""

from __future__ import annotations

from typing import Any

from host.graphs import Branch, Link, latent, load, sample
from host.real_packs.cases import FAILS, GUIDED, MODELS, REFUSED, SHARED, THREE, Case, loader, sampler
from host.real_packs.kjnodes import ALL, ALONE, BY_ITSELF, NO_FORWARD, ONE, advanced

PACK = "ComfyUI-LTXVideo"


def ltx(node: str, model: str = "ltxv", /, **more: Any) -> Case:
    return Case(PACK, node, model, **more)


def guided(node: str, model: str, label: str = "", **inputs: Any) -> Case:
    """A guider."""

    def sampled(branch: Branch, case: Case, wire: Link, cfg: float) -> Link:
        words = case.words(branch)
        if node == "STGGuider":
            wire = branch.add("LTXVApplySTG", model=wire, block_indices="0, 2")[0]
        guider = branch.add(node, model=wire, positive=words[0], negative=words[1], **case.wires(branch))[0]
        return advanced(branch, case, wire, cfg, guider=guider)

    return sampler(
        PACK,
        node,
        model,
        sampled,
        inputs=inputs,
        label=label,
        settings=(SHARED, GUIDED, THREE),
    )


def modality(video: dict[str, Any], audio: dict[str, Any]) -> Any:
    def parameters(branch: Branch) -> Link:
        first = branch.add("GuiderParameters", modality="AUDIO", **audio)[0]
        return branch.add("GuiderParameters", modality="VIDEO", parameters=first, **video)[0]

    return parameters


ADVANCED = {
    "sigmas": "1.0, 0.6",
    "cfg_values": "4, 3",
    "stg_scale_values": "2, 1",
    "stg_rescale_values": "1, 1",
    "stg_layers_indices": "[1], [0, 2]",
    "skip_steps_sigma_threshold": 2.0,
}


def vae(branch: Branch) -> Link:
    return branch.add("SPTestVAE", channels=128, time_stride=8, stride=32)[0]


def picture(branch: Branch) -> Link:
    return branch.add("SPTestImage", frames=1, height=160, width=224, seed=3)[0]


def parts(branch: Branch, case: Case, model: Link, cfg: float) -> dict[str, Link]:
    """What the pack's own samplers take."""
    words = case.words(branch)
    return {
        "guider": branch.add("CFGGuider", model=model, positive=words[0], negative=words[1], cfg=cfg)[0],
        "sampler": branch.add("KSamplerSelect", sampler_name="euler")[0],
        "sigmas": branch.add("BasicScheduler", model=model, scheduler="simple", steps=2, denoise=1.0)[0],
        "noise": branch.add("RandomNoise", noise_seed=5)[0],
        "vae": vae(branch),
    }


def base(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    more = parts(branch, case, model, cfg)
    size = {"width": 224, "height": 160, "num_frames": 17}
    pictures = {"optional_cond_images": picture(branch), "optional_cond_indices": "0", "crf": 0}
    return branch.add(case.node, model=model, **size, **more, **pictures)[0]


def extended(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    more = parts(branch, case, model, cfg)
    first = latent(branch, "1,128,3,5,7", scale=1.0, seed=4)
    return branch.add(case.node, model=model, latents=first, num_new_frames=16, frame_overlap=16, **more)[0]


def in_context(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    return branch.add(case.node, guiding_latents=latent(branch, "1,128,3,5,7", scale=1.0, seed=4), **parts(branch, case, model, cfg))[0]


def tiled(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    more = parts(branch, case, model, cfg)
    words = case.words(branch)
    more["guider"] = branch.add("STGGuiderAdvanced", model=model, positive=words[0], negative=words[1], **ADVANCED)[0]
    tiles = {"latents": latent(branch, "1,128,3,6,8", scale=1.0, seed=4), "horizontal_tiles": 2, "vertical_tiles": 1}
    return branch.add(case.node, model=model, **tiles, **more)[0]


def looping(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    more = parts(branch, case, model, cfg)
    tiles = {"latents": latent(branch, "1,128,6,5,7", seed=4), "temporal_tile_size": 24, "temporal_overlap": 16}
    guiding = latent(branch, "1,128,6,5,7", scale=1.0, seed=6)
    return branch.add(case.node, model=model, optional_guiding_latents=guiding, adain_factor=0.3, **tiles, **more)[0]


def normalizing(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    more = parts(branch, case, model, cfg)
    more.pop("vae")
    factors = {"video_normalization_factors": "0.9,0.8", "audio_normalization_factors": "0.5,0.25"}
    return branch.add(case.node, latent_image=case.start(branch), **factors, **more)[0]


def flow_edit(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words, other = case.words(branch), MODELS["ltxv"].words(branch)
    names = ("source_pos", "source_neg", "target_pos", "target_neg")
    conditionings = dict(zip(names, (*words, *reversed(other)), strict=True))
    guider = branch.add("LTXFlowEditCFGGuider", model=model, **conditionings)[0]
    edit = branch.add("LTXFlowEditSampler", skip_steps=0, refine_steps=1, seed=2)[0]
    start = latent(branch, MODELS[case.model].start, scale=1.0, seed=8)
    return advanced(branch, case, model, cfg, guider=guider, sampler=edit, latent_image=start)


def rectified(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    """Forward, with what the attention had kept in a bank; then in reverse with that put back.

    The sampler draws from a generator that is made with its node, so each case and each way through its graph has a node of its own.
    """
    spaces = " " * len(f"{case.id}{branch.devices}{branch.requested}")
    bank = branch.add("LTXAttentionBank", save_steps=2, blocks=f"0,{spaces}1")[0]
    there = branch.add("LTXForwardModelSamplingPred", model=model)[0]
    back = branch.add("LTXReverseModelSamplingPred", model=model)[0]
    sigmas = branch.add("BasicScheduler", model=model, scheduler="simple", steps=2, denoise=1.0)[0]
    flipped = branch.add("FlipSigmas", sigmas=sigmas)[0]
    forward = branch.add("LTXRFForwardODESampler", gamma=0.5, start_step=0, end_step=2, gamma_trend="constant", seed=1, attn_bank=bank)[0]
    start = latent(branch, MODELS[case.model].start, scale=1.0, seed=8)
    inverted = advanced(branch, case, there, cfg, sampler=forward, sigmas=flipped, latent_image=start)
    kept = branch.add("LTXPrepareAttnInjections", latent=inverted, attn_bank=bank, query=True, key=True, value=True, inject_steps=1)
    reverse = branch.add("LTXRFReverseODESampler", model=back, latent_image=start, eta=0.8, start_step=0, end_step=2, attn_inj=kept[1])[0]
    return advanced(branch, case, back, cfg, sampler=reverse, sigmas=sigmas, latent_image=kept[0])


def modified_model(branch: Branch, case: Case) -> Link:
    return branch.add("ModifyLTXModel", model=load(branch, case.checkpoint))[0]


def guide(node: str, **inputs: Any) -> Case:
    def sampled(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
        words = case.words(branch)
        made = branch.add(node, positive=words[0], negative=words[1], vae=vae(branch), latent=case.start(branch), **case.wires(branch))
        return sample(branch, model, (made[0], made[1]), made[2], cfg=cfg)

    return sampler(PACK, node, "ltxv", sampled, inputs=inputs)


def with_sound(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    sound = latent(branch, "1,8,5,16", scale=1.0, seed=11)
    made = branch.add(case.node, positive=words[0], negative=words[1], audio_latent=sound)
    return sample(branch, model, (made[0], made[1]), case.start(branch), cfg=cfg)


def masked_by_time(branch: Branch, case: Case, model: Link, cfg: float) -> Link:
    words = case.words(branch)
    inputs = {"av_latent": case.start(branch, scale=1.0), "positive": words[0], "negative": words[1], "model": model}
    audio = branch.add("SPTestAudioVAE")[0]
    made = branch.add(case.node, vae=vae(branch), audio_vae=audio, start_time=0.2, end_time=0.6, **inputs)
    return sample(branch, model, (made[0], made[1]), made[2], cfg=cfg)


def override(branch: Branch, case: Case, model: Link) -> Link:
    layers = branch.add("LTXAttnOverride", layers="1")[0]
    return branch.add(case.node, model=model, attn_override=layers, **case.wires(branch))[0]


def modified(branch: Branch, case: Case, model: Link) -> Link:
    """ModifyLTXModel, then a node that acts inside such a model only."""
    return override(branch, case, branch.add("ModifyLTXModel", model=model)[0])


STATISTICS = {"factors": "0.9, 0.5"}
VIDEO = {"cfg": 3.0, "stg": 1.5, "rescale": 0.7, "modality_scale": 2.0}
AUDIO = {"cfg": 5.0, "stg": 0.5, "rescale": 0.3, "modality_scale": 3.0, "perturb_attn": True}

CASES: list[Case] = [
    guided("STGGuider", "ltxv", cfg=3.0, stg=1.5, rescale=0.7),
    guided("STGGuider", "ltxav", cfg=3.0, stg=1.5, rescale=0.7),
    guided("STGGuiderAdvanced", "ltxv", **ADVANCED),
    guided("MultimodalGuider", "ltxav", parameters=modality(VIDEO, AUDIO), skip_blocks="1"),
    guided("MultimodalGuider", "ltx23", parameters=modality(VIDEO, {**AUDIO, "stg": 0.0}), skip_blocks="0,2"),
    guided("APGGuider", "ltxv", cfg_scale=3.0, norm_threshold=2.0),
    ltx("LTXVApplySTG", inputs={"block_indices": "0, 2"}, changes=False, note="names the blocks for the guiders"),
    ltx("LTXPerturbedAttention", applied=override, inputs={"scale": 2.0}),
    ltx("LTXPerturbedAttention", applied=modified, inputs={"scale": 2.0}, behind=None, own=True, label="ModifyLTXModel", note=ALONE),
    ltx(
        "LTXFetaEnhance",
        applied=modified,
        before=FAILS,
        behind=None,
        own=True,
        settings=ONE,
        note="this ComfyUI does not tell the video's shape",
    ),
    ltx("ModifyLTXModel", own=True, behind=REFUSED, settings=ALL, changes=False, code="LTXVModelModified", note=ALONE),
    ltx("DynamicConditioning", inputs={"power": 2.0, "only_first_frame": False}, mask="ramp"),
    ltx("LTXVPerStepAdainPatcher", inputs={**STATISTICS, "reference": lambda b: latent(b, "1,128,3,5,7", scale=1.0, seed=9)}),
    ltx("LTXVPerStepStatNormPatcher", inputs=STATISTICS),
    ltx("LTXVAudioOnlyModel", "ltxav", settings=ALL),
    ltx("LTXForwardModelSamplingPred"),
    ltx("LTXReverseModelSamplingPred"),
    ltx("LTXICLoRALoaderModelOnly", "ltxav", inputs={"lora_name": "tiny_ltx_lora.safetensors"}, behind=REFUSED),
    ltx("LTXQ8Patch", before=FAILS, behind=None, settings=ONE, note="needs q8_kernels and a GPU"),
    sampler(PACK, "LTXVBaseSampler", "ltxv", base),
    sampler(PACK, "LTXVExtendSampler", "ltxv", extended),
    sampler(PACK, "LTXVInContextSampler", "ltxv", in_context),
    sampler(PACK, "LTXVTiledSampler", "ltxv", tiled),
    sampler(PACK, "LTXVLoopingSampler", "ltxv", looping),
    sampler(PACK, "LTXVNormalizingSampler", "ltxav", normalizing, settings=ALL, report=NO_FORWARD),
    sampler(PACK, "LTXFlowEditSampler", "ltxv", flow_edit),
    sampler(PACK, "LTXRFReverseODESampler", "ltxv", rectified, label="attention bank", settings=BY_ITSELF),
    sampler(
        PACK,
        "LTXRFReverseODESampler",
        "ltxv",
        rectified,
        loaded=modified_model,
        own=True,
        label="bank of ModifyLTXModel",
        settings=BY_ITSELF,
    ),
    sampler(PACK, "LTXVSetAudioVideoMaskByTime", "ltxav", masked_by_time),
    guide("LTXVAddLatentGuide", guiding_latent=lambda b: latent(b, "1,128,1,5,7", scale=1.0, seed=5), latent_idx=1, strength=0.6),
    guide("LTXVAddGuideAdvancedAttention", image=picture, frame_idx=8, strength=0.7, crf=0, attention_strength=0.4),
    guide("LTXAddVideoICLoRAGuide", image=picture, frame_idx=0, strength=0.7),
    guide("LTXAddVideoICLoRAGuideAdvanced", image=picture, frame_idx=0, strength=0.7, attention_strength=0.4),
    sampler(PACK, "LTXVSetAudioRefTokens", "ltxav", with_sound),
    loader(PACK, "LowVRAMCheckpointLoader", "wan", inputs={"ckpt_name": "tiny_wan_whole.safetensors", "dependencies": vae}),
    guide("LTXVAddGuideAdvanced", image=picture, frame_idx=8, strength=0.7, crf=0),
]
