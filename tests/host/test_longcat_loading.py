"""LongCat-Video's files through the host's own loading: detection beside the host's models, fp8, LoRA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from distributed import avatar_ranks
from distributed.longcat_ranks import inputs, load
from host.longcat_files import avatar_weights, official_lora, rekeyed, weights
from safetensors.torch import save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("comfyui_here")


def test_model_is_what_the_host_needs(comfyui_here: str) -> None:
    import comfy.latent_formats
    import comfy.model_base

    patcher = load(comfyui_here)
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
def test_fp8_scaled(comfyui_here: str, tmp_path: Path, layout: str) -> None:
    stored, meant = fp8_scaled(weights() if layout == "official" else rekeyed())
    outputs = []
    for name, state_dict in (("fp8", stored), ("meant", meant)):
        save_file(state_dict, tmp_path / f"{name}.safetensors")
        patcher = load(comfyui_here, tmp_path / f"{name}.safetensors")
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


def test_registering_twice_changes_nothing(comfyui_here: str) -> None:
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


def test_host_that_changed_still_starts(comfyui_here: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sp_core.models.registration import register_models

    monkeypatch.setitem(sys.modules, "comfy.lora_convert", None)
    assert not register_models()
    assert "LongCat-Video cannot be loaded with this ComfyUI" in caplog.text


def test_host_that_knows_it_wins(comfyui_here: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_models_are_detected_as_before(comfyui_here: str, base: Path) -> None:
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
def test_lora_through_the_stock_loader(comfyui_here: str, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    import comfy.model_management
    import comfy.sd

    lora = official_lora(weights(), TARGETS, 7)
    save_file(merged(lora), tmp_path / "merged.safetensors")
    expected = load(comfyui_here, tmp_path / "merged.safetensors").model.diffusion_model(**inputs("i2v"))
    save_file(weights() if layout == "official" else rekeyed(), tmp_path / "plain.safetensors")
    patched, _ = comfy.sd.load_lora_for_models(load(comfyui_here, tmp_path / "plain.safetensors"), None, lora, 1.0, 0)
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    comfy.model_management.load_models_gpu([patched], force_full_load=True)
    out = patched.model.diffusion_model(**inputs("i2v"))
    plain = load(comfyui_here).model.diffusion_model(**inputs("i2v"))
    assert (expected - plain).abs().max() > 0.05
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_lora_with_rekeyed_names(comfyui_here: str) -> None:
    """As community files have it: Wan's module names, on either checkpoint."""
    import comfy.sd

    lora = {}
    for module in ("blocks.0.self_attn.k", "blocks.1.cross_attn.o"):
        lora |= {
            f"diffusion_model.{module}.lora_down.weight": torch.ones(2, 128),
            f"diffusion_model.{module}.lora_up.weight": torch.ones(128, 2),
        }
    patched, _ = comfy.sd.load_lora_for_models(load(comfyui_here), None, lora, 1.0, 0)
    assert set(patched.patches) == {"diffusion_model.blocks.0.attn.qkv.weight", "diffusion_model.blocks.1.cross_attn.proj.weight"}
    offset = patched.patches["diffusion_model.blocks.0.attn.qkv.weight"][0][3]
    assert tuple(offset) == (0, 128, 128)


# -- the Avatar --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["official", "rekeyed", "fp8"])
def test_avatar_checkpoints(comfyui_here: str, tmp_path: Path, layout: str) -> None:
    meant = avatar_weights() if layout != "rekeyed" else rekeyed(avatar_weights())
    stored = meant
    if layout == "fp8":
        stored, meant = fp8_scaled(meant)
    given, outputs = avatar_ranks.inputs("ai2v_two.cond"), []
    for name, state_dict in (("stored", stored), ("meant", meant)):
        save_file(state_dict, tmp_path / f"{name}.safetensors")
        patcher = load(comfyui_here, tmp_path / f"{name}.safetensors")
        dtype = patcher.model.get_dtype_inference()
        cast = {key: value.to(dtype) if key in ("x", "context", "audio_embed") else value for key, value in given.items()}
        outputs.append(-patcher.model.diffusion_model(**cast))
    assert type(patcher.model.diffusion_model).__name__ == "LongCatAvatarModel"
    if layout == "fp8":
        assert (outputs[0] - outputs[1]).norm() / outputs[1].norm() < (1e-4 if dtype == torch.float32 else 0.03)
    else:
        assert (outputs[0] - avatar_ranks.expected("ai2v_two.cond")).abs().max() <= 1e-5


def test_versions_of_the_avatar_are_told_by_their_audio(comfyui_here: str) -> None:
    from sp_core.models.longcat.config import LongCatAvatarConfig

    sizes = {"image_model": "longcat_avatar", "hidden_size": 64}
    shifts = [LongCatAvatarConfig({**sizes, "audio_features": features}).sampling_settings["shift"] for features in (12 * 768, 5 * 1280)]
    assert shifts == [12.0, 7.0]


def test_lora_of_the_avatars_audio_layers(comfyui_here: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import comfy.model_management
    import comfy.sd

    module, generator = "blocks.1.audio_cross_attn.kv_linear", torch.Generator().manual_seed(9)
    stem = "lora___lorahyphen___" + module.replace(".", "___lorahyphen___")
    down, ups = torch.randn(4, 24, generator=generator), [torch.randn(64, 2, generator=generator) for _ in range(2)]
    lora = {f"{stem}.lora_down.weight": down, f"{stem}.alpha_scale": torch.tensor(0.5)}
    lora |= {f"{stem}.lora_up.blocks.{i}.weight": up for i, up in enumerate(ups)}
    merged = avatar_weights()
    merged[f"{module}.weight"] = merged[f"{module}.weight"] + 0.5 * torch.block_diag(*ups) @ down
    save_file(merged, tmp_path / "merged.safetensors")
    given = avatar_ranks.inputs("at2v.cond")
    patched, _ = comfy.sd.load_lora_for_models(avatar_ranks.load_avatar(comfyui_here), None, lora, 1.0, 0)
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    comfy.model_management.load_models_gpu([patched], force_full_load=True)
    out = patched.model.diffusion_model(**given)
    expected = load(comfyui_here, tmp_path / "merged.safetensors").model.diffusion_model(**given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert (-out - avatar_ranks.expected("at2v.cond")).abs().max() > 1e-3
