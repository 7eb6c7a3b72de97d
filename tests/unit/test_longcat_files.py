"""LongCat-Video without ComfyUI: names of keys, LoRA files, schedules, guidance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from sp_core.models.longcat.keys import detect, fused_parts, official_name, rekeyed_name, to_official
from sp_core.models.longcat.lora import convert_lora, is_official, key_aliases
from sp_core.models.longcat.schedules import SCHEDULES, cfg_zero

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SIGMAS = json.loads((FIXTURES / "longcat_vectors.json").read_text())["sigmas"]
AVATAR_SCHEDULES = json.loads((FIXTURES / "longcat_avatar_vectors.json").read_text())["schedules"]
SIGMAS |= {name: schedule["sigmas"] for name, schedule in AVATAR_SCHEDULES.items()}


@pytest.fixture(scope="module")
def official() -> dict[str, Tensor]:
    with safe_open(str(FIXTURES / "longcat_tiny.safetensors"), "pt") as file:
        return {key[len("model.") :]: file.get_tensor(key) for key in file.keys() if key.startswith("model.")}  # noqa: SIM118


def rekeyed(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model under the other names: Wan's, projections apart."""
    out = {}
    for key, value in official.items():
        module, _, kind = key.rpartition(".")
        for name, part in zip(parts := fused_parts(module) or [module], value.chunk(len(parts)), strict=True):
            out[f"{rekeyed_name(name)}.{kind}"] = part.contiguous()
    return out


def test_both_sets_of_names_are_recognised(official: dict[str, Tensor]) -> None:
    config = detect(official)
    assert config == {
        "image_model": "longcat_video",
        "hidden_size": 128,
        "num_heads": 4,
        "depth": 2,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": (1, 2, 2),
        "ffn_hidden_size": 512,
        "adaln_tembed_dim": 64,
        "frequency_embedding_size": 256,
        "caption_channels": 64,
        "fused_qkv": True,
        "fused_kv": True,
    }
    assert detect(rekeyed(official)) == {**config, "fused_qkv": False, "fused_kv": False}
    behind = {f"model.diffusion_model.{key}": value for key, value in official.items()}
    assert detect(behind, "model.diffusion_model.") == config
    assert detect(behind) is None


def test_rekeyed_names_are_those_in_use(official: dict[str, Tensor]) -> None:
    keys = set(rekeyed(official))
    for key in (
        "patch_embedding.weight",
        "time_embedding.mlp.0.weight",
        "text_embedding.2.bias",
        "blocks.1.modulation.1.weight",
        "blocks.1.self_attn.q.weight",
        "blocks.1.self_attn.norm_k.weight",
        "blocks.1.self_attn.o.bias",
        "blocks.1.cross_attn.v.weight",
        "blocks.1.cross_attn.norm_q.weight",
        "blocks.1.norm3.weight",
        "blocks.1.ffn.w3.weight",
        "head.modulation.1.weight",
        "head.head.weight",
    ):
        assert key in keys
    assert len(keys) == len(official) + 2 * 2 * (2 + 1)  # two blocks; weights and biases of two more and one more projection


def test_names_come_back(official: dict[str, Tensor]) -> None:
    there = rekeyed(official)
    back = to_official(there)
    assert {rekeyed_name(key) for key in back} == set(there)
    assert all(official_name(key) == key for key in official)
    # scales and quantisation marks belong to their layer
    assert official_name("blocks.7.self_attn.q.weight_scale") == "blocks.7.attn.q.weight_scale"
    assert official_name("blocks.7.self_attn.o.comfy_quant") == "blocks.7.attn.proj.comfy_quant"


@pytest.mark.parametrize("extra", ["audio_proj.proj1.weight", "blocks.0.audio_cross_attn.q_linear.weight"])
def test_avatar_is_not_taken_for_it(official: dict[str, Tensor], extra: str) -> None:
    assert detect({**official, extra: torch.zeros(1)}) is None


@pytest.fixture(scope="module")
def avatar() -> dict[str, Tensor]:
    with safe_open(str(FIXTURES / "longcat_avatar_tiny.safetensors"), "pt") as file:
        return {key[len("model.") :]: file.get_tensor(key) for key in file.keys() if key.startswith("model.")}  # noqa: SIM118


def test_avatar_is_recognised(avatar: dict[str, Tensor]) -> None:
    config = detect(avatar)
    assert config is not None
    sizes = {key: config[key] for key in ("image_model", "num_heads", "audio_features", "audio_hidden", "audio_dim", "audio_tokens")}
    assert sizes == {
        "image_model": "longcat_avatar",
        "num_heads": 4,
        "audio_features": 24,
        "audio_hidden": 16,
        "audio_dim": 24,
        "audio_tokens": 4,
    }
    there = rekeyed(avatar)
    for key in ("multitalk_audio_proj.proj1.weight", "blocks.1.audio_modulation.1.bias", "blocks.0.norm_x.weight"):
        assert key in there
    assert "blocks.0.audio_cross_attn.kv_linear.weight" in there
    assert detect(there) == {**config, "fused_qkv": False, "fused_kv": False}
    assert detect({**avatar, "blocks.0.pre_audio_crs_attn_norm.weight": torch.zeros(24)}) is None


def test_wan_is_not_taken_for_it(official: dict[str, Tensor]) -> None:
    wan = {
        "head.modulation": torch.zeros(1, 2, 128),
        "head.head.weight": torch.zeros(64, 128),
        "blocks.0.modulation": torch.zeros(1, 6, 128),
    }
    assert detect(wan) is None
    incomplete = {key: value for key, value in official.items() if not key.startswith("t_embedder")}
    assert detect(incomplete) is None


# -- LoRA ---------------------------------------------------------------------------------

RANK, FACTOR = 3, 0.5


def official_lora() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lora: dict[str, Tensor] = {}
    for module, outs, ins, parts in (("attn.qkv", 8, 6, 3), ("cross_attn.kv_linear", 8, 6, 2), ("ffn.w1", 10, 6, 1)):
        stem = "lora___lorahyphen___" + "___lorahyphen___".join(["blocks", "0", *module.split(".")])
        lora[f"{stem}.lora_down.weight"] = torch.randn(parts * RANK, ins, generator=generator)
        for part in range(parts):
            up = f"lora_up.blocks.{part}.weight" if parts > 1 else "lora_up.weight"
            lora[f"{stem}.{up}"] = torch.randn(outs, RANK, generator=generator)
        lora[f"{stem}.alpha_scale"] = torch.tensor(FACTOR)
    return lora


def change(lora: dict[str, Tensor], module: str) -> Tensor:
    """What the host adds to a weight: alpha / rank * up @ down."""
    stem = f"diffusion_model.blocks.0.{module}"
    down, up = lora[f"{stem}.lora_down.weight"], lora[f"{stem}.lora_up.weight"]
    return lora[f"{stem}.alpha"] / down.size(0) * up @ down


@pytest.mark.parametrize(("module", "parts"), [("attn.qkv", ("q", "k", "v")), ("cross_attn.kv_linear", ("k_linear", "v_linear"))])
def test_fused_lora_is_block_diagonal(module: str, parts: tuple[str, ...]) -> None:
    source = official_lora()
    stem = "lora___lorahyphen___blocks___lorahyphen___0___lorahyphen___" + module.replace(".", "___lorahyphen___")
    down = source[f"{stem}.lora_down.weight"]
    up = torch.block_diag(*(source[f"{stem}.lora_up.blocks.{i}.weight"] for i in range(len(parts))))
    converted = convert_lora(source)
    prefix = module.split(".")[0]
    torch.testing.assert_close(torch.cat([change(converted, f"{prefix}.{part}") for part in parts]), FACTOR * up @ down)


def test_plain_lora_keeps_its_factor() -> None:
    source = official_lora()
    assert is_official(source)
    converted = convert_lora({**source, "untouched.key": torch.ones(1)})
    assert not is_official(converted)
    assert "untouched.key" in converted
    stem = "lora___lorahyphen___blocks___lorahyphen___0___lorahyphen___ffn___lorahyphen___w1"
    torch.testing.assert_close(change(converted, "ffn.w1"), FACTOR * source[f"{stem}.lora_up.weight"] @ source[f"{stem}.lora_down.weight"])


def test_incomplete_lora_is_named() -> None:
    source = official_lora()
    del source["lora___lorahyphen___blocks___lorahyphen___0___lorahyphen___attn___lorahyphen___qkv.lora_up.blocks.1.weight"]
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv do not fit together"):
        convert_lora(source)


def test_aliases_reach_the_rows_of_a_fused_weight() -> None:
    weights = {
        "diffusion_model.blocks.0.attn.qkv.weight": torch.Size((24, 8)),
        "diffusion_model.blocks.0.attn.qkv.bias": torch.Size((24,)),
        "diffusion_model.blocks.0.attn.proj.weight": torch.Size((8, 8)),
        "diffusion_model.blocks.0.cross_attn.k_linear.weight": torch.Size((8, 8)),
    }
    aliases = key_aliases(weights)
    fused = "diffusion_model.blocks.0.attn.qkv.weight"
    for i, part in enumerate("qkv"):
        target = (fused, (0, 8 * i, 8))
        assert aliases[f"diffusion_model.blocks.0.attn.{part}"] == target
        assert aliases[f"diffusion_model.blocks.0.self_attn.{part}"] == target
        assert aliases[f"lora_unet_blocks_0_self_attn_{part}"] == target
    assert aliases["diffusion_model.blocks.0.self_attn.o"] == "diffusion_model.blocks.0.attn.proj.weight"
    assert aliases["diffusion_model.blocks.0.cross_attn.k"] == "diffusion_model.blocks.0.cross_attn.k_linear.weight"


# -- schedules and guidance ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "vector"),
    [
        ("base", {"steps": 50}, "base50_shift12"),
        ("distill", {"steps": 16}, "distill16_shift12"),
        ("distill", {"steps": 8, "shift": 7.0}, "avatar15_distill8_shift7"),
        ("enhance_hf", {"steps": 50}, "enhance_hf50"),
        ("refine", {"steps": 50, "start": 0.5}, "refine50_t05"),
        ("base", {"steps": 50, "shift": 7.0}, "avatar-v1.5 shift 7 steps 50"),
        ("enhance_hf", {"steps": 50, "shift": 7.0}, "avatar-v1.5 shift 7 steps 50 enhance_hf"),
        ("distill", {"steps": 8}, "avatar-v1.0 shift 12 steps 8 distill"),
        ("avatar_distill", {}, "avatar-v1.5 shift 7 steps 8 distill"),
    ],
)
def test_schedules(name: str, arguments: dict, vector: str) -> None:
    sigmas = SCHEDULES[name](**arguments)
    assert sigmas.dtype == torch.float32
    torch.testing.assert_close(sigmas, torch.tensor(SIGMAS[vector]), atol=1e-6, rtol=0)
    assert (sigmas.diff() < 0).all()


def test_distill_has_fifty_steps_at_most() -> None:
    with pytest.raises(ValueError, match="at most 50 steps"):
        SCHEDULES["distill"](51)


def test_the_avatars_distilled_schedule_has_eight_steps() -> None:
    with pytest.raises(ValueError, match="has 8 steps, 50 were asked for"):
        SCHEDULES["avatar_distill"](50)


def test_cfg_zero_scales_velocities() -> None:
    generator = torch.Generator().manual_seed(0)
    cond, uncond = (torch.randn(2, 16, 3, 4, 5, generator=generator) for _ in range(2))
    uncond = uncond + cond
    out = cfg_zero(cond, uncond, 4.0)
    for item in range(2):
        s = torch.dot(cond[item].flatten(), uncond[item].flatten()) / uncond[item].square().sum()
        torch.testing.assert_close(out[item], s * uncond[item] + 4 * (cond[item] - s * uncond[item]))
    # homogeneous: the host hands in sigma times the velocity
    torch.testing.assert_close(cfg_zero(0.3 * cond, 0.3 * uncond, 4.0), 0.3 * out)
    # at scale 1 guidance changes nothing, and the host's own formula on denoised predictions is another
    torch.testing.assert_close(cfg_zero(cond, uncond, 1.0), cond)
    x = torch.randn(2, 16, 3, 4, 5, generator=generator)
    s = (cond * uncond).sum((1, 2, 3, 4), keepdim=True) / uncond.square().sum((1, 2, 3, 4), keepdim=True)
    on_denoised = s * (x - uncond) + 4 * ((x - cond) - s * (x - uncond))
    assert (x - out - on_denoised).abs().max() > 0.1
