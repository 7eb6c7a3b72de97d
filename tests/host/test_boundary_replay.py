"""What a worker runs to make its model, and what makes two models one: nodes that draw, lists, values on wires, stages behind stages."""

from __future__ import annotations

import re

import psutil
import pytest
import torch
from host.boundary import EVEN, LORA, alone, before, compare_and_list, copy_checkpoint, named, notes, on_wan, refusal, watched
from host.graphs import TOLERANCE, Branch, Case, Graph, Link, compare, latent, load, read, relative, run_sp, sample, save, text
from host.observe import pids
from safetensors.torch import load_file, save_file

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"
LTX_AV = "1,128,3,5,7;1,8,13,16"

# -- lists of MODELs ---------------------------------------------------------------------


def of_a_list(branch: Branch) -> Link:
    """A LoRA strength that is a list makes a list of MODELs."""
    values = [branch.add("PrimitiveFloat", value=value)[0] for value in (1.0, 0.2)]
    strengths = branch.add("CreateList", **{f"inputs.input{i}": value for i, value in enumerate(values)})[0]
    model = branch.add("LoraLoaderModelOnly", model=load(branch, "tiny_wan_t2v"), **{**LORA, "strength_model": strengths})[0]
    return on_wan(branch, branch.patch(model))


def saved_list(server: ComfyServer, devices: str | None) -> list[torch.Tensor]:
    branch = alone(devices)
    saved = branch.add("SPForeignSaveEach", samples=of_a_list(branch), name=f"list-{'sp' if devices else 'stock'}")
    return [load_file(path)["part0"] for path in server.run(branch.graph.prompt)[saved.id]["saved"]]


def test_each_member_of_a_list_has_its_own_weights(server: ComfyServer) -> None:
    stock, sp = saved_list(server, None), saved_list(server, DEVICES)
    assert len(sp) == len(stock) == 2
    assert relative(stock[1], stock[0]) > 1e-2, "the strengths make no difference, so this shows nothing"
    errors = [relative(mine, theirs) for mine, theirs in zip(sp, stock, strict=True)]
    assert max(errors) <= TOLERANCE, errors


# -- values that ComfyUI's process computed ----------------------------------------------


def drawn_strength(branch: Branch) -> Link:
    model = branch.add(
        "LoraLoaderModelOnly", model=load(branch, "tiny_wan_t2v"), **{**LORA, "strength_model": branch.add("SPForeignDrawn")[0]}
    )[0]
    return on_wan(branch, branch.patch(model), cfg=1.0)


def test_a_drawn_number_is_drawn_once(server: ComfyServer) -> None:
    compare(server, drawn_strength, DEVICES)


@pytest.mark.parametrize("where", ["one rank", "all workers"])
def test_ranks_prove_that_they_hold_the_same_model(server: ComfyServer, where: str) -> None:
    sentence = refusal(server, before("SPForeignDiffers", where=where))
    assert "SPForeignDiffers" in sentence and re.search("rank|worker", sentence, re.I), sentence


def test_a_file_that_was_replaced_since_comfyui_read_it_is_told(server: ComfyServer) -> None:
    """ComfyUI goes on with the old weights, and the workers would read the new ones."""
    copy_checkpoint(server, "replaced_wan")
    path = server.base / "models" / "diffusion_models" / "replaced_wan.safetensors"
    case = named("replaced_wan", lambda branch: on_wan(branch, branch.patch(load(branch, "replaced_wan"))))
    graph = Graph()
    stock = save(Branch(graph, None), case, "replaced_wan-stock")
    assert read(server.run(graph.prompt)[stock]).parts[0].isfinite().all()
    new = path.with_suffix(".new")
    save_file({name: weight * 1.25 for name, weight in load_file(path).items()}, new)
    new.replace(path)
    sentence = refusal(server, case)
    assert re.search(r"UNETLoader \(node .*the weights have other values .*free the models and the node cache", sentence), sentence
    server.post("/free", {"unload_models": True, "free_memory": True})
    compare(server, case, DEVICES)


# -- what a worker runs ------------------------------------------------------------------


def write_encoder(server: ComfyServer) -> None:
    """What tells the host that this is CLIP-L; it leaves the weights that are not in the file unset."""
    path = server.base / "models" / "text_encoders" / "tiny_clip.safetensors"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        save_file({"text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(3072, 768)}, path)


def lora_with_clip(branch: Branch) -> Link:
    clip = branch.add("CLIPLoader", clip_name="tiny_clip.safetensors", type="stable_diffusion")[0]
    model = branch.add("LoraLoader", model=load(branch, "tiny_wan_t2v"), clip=clip, strength_clip=0.8, **LORA)[0]
    return on_wan(branch, branch.patch(model))


def test_a_lora_loader_with_clip_loads_no_text_encoder(server: ComfyServer) -> None:
    write_encoder(server)
    _, ran = compare_and_list(server, lora_with_clip)
    assert all(counts["LoraLoader"] == 1 and set(counts) <= {"UNETLoader", "LoraLoader"} for counts in ran.values()) and len(ran) == 2, ran


def held_by_workers(server: ComfyServer) -> list[int]:
    """Bytes of main memory that are each worker's own."""
    return [psutil.Process(pid).memory_full_info().uss for pid in pids(server)]


def test_a_text_encoder_takes_no_memory_of_a_worker(server: ComfyServer) -> None:
    def with_encoder(megabytes: int) -> Case:
        def case(branch: Branch) -> Link:
            clip = branch.add("SPForeignEncoder", megabytes=megabytes)[0]
            model = branch.add("LoraLoader", model=load(branch, "tiny_wan_t2v"), clip=clip, strength_clip=0.8, **LORA)[0]
            return on_wan(branch, branch.patch(model))

        return case

    run_sp(server, with_encoder(1))
    small = held_by_workers(server)
    run_sp(server, with_encoder(200))
    grown = [(after - earlier) >> 20 for after, earlier in zip(held_by_workers(server), small, strict=True)]
    assert max(grown) < 100, f"the workers grew by {grown} MB"


def guided_by_a_text(branch: Branch) -> Link:
    """As NAG: the node on the MODEL's way takes a conditioning."""
    words = text(branch, 4096)
    model = branch.add("SPForeignBatchTelling", model=load(branch, "tiny_wan_t2v"), conditioning=words[1])[0]
    return on_wan(branch, branch.patch(model), cfg=1.0)


def behind_an_encode(branch: Branch) -> Link:
    """As a ControlNet: the node on the MODEL's way takes what a VAE made of pictures."""
    vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
    pixels = branch.add("SPTestImage", frames=5, height=64, width=64, seed=3)[0]
    encoded = branch.add("SPForeignEncode", vae=vae, pixels=pixels)[0]
    model = branch.add("SPForeignControl", model=load(branch, "tiny_wan_t2v"), latent=encoded)[0]
    return on_wan(branch, branch.patch(model), cfg=1.0)


def reference_audio(branch: Branch) -> Link:
    """What this node does to the MODEL runs around it, so no worker needs the node at all, and least of all its VAE and sound."""
    positive, negative = text(branch, 48, tokens=16, frame_rate=25.0)
    parts = {"audio_vae": branch.add("SPTestAudioVAE")[0], "reference_audio": branch.add("SPTestAudio", samples=6400, seed=2)[0]}
    window = {"identity_guidance_scale": 2.0, "start_percent": 0.0, "end_percent": 1.0}
    node = branch.add("LTXVReferenceAudio", model=load(branch, "tiny_ltxav"), positive=positive, negative=negative, **parts, **window)
    return sample(branch, branch.patch(node[0]), (node[1], node[2]), latent(branch, LTX_AV))


def stage_behind_a_stage(first_on_devices: bool) -> Case:
    """ComfyUI's own node on the way to the second MODEL reads the first sampler's latent."""

    def case(branch: Branch) -> Link:
        words = text(branch, 4096)
        model = load(branch, "tiny_wan_t2v")
        first = sample(branch, branch.patch(model) if first_on_devices else model, words, latent(branch, EVEN), cfg=1.0)
        shift = {"max_shift": 2.05, "base_shift": 0.95, "latent": first}
        second = branch.add("ModelSamplingLTXV", model=load(branch, "tiny_wan_t2v_low"), **shift)[0]
        return sample(branch, branch.patch(second), words, latent(branch, EVEN), cfg=1.0)

    return named("second_stage", case)


MODEL_NODES = {
    "text": (guided_by_a_text, {"UNETLoader", "SPForeignBatchTelling"}),
    "encode": (behind_an_encode, {"UNETLoader", "SPForeignControl"}),
    "audio": (reference_audio, {"UNETLoader", "LTXVReferenceAudio"}),
    "stage": (stage_behind_a_stage(False), {"UNETLoader", "ModelSamplingLTXV"}),
}


@pytest.mark.parametrize(("case", "allowed"), MODEL_NODES.values(), ids=MODEL_NODES)
def test_workers_run_the_nodes_of_the_model_only(server: ComfyServer, case: Case, allowed: set[str]) -> None:
    _, ran = compare_and_list(server, case)
    assert all(set(counts) <= allowed for counts in ran.values()), ran
    # some node of the graph is new to the workers, so that the list is not empty because nothing was listed
    assert all(ran.values()), ran


def test_no_worker_starts_workers(server: ComfyServer) -> None:
    since = len(server.log())
    try:
        _, ran = compare_and_list(server, stage_behind_a_stage(True))
        assert all(set(counts) <= {"UNETLoader", "ModelSamplingLTXV"} for counts in ran.values()), ran
        assert not re.findall(r"^\[SP rank \d+\].*starting \d+ workers", server.log(since), re.M)
    finally:
        server.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})


# -- what makes two models one -----------------------------------------------------------


def test_a_changed_strength_or_shift_reads_no_checkpoint_again(server: ComfyServer) -> None:
    watched(server)
    for number, (strength, shift) in enumerate([(0.2, 5.0), (0.5, 5.0), (0.5, 8.0), (0.9, 3.0)]):

        def case(branch: Branch, strength: float = strength, shift: float = shift, number: int = number) -> Link:
            lora = {**LORA, "strength_model": strength}
            model = branch.add("LoraLoaderModelOnly", model=load(branch, "tiny_wan_t2v_low"), **lora)[0]
            model = branch.add("ModelSamplingSD3", model=model, shift=shift)[0]
            return on_wan(branch, branch.patch(model), seed=300 + number)

        run_sp(server, case)
    ran = notes(server, "ran")
    assert {rank: counts["LoraLoaderModelOnly"] for rank, counts in ran.items()} == {0: 3, 1: 3}, "not every strength was loaded"
    reads = {rank: counts["UNETLoader"] for rank, counts in ran.items()}
    assert max(reads.values()) <= 1, f"by rank, the checkpoint was read {reads} times"
