"""LongCat-Video in one process, through the host's own loading: parity with the reference, its traps, detection, LoRA, fp8."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.longcat_ranks import CASES, enter_host, forward, inputs, load, reference
from safetensors.torch import save_file
from torch import Tensor

from sp_core.models.longcat.keys import fused_parts, rekeyed_name

TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def host(comfyui: Path) -> Iterator[str]:
    before = list(sys.path)
    enter_host(str(comfyui))
    with torch.inference_mode():
        yield str(comfyui)
    sys.path[:] = before


@pytest.fixture(scope="module")
def patcher(host: str) -> Any:
    return load(host)


@pytest.fixture
def model(patcher: Any) -> Iterator[Any]:
    yield patcher.model.diffusion_model
    patcher.model.diffusion_model.clear_cache()


def weights() -> dict[str, Tensor]:
    return {key[len("model.") :]: value for key, value in reference().items() if key.startswith("model.")}


def rekeyed() -> dict[str, Tensor]:
    out = {}
    for key, value in weights().items():
        module, _, kind = key.rpartition(".")
        for name, part in zip(parts := fused_parts(module) or [module], value.chunk(len(parts)), strict=True):
            out[f"{rekeyed_name(name)}.{kind}"] = part.contiguous()
    return out


def error(out: Tensor, case: str) -> float:
    return (out - reference()[f"out.{case}"]).abs().max().item()


# -- parity -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(model: Any, case: str) -> None:
    difference = error(forward(model, case), case)
    print(f"\n{case}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_rekeyed_checkpoint_is_the_same_model(host: str, tmp_path: Path, case: str) -> None:
    save_file(rekeyed(), tmp_path / "rekeyed.safetensors")
    loaded = load(host, tmp_path / "rekeyed.safetensors").model.diffusion_model
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


def test_modulation_is_fp32_in_a_bf16_model(host: str, tmp_path: Path) -> None:
    """Trap 5; and bf16 stays near the reference."""
    save_file({key: value.bfloat16() for key, value in weights().items()}, tmp_path / "bf16.safetensors")
    # on a CPU the host would choose fp32
    patcher = load(host, tmp_path / "bf16.safetensors", dtype=torch.bfloat16)
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


# -- loading ----------------------------------------------------------------------------------


def test_model_is_what_the_host_needs(patcher: Any) -> None:
    import comfy.latent_formats
    import comfy.model_base

    base = patcher.model
    assert isinstance(base, comfy.model_base.WAN22)
    assert isinstance(base.latent_format, comfy.latent_formats.Wan21)
    assert base.model_type == comfy.model_base.ModelType.FLOW
    assert base.model_sampling.shift == 12.0
    assert patcher.cached_patcher_init is not None


def fp8_scaled(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As widely used fp8 files are: block projections in fp8 with one scale each; and what they stand for."""
    stored, meant = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, {}
    for key, value in state_dict.items():
        stored[key] = meant[key] = value
        if key.startswith("blocks.") and key.endswith(".weight") and "norm" not in key and "modulation" not in key.lower():
            scale = value.abs().max() / 448
            stored[key] = (value / scale).to(torch.float8_e4m3fn)
            stored[key.replace(".weight", ".scale_weight")] = scale
            meant[key] = stored[key].float() * scale
    return stored, meant


@pytest.mark.parametrize("layout", ["official", "rekeyed"])
def test_fp8_scaled(host: str, tmp_path: Path, layout: str) -> None:
    stored, meant = fp8_scaled(weights() if layout == "official" else rekeyed())
    outputs = []
    for name, state_dict in (("fp8", stored), ("meant", meant)):
        save_file(state_dict, tmp_path / f"{name}.safetensors")
        patcher = load(host, tmp_path / f"{name}.safetensors")
        dtype = patcher.model.get_dtype_inference()
        given = {key: value.to(dtype) if key in ("x", "context") else value for key, value in inputs("i2v").items()}
        outputs.append(-patcher.model.diffusion_model(**given))
        if name == "fp8":
            assert patcher.model.model_config.quant_config is not None
            assert dtype == torch.float32 or dtype == torch.bfloat16
            weight = patcher.model.diffusion_model.blocks[0].attn.proj.weight
            assert type(weight).__name__ == "QuantizedTensor" or weight.dtype == torch.float8_e4m3fn
            tolerance = 1e-4 if dtype == torch.float32 else 0.03
    assert (outputs[0] - outputs[1]).norm() / outputs[1].norm() < tolerance


def test_registering_twice_changes_nothing(host: str) -> None:
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_detection
    import comfy.supported_models

    from sp_core.models.registration import register_models

    def state() -> tuple:
        return (
            comfy.model_detection.detect_unet_config,
            comfy.lora_convert.convert_lora,
            comfy.lora.model_lora_keys_unet,
            list(comfy.supported_models.models),
        )

    assert register_models()
    before = state()
    assert register_models()
    assert state() == before


def test_host_that_changed_still_starts(host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sp_core.models.registration import register_models

    monkeypatch.setitem(sys.modules, "comfy.lora_convert", None)
    assert not register_models()
    assert "LongCat-Video cannot be loaded with this ComfyUI" in caplog.text


def test_host_that_knows_it_wins(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host's own detection says is never overruled; it is asked with the host's own arguments."""
    import comfy.model_detection

    from sp_core.models import registration

    registered = comfy.model_detection.detect_unet_config
    monkeypatch.setattr(
        comfy.model_detection, "detect_unet_config", lambda state_dict, key_prefix, metadata=None: {"image_model": "theirs"}
    )
    registration.register_models()
    assert comfy.model_detection.detect_unet_config is not registered
    assert comfy.model_detection.detect_unet_config(weights(), "", metadata={}) == {"image_model": "theirs"}


def test_other_models_are_detected_as_before(host: str, base: Path) -> None:
    """Every tiny checkpoint that there is: the same configuration with and without the registration."""
    import comfy.model_detection
    import comfy.utils

    asked = comfy.model_detection.detect_unet_config
    original = asked.__wrapped__
    files = sorted((base / "models" / "diffusion_models").glob("*.safetensors"))
    assert len(files) >= 5
    for file in files:
        state_dict, metadata = comfy.utils.load_torch_file(str(file), return_metadata=True)
        expected = original(state_dict, "", metadata=metadata)
        assert asked(state_dict, "", metadata=metadata) == expected
        assert expected is not None and expected.get("image_model") != "longcat_video"
    assert original(weights(), "") is None
    nothing = {"some.weight": torch.zeros(1)}
    assert original(nothing, "") is None and asked(nothing, "") is None


# -- LoRA through the host's loader --------------------------------------------------------------


def official_lora(targets: dict[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    lora: dict[str, Tensor] = {}
    for module, parts in targets.items():
        outs, ins = weights()[f"{module}.weight"].shape
        stem = "lora___lorahyphen___" + module.replace(".", "___lorahyphen___")
        lora[f"{stem}.lora_down.weight"] = torch.randn(parts * 4, ins, generator=generator) / ins**0.5
        for part in range(parts):
            up = f"lora_up.blocks.{part}.weight" if parts > 1 else "lora_up.weight"
            lora[f"{stem}.{up}"] = torch.randn(outs // parts, 4, generator=generator) / 2
        lora[f"{stem}.alpha_scale"] = torch.tensor(0.5)
    return lora


TARGETS = {"blocks.0.attn.qkv": 3, "blocks.1.cross_attn.kv_linear": 2, "blocks.1.ffn.w2": 1, "final_layer.linear": 1}


def merged(lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the LoRA added by hand: a block-diagonal up for fused projections."""
    out = dict(weights())
    for module, parts in TARGETS.items():
        stem = "lora___lorahyphen___" + module.replace(".", "___lorahyphen___")
        ups = [lora[f"{stem}.lora_up.blocks.{i}.weight" if parts > 1 else f"{stem}.lora_up.weight"] for i in range(parts)]
        out[f"{module}.weight"] = out[f"{module}.weight"] + 0.5 * torch.block_diag(*ups) @ lora[f"{stem}.lora_down.weight"]
    return out


@pytest.mark.parametrize("layout", ["official", "rekeyed"])
def test_lora_through_the_stock_loader(host: str, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    import comfy.model_management
    import comfy.sd

    lora = official_lora(TARGETS)
    save_file(merged(lora), tmp_path / "merged.safetensors")
    expected = load(host, tmp_path / "merged.safetensors").model.diffusion_model(**inputs("i2v"))
    save_file(weights() if layout == "official" else rekeyed(), tmp_path / "plain.safetensors")
    patched, _ = comfy.sd.load_lora_for_models(load(host, tmp_path / "plain.safetensors"), None, lora, 1.0, 0)
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    comfy.model_management.load_models_gpu([patched], force_full_load=True)
    out = patched.model.diffusion_model(**inputs("i2v"))
    plain = load(host).model.diffusion_model(**inputs("i2v"))
    assert (expected - plain).abs().max() > 0.05
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_lora_with_rekeyed_names(host: str) -> None:
    """As community files have it: Wan's module names, on either checkpoint."""
    import comfy.sd

    lora = {}
    for module in ("blocks.0.self_attn.k", "blocks.1.cross_attn.o"):
        lora |= {
            f"diffusion_model.{module}.lora_down.weight": torch.ones(2, 128),
            f"diffusion_model.{module}.lora_up.weight": torch.ones(128, 2),
        }
    patched, _ = comfy.sd.load_lora_for_models(load(host), None, lora, 1.0, 0)
    assert set(patched.patches) == {"diffusion_model.blocks.0.attn.qkv.weight", "diffusion_model.blocks.1.cross_attn.proj.weight"}
    offset = patched.patches["diffusion_model.blocks.0.attn.qkv.weight"][0][3]
    assert tuple(offset) == (0, 128, 128)
