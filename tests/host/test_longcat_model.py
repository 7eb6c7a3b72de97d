"""LongCat-Video in one process, through the host's own loading: parity with the reference, its traps, the cache, patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.longcat_ranks import CASES, forward, inputs, load, reference
from host.longcat_files import rekeyed, weights
from safetensors.torch import save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("comfyui_here")

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def patcher(comfyui_here: str) -> Any:
    return load(comfyui_here)


@pytest.fixture
def model(patcher: Any) -> Iterator[Any]:
    yield patcher.model.diffusion_model
    patcher.model.diffusion_model.clear_cache()


def error(out: Tensor, case: str) -> float:
    return (out - reference()[f"out.{case}"]).abs().max().item()


# -- parity -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(model: Any, case: str) -> None:
    difference = error(forward(model, case), case)
    print(f"\n{case}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_rekeyed_checkpoint_is_the_same_model(comfyui_here: str, tmp_path: Path, case: str) -> None:
    save_file(rekeyed(), tmp_path / "rekeyed.safetensors")
    loaded = load(comfyui_here, tmp_path / "rekeyed.safetensors").model.diffusion_model
    assert not loaded.blocks[0].attn.fused
    assert error(forward(loaded, case), case) <= TOLERANCE


def test_host_predicts_the_reference_velocity(patcher: Any) -> None:
    """Trap 1, the sign: from the host's denoised prediction back to data minus noise."""
    given, sigma = inputs("t2v"), 0.7
    denoised = patcher.model.apply_model(given["x"], torch.full((2,), sigma), c_crossattn=given["context"])
    torch.testing.assert_close(denoised, given["x"] + sigma * reference()["out.t2v"], atol=1e-5, rtol=0)


def test_zero_mask_prefix_makes_conditioning_frames(patcher: Any) -> None:
    """The host's way in: a denoise mask, no count of frames, one sigma."""
    given = inputs("i2v")
    mask = torch.ones_like(given["x"])
    mask[:, :, 0] = 0
    denoised = patcher.model.apply_model(given["x"], torch.full((2,), 0.7), c_crossattn=given["context"], denoise_mask=mask)
    velocity = (denoised - given["x"]) / 0.7
    assert error(velocity, "i2v") <= 2e-5  # divided by 0.7
    mask[..., 0, 0] = 1  # a frame that is changed somewhere is none
    touched = patcher.model.apply_model(given["x"], torch.full((2,), 0.7), c_crossattn=given["context"], denoise_mask=mask)
    assert (touched - denoised).abs().max() > 1e-2


def test_padding_is_zero_behind_the_caption_projection(model: Any) -> None:
    """Trap 2: its biases must not make keys of the padding."""
    context = inputs("t2v")["context"]
    padding = reference()["in.text_mask"] == 0
    assert padding.any()
    embedded = model.embed_text(context)
    assert embedded[padding].count_nonzero() == 0
    assert model.y_embedder.y_proj(context)[padding].abs().min() > 0
    assert model.embed_text(torch.ones(1, 600, 64)).shape[1] == 512


def test_timesteps_are_rounded_to_bf16(patcher: Any) -> None:
    """Trap 4."""
    base = patcher.model
    timestep = torch.tensor([998.27, 441.3])
    assert base.process_timestep(timestep).tolist() == [1000.0, 442.0]
    mask = torch.ones(2, 16, 3, 4, 4)
    mask[:, :, 0] = 0
    assert base.process_timestep(timestep, x=None, denoise_mask=mask).tolist() == [[0.0, 1000.0, 1000.0], [0.0, 442.0, 442.0]]


def test_modulation_is_fp32_in_a_bf16_model(comfyui_here: str, tmp_path: Path) -> None:
    """Trap 5; and bf16 stays near the reference."""
    save_file({key: value.bfloat16() for key, value in weights().items()}, tmp_path / "bf16.safetensors")
    # on a CPU the host would choose fp32
    patcher = load(comfyui_here, tmp_path / "bf16.safetensors", dtype=torch.bfloat16)
    loaded = patcher.model.diffusion_model
    assert loaded.blocks[0].adaLN_modulation[1].weight.dtype == torch.bfloat16
    dtypes: dict[str, set] = {}
    watched = {
        "embedding": loaded.t_embedder.mlp,
        "modulation": loaded.blocks[1].adaLN_modulation,
        "norm": loaded.blocks[1].pre_crs_attn_norm,
        "attention": loaded.blocks[1].attn,
        "end": loaded.final_layer,
    }
    hooks = [
        module.register_forward_hook(lambda module, args, out, name=name: dtypes.setdefault(name, set()).add(out.dtype))
        for name, module in watched.items()
    ]
    compute = patcher.model.get_dtype_inference()
    given = {key: value.to(compute) if key in ("x", "context") else value for key, value in inputs("i2v").items()}
    out = -loaded(**given)
    for hook in hooks:
        hook.remove()
    fp32 = {torch.float32}
    assert dtypes == {"embedding": fp32, "modulation": fp32, "norm": fp32, "attention": {compute}, "end": fp32}
    assert out.dtype == torch.float32
    assert (out - reference()["out.i2v"]).norm() / reference()["out.i2v"].norm() < 0.03


def test_conditioning_frames_get_no_text(model: Any) -> None:
    """Trap 7: a literal zero, without the projection's bias; and they see neither noise nor the noisy frames' timestep."""
    given = inputs("i2v")
    before = model(**given)
    bias = model.blocks[0].cross_attn.proj.bias
    bias += 5
    try:
        changed = model(**{**given, "context": given["context"].flip(0)})
    finally:
        bias -= 5
    assert torch.equal(changed[:, :, 0], before[:, :, 0])
    assert (changed[:, :, 1:] - before[:, :, 1:]).abs().max() > 0.1
    noisier = model(**{**given, "x": torch.cat([given["x"][:, :, :1], 2 * given["x"][:, :, 1:]], 2)})
    assert torch.equal(noisier[:, :, 0], before[:, :, 0])


@pytest.mark.parametrize(
    ("available", "wanted", "used"), [(1, 13, 1), (13, 13, 13), (93, 13, 13), (12, 13, 9), (4, 13, 1), (50, 16, 13), (3, 0, 1)]
)
def test_conditioning_is_whole_latent_frames(available: int, wanted: int, used: int) -> None:
    """Trap 8: 4 k + 1 frames."""
    from sp_core.models.longcat.patches import conditioning_frames

    assert conditioning_frames(available, wanted) == used


def test_odd_sizes_are_padded_and_cut(model: Any) -> None:
    given = {**inputs("i2v"), "x": inputs("i2v")["x"][..., :11, :13]}
    assert model(**given).shape == given["x"].shape


# -- the cache ------------------------------------------------------------------------------


def test_cache_is_found_by_content(model: Any) -> None:
    options = {"longcat_kv_cache": "cpu"}
    given = inputs("continuation_cached")
    whole = model(**given)
    counts: list[int] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda module, args: counts.append(args[0].size(1)))
    filling = model(**given, transformer_options=options)
    cached = model(**given, transformer_options=options)
    one = model(
        **{**given, "x": given["x"][1:], "context": given["context"][1:], "timestep": given["timestep"][1:]}, transformer_options=options
    )
    other = {**given, "x": given["x"].clone()}
    other["x"][1, :, 0] += 1  # another first frame in the second item: a cache entry of its own
    model(**other, transformer_options=options)
    again = model(**other, transformer_options=options)
    hook.remove()
    assert counts == [4 * 48, 2 * 48, 2 * 48, 4 * 48, 2 * 48]
    assert len(model.kv_cache.entries) == 2
    assert torch.equal(filling, whole)
    assert cached[:, :, :2].count_nonzero() == 0
    torch.testing.assert_close(cached[:, :, 2:], whole[:, :, 2:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(one, cached[1:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(again[:, :, 2:], model(**other)[:, :, 2:], atol=TOLERANCE, rtol=0)


def test_failed_forward_leaves_no_slot(model: Any) -> None:
    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("stop")

    hook = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model(**inputs("continuation_cached"), transformer_options={"longcat_kv_cache": "gpu"})
    hook.remove()
    assert model.kv_cache.entries == []


def test_blocks_left_out_while_filling_are_told(model: Any) -> None:
    from sp_core.errors import SPError

    skip = {"patches_replace": {"dit": {("double_block", 1): lambda args, extra: {"img": args["img"]}}}}
    model(**inputs("continuation_cached"), transformer_options={"longcat_kv_cache": "gpu", **skip})
    with pytest.raises(SPError, match="block 1 was left out when the conditioning frames were cached"):
        model(**inputs("continuation_cached"), transformer_options={"longcat_kv_cache": "gpu"})


def test_cleanup_empties_the_cache(patcher: Any, model: Any) -> None:
    from sp_core.models.longcat.patches import with_kv_cache

    cached = with_kv_cache(patcher, "gpu")
    model(**inputs("continuation_cached"), transformer_options=cached.model_options["transformer_options"])
    assert len(model.kv_cache.entries) == 1
    cached.cleanup()
    assert model.kv_cache.entries == []
    assert "longcat_kv_cache" not in patcher.model_options["transformer_options"]


@pytest.mark.parametrize("keyframes", [False, True], ids=["one strength", "another strength from the middle on"])
def test_a_lora_of_one_conditioning_has_keys_of_its_own(patcher: Any, model: Any, keyframes: bool) -> None:
    """The host runs such a conditioning with other weights, and so with other keys and values of the same frames."""
    import comfy.hooks
    import comfy.samplers

    from sp_core.models.longcat.patches import with_kv_cache

    ups = {f"diffusion_model.blocks.{i}.attn.qkv.lora_B.weight": torch.randn(384, 4) for i in (0, 1)}
    downs = {f"diffusion_model.blocks.{i}.attn.qkv.lora_A.weight": torch.randn(4, 128) / 10 for i in (0, 1)}
    hooks = comfy.hooks.create_hook_lora({**ups, **downs}, 1.0, 0.0)
    if keyframes:
        strengths = comfy.hooks.HookKeyframeGroup()
        for strength, start in ((1.0, 0.0), (0.2, 0.4)):
            strengths.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
        hooks.set_keyframes_on_hooks(strengths)
    given = inputs("continuation")
    text = given["context"][:1]
    clean = given["x"][:1].clone()
    mask = torch.ones_like(clean)
    mask[:, :, :2] = 0

    def sampled(with_model: Any, **positive: Any) -> Tensor:
        guider = comfy.samplers.CFGGuider(with_model)
        guider.set_conds([[text, positive]], [[text * 0.5, {}]])
        guider.set_cfg(3.0)
        sampler = comfy.samplers.sampler_object("euler")
        sigmas = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
        return guider.sample(torch.ones_like(clean), clean, sampler, sigmas, denoise_mask=mask, disable_pbar=True)

    plain, cached = sampled(patcher, hooks=hooks), sampled(with_kv_cache(patcher, "gpu"), hooks=hooks)
    assert (sampled(patcher) - plain).norm() > 0.01 * plain.norm()
    assert (cached - plain).norm() <= 2e-5 * plain.norm()


# -- refining ---------------------------------------------------------------------------------


class Pixels:
    """In the place of a VAE: the first channel of every fourth frame, as a latent."""

    def encode(self, pixels: Tensor) -> Tensor:
        frames = pixels[::4, ::8, ::8, 0]
        return frames[None, None].expand(1, 16, -1, -1, -1).clone()


def counting(frames: int, size: int = 16) -> Tensor:
    """Frame i is i all over."""
    return torch.arange(frames).float()[:, None, None, None].expand(frames, size, size, 3)


@pytest.mark.parametrize(
    ("start", "doubled", "clean"),
    [
        # a source of forty frames, of which LongCat Latent takes the last 13: these are the small video's frames 0..12
        (counting(40) - 27, True, 7),
        (counting(40) - 27, False, 4),
        (counting(13), True, 7),
        (counting(1), True, 1),
        (counting(2) - 1, True, 1),
    ],
    ids=["of a whole source", "at the small video's rate", "13 frames", "a picture", "less than a latent frame"],
)
def test_clean_frames_lie_where_the_small_video_has_them(start: Tensor, doubled: bool, clean: int) -> None:
    """Small frames of number i, and the large ones that lie over them, differ by nothing: the start keeps its place in time."""
    from sp_core.models.longcat.patches import refine_latent

    small = counting(93)
    alone = refine_latent(Pixels(), small, 32, 32, doubled, None)["samples"]
    made = refine_latent(Pixels(), small, 32, 32, doubled, start)
    torch.testing.assert_close(made["samples"], alone)
    assert (made["noise_mask"][0, 0, :, 0, 0] == 0).tolist() == [index < clean for index in range(alone.size(2))]


def test_a_start_of_other_frames_is_what_the_large_video_begins_with() -> None:
    from sp_core.models.longcat.patches import refine_latent

    made = refine_latent(Pixels(), counting(93), 32, 32, True, counting(9, 32) + 100, 5)
    # five of nine frames: the last ones, as LongCat Latent takes them. Nine large frames lie within four small ones
    assert made["samples"][0, 0, :3, 0, 0].tolist() == pytest.approx([104, 104 + 4 * 92 / 185, 104 + 8 * 92 / 185])
    assert made["samples"][0, 0, 3, 0, 0].item() == pytest.approx(12 * 92 / 185)


# -- the host's patches -----------------------------------------------------------------------


def test_attention_override_sees_every_attention(model: Any) -> None:
    seen = []

    def override(function: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.size(1), k.size(1)))
        return function(q, k, *args, **kwargs)

    out = -model(**inputs("i2v"), transformer_options={"optimized_attention_override": override})
    assert seen == [(48, 48), (144, 192), (144, 12)] * 2
    assert error(out, "i2v") <= TOLERANCE


def test_block_patches_and_wrappers_run(model: Any) -> None:
    import comfy.patcher_extension

    seen = []

    def replace(args: dict, extra: dict) -> dict:
        seen.append("replace")
        return extra["original_block"](args)

    def patch(args: dict) -> dict:
        seen.append(f"behind {args['block_index']}")
        return args

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append("wrapper")
        return executor(*args, **kwargs)

    options: dict[str, Any] = {
        "patches_replace": {"dit": {("double_block", 1): replace}},
        "patches": {"double_block": [patch]},
        "wrappers": {comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL: {None: [wrapper]}},
    }
    assert error(-model(**inputs("i2v"), transformer_options=options), "i2v") <= TOLERANCE
    assert seen == ["wrapper", "behind 0", "replace", "behind 1"]
