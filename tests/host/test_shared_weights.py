"""Weights that lie once over the ranks: the picture of one device, and of each block no more bytes than its part."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from campaign import on_devices, parameters
from host import quantised
from host.boundary import LORA
from host.graphs import Branch, Case, Graph, Link, compare, latent, load, run_sp, sample, text
from host.observe import holds_within, run, video, workers
from safetensors import safe_open

from sp_core.demo.comfy_server import ComfyServer
from sp_core.weights import gathered_bytes
from sp_core.weights.layout import aligned

DEVICES = "cpu:2"
FORWARDS = 2


def with_lora(branch: Branch, model: Link, strength: float = 0.8) -> Link:
    return branch.add("LoraLoaderModelOnly", model=model, **{**LORA, "strength_model": strength})[0]


def two_loras(branch: Branch, model: Link) -> Link:
    return with_lora(branch, with_lora(branch, model), -0.5)


def unchanged(branch: Branch, model: Link) -> Link:
    return model


def wan(name: str = "tiny_wan_t2v", change: Callable[[Branch, Link], Link] = unchanged) -> Case:
    def case(branch: Branch) -> Link:
        model = branch.patch(change(branch, load(branch, name)))
        return sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"))

    case.__name__ = f"{name}-{change.__name__}"
    return case


def ltxav(branch: Branch) -> Link:
    model = branch.patch(load(branch, "tiny_ltxav"))
    return sample(branch, model, text(branch, 48, tokens=16, frame_rate=25.0), latent(branch, "1,128,3,5,7;1,8,13,16"))


def experts(strength: float = 0.8) -> Case:
    """A model for the first step, another for the second."""

    def case(branch: Branch) -> Link:
        words, samples = text(branch, 4096), latent(branch, "1,16,3,10,14")
        for step, name in enumerate(("tiny_wan_t2v", "tiny_wan_t2v_low")):
            model = branch.patch(with_lora(branch, load(branch, name), strength))
            settings = {"noise_seed": 5, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple"}
            settings |= {"add_noise": "disable" if step else "enable", "return_with_leftover_noise": "disable" if step else "enable"}
            samples = branch.add(
                "KSamplerAdvanced",
                model=model,
                positive=words[0],
                negative=words[1],
                latent_image=samples,
                start_at_step=step,
                end_at_step=step + 1,
                **settings,
            )[0]
        return samples

    case.__name__ = "experts"
    return case


def is_shared(report: str, devices: str) -> None:
    assert f"weights: shared over {devices.removeprefix('cpu:')} devices" in report, report


@pytest.mark.parametrize("devices", on_devices())
def test_the_picture_is_that_of_one_device(server: ComfyServer, devices: str) -> None:
    is_shared(compare(server, wan(), devices, weights="shared").sp.report, devices)


@pytest.mark.parametrize(
    "case", parameters(plain=[wan(change=two_loras), experts()], campaign=[wan(change=with_lora), ltxav]), ids=lambda case: case.__name__
)
def test_other_models_and_loras(server: ComfyServer, case: Case) -> None:
    is_shared(compare(server, case, DEVICES, weights="shared").sp.report, DEVICES)


@pytest.mark.parametrize(
    ("devices", "requested"),
    parameters(
        plain=[("cpu:2", {"cfg_split": 2})],
        campaign=[("cpu:4", {"cfg_split": 2, "ring": 2}), ("cpu:3", {"cfg_split": 1, "ring": 3}), ("cpu:4", {"cfg_split": 1})],
    ),
    ids=str,
)
def test_any_degrees_gather_the_bytes_of_the_formula(server: ComfyServer, base: Path, devices: str, requested: dict[str, int]) -> None:
    report = compare(server, wan(), devices, weights="shared", **requested).sp.report
    is_shared(report, devices)
    sent = re.search(r"weights: .*; ([\d.]+) MB sent a rank and forward", report)
    blocks = [0] * 3
    with safe_open(base / "models" / "diffusion_models" / "tiny_wan_t2v.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.startswith("blocks."):
                blocks[int(name.split(".")[1])] += aligned(file.get_tensor(name).nbytes)
    expected = gathered_bytes(blocks, int(devices.removeprefix("cpu:")))
    assert sent is not None and float(sent[1]) == pytest.approx(expected / 1e6, rel=1e-3)


# -- whatever the weights are: the bits of whole weights


@pytest.fixture(scope="module")
def quantised_base(comfyui: Path, base: Path) -> Path:
    script, folder = Path(quantised.__file__), base / "models" / "diffusion_models"
    subprocess.run([sys.executable, str(script), str(comfyui), str(folder)], check=True)
    return base


@pytest.mark.parametrize("change", [unchanged, with_lora], ids=lambda change: change.__name__)
@pytest.mark.parametrize("form", parameters(plain=["float8_e4m3fn"], campaign=["int8_tensorwise", "nvfp4"]))
def test_quantised_weights_give_the_bits_of_whole_ones(
    server: ComfyServer, quantised_base: Path, form: str, change: Callable[[Branch, Link], Link]
) -> None:
    case = wan(quantised.file_name(form), change)
    shared, whole = (run_sp(server, case, DEVICES, weights=weights) for weights in ("shared", "whole"))
    is_shared(shared.report, DEVICES)
    assert "; whole:" not in shared.report, shared.report
    assert shared.parts[0].std() > 1e-3 and torch.equal(shared.parts[0], whole.parts[0])


# -- what cannot be shared out


def test_code_that_moves_weights_at_loading_is_named_and_gets_whole_weights(server: ComfyServer) -> None:
    def swapped(branch: Branch, model: Link) -> Link:
        return branch.add("SPTestBlockSwap", model=model)[0]

    report = run_sp(server, wan(change=swapped), DEVICES, weights="shared").report
    assert re.search(r"weights: whole on each device, as .*swap.* may move weights", report), report


def test_auto_on_cpu_workers_is_whole_and_the_report_says_why(server: ComfyServer) -> None:
    assert "weights: whole on each device, as auto shares them out only between devices" in run_sp(server, wan(), DEVICES).report


# -- memory and what happens between


def test_a_rank_holds_its_part(server: ComfyServer) -> None:
    run(server, *video(DEVICES, seed=901))
    whole = [worker["weight_bytes"] for worker in workers(server)]
    run_sp(server, wan(), DEVICES, weights="shared")
    assert holds_within(lambda: max(worker["weight_bytes"] for worker in workers(server)) < 0.75 * min(whole), 5), workers(server)


def test_release_and_other_loras_between(server: ComfyServer) -> None:
    first = run_sp(server, wan(change=with_lora), DEVICES, weights="shared").parts[0]
    server.post("/free", {"unload_models": True, "free_memory": True})
    plain = run_sp(server, wan(), DEVICES, weights="shared").parts[0]
    again = run_sp(server, wan(change=with_lora), DEVICES, weights="shared").parts[0]
    assert torch.equal(first, again) and not torch.equal(first, plain)


def test_the_sampler_node_takes_weights_too(server: ComfyServer) -> None:
    graph = Graph()
    branch = Branch(graph)
    inputs = {"seed": 5, "steps": FORWARDS, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    words = text(branch, 4096)
    node = branch.add(
        "SPSampler",
        model=load(branch, "tiny_wan_t2v"),
        positive=words[0],
        negative=words[1],
        latent_image=latent(branch, "1,16,3,10,14"),
        devices=DEVICES,
        weights="shared",
        **inputs,
    )
    saved = branch.add("SPTestSaveLatent", samples=node[0], name="sampler", report=node[1]).id
    is_shared(run(server, graph.prompt, saved).report, DEVICES)


def test_a_value_that_does_not_exist_is_refused(server: ComfyServer) -> None:
    with pytest.raises(Exception, match="weights"):
        run_sp(server, wan(), DEVICES, weights="halved")
