"""What a worker runs to make its model, and what makes two models one: nodes that draw, lists, values on wires, stages behind stages."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from host.boundary import (
    EVEN,
    LORA,
    alone,
    before,
    behind,
    check_sentence,
    compare_and_list,
    copy_checkpoint,
    named,
    notes,
    on_wan,
    plain,
    refusal,
    today,
    watched,
)
from host.graphs import TOLERANCE, Branch, Case, Link, compare, latent, load, read, relative, run_sp, sample, text
from host.observe import pids
from safetensors.torch import load_file, save_file

from sp_core.demo.comfy_server import ComfyServer, PromptFailed
from sp_core.errors import SPError

DEVICES = "cpu:2"
LTX_AV = "1,128,3,5,7;1,8,13,16"


# -- lists of MODELs ------------------------------------------------------------------------


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


@pytest.mark.xfail(
    strict=False,
    reason="It failed behind a stand-in that left its patch in the shared model; that is mended, and the mark goes after a full run.",
)
def test_each_member_of_a_list_has_its_own_weights(server: ComfyServer) -> None:
    stock, sp = saved_list(server, None), saved_list(server, DEVICES)
    assert len(sp) == len(stock) == 2
    assert relative(stock[1], stock[0]) > 1e-2, "the strengths make no difference, so this shows nothing"
    errors = [relative(mine, theirs) for mine, theirs in zip(sp, stock, strict=True)]
    assert max(errors) <= TOLERANCE, errors


# -- values that the UI process computed ----------------------------------------------------


def drawn_strength(branch: Branch) -> Link:
    model = branch.add(
        "LoraLoaderModelOnly", model=load(branch, "tiny_wan_t2v"), **{**LORA, "strength_model": branch.add("SPForeignDrawn")[0]}
    )[0]
    return on_wan(branch, branch.patch(model), cfg=1.0)


def test_a_drawn_number_is_drawn_once(server: ComfyServer) -> None:
    compare(server, drawn_strength, DEVICES)


@pytest.mark.parametrize(
    "where",
    [
        "one rank",
        pytest.param(
            "all workers", marks=today("Workers that are alike are not compared with ComfyUI's process, which may change what it holds.")
        ),
    ],
)
def test_ranks_prove_that_they_hold_the_same_model(server: ComfyServer, where: str) -> None:
    sentence = refusal(server, before("SPForeignDiffers", where=where))
    assert "SPForeignDiffers" in sentence and re.search("rank|worker", sentence, re.I), sentence


# -- what a worker runs ---------------------------------------------------------------------


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


def test_no_worker_starts_workers(server: ComfyServer) -> None:
    since = len(server.log())
    try:
        _, ran = compare_and_list(server, stage_behind_a_stage(True))
        assert all(set(counts) <= {"UNETLoader", "ModelSamplingLTXV"} for counts in ran.values()), ran
        assert not re.findall(r"^\[SP rank \d+\].*starting \d+ workers", server.log(since), re.M)
    finally:
        server.run({"1": {"class_type": "SPRelease", "inputs": {"what": "workers"}}})


# -- what makes two models one --------------------------------------------------------------


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


# -- the stand-in is the model for whoever looks --------------------------------------------

QUESTIONS = [
    *("class", "class name", "type name", "module of the class", "isinstance", "attribute", "missing attribute"),
    *("submodule", "submodule by path", "names of modules", "children", "names of weights", "parameters"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.replace(" ", "_"))
def test_the_stand_in_answers_as_the_model(server: ComfyServer, question: str) -> None:
    compare(server, behind("SPForeignLook", question=question), DEVICES)


# -- inputs over wires ----------------------------------------------------------------------
# ComfyUI runs the branch that it accepts, so what the refused one would have saved is missing: a KeyError


def devices_on_a_wire(value: str) -> Case:
    def case(branch: Branch) -> Link:
        model = load(branch, "tiny_wan_t2v")
        if branch.devices is not None:
            wire = branch.add("PrimitiveString", value=value)[0]
            branch.patched.append(branch.add("SPModelPatch", model=model, devices=wire)[0])
            model = branch.patched[-1]
        return on_wan(branch, model)

    return named("devices_on_a_wire", case)


def test_devices_come_over_a_wire(server: ComfyServer) -> None:
    compare(server, devices_on_a_wire("cpu:2"), DEVICES)


def test_devices_on_a_wire_that_do_not_exist(server: ComfyServer) -> None:
    assert "no device list" in refusal(server, devices_on_a_wire("gpu"))


def test_a_layout_comes_over_a_wire(server: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        if branch.devices is not None:
            branch.requested = {"ulysses": branch.add("PrimitiveInt", value=2)[0], "cfg_split": branch.add("PrimitiveInt", value=1)[0]}
        return plain(branch)

    assert "Ulysses 2" in compare(server, named("layout_on_a_wire", case), DEVICES).layout


def test_devices_of_the_sampler_come_over_a_wire(server: ComfyServer) -> None:
    branch = alone(None)
    positive, negative = text(branch, 4096)
    settings = {"seed": 5, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    inputs = {"model": load(branch, "tiny_wan_t2v"), "positive": positive, "negative": negative, "latent_image": latent(branch, EVEN)}
    node = branch.add("SPSampler", devices=branch.add("PrimitiveString", value=DEVICES)[0], **inputs, **settings)
    saved = branch.add("SPTestSaveLatent", samples=node[0], report=node[1], name="sampler-on-a-wire")
    assert "on 2 devices" in read(server.run(branch.graph.prompt)[saved.id]).report


# -- sentences ------------------------------------------------------------------------------


def hooked(branch: Branch) -> Link:
    lora = branch.add("CreateHookLoraModelOnly", lora_name=LORA["lora_name"], strength_model=0.8)[0]
    positive, negative = text(branch, 4096)
    more = {"strength": 1.0, "set_cond_area": "default", "hooks": lora}
    pair = branch.add("PairConditioningSetProperties", positive_NEW=positive, negative_NEW=negative, **more)
    return sample(branch, branch.patch(load(branch, "tiny_wan_t2v")), (pair[0], pair[1]), latent(branch, EVEN))


def test_hooks_of_a_conditioning_work_or_are_refused_with_the_truth(server: ComfyServer) -> None:
    try:
        comparison = compare(server, hooked, DEVICES, check=False)
    except PromptFailed as error:
        check_sentence(str(error), "[Hh]ook")
    else:
        comparison.check(DEVICES)


def test_an_interpreter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sp_core.pool.devices import WorkerDevice
    from sp_core.pool.launcher import ServiceSpec, Workers

    workers = Workers([WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)], ServiceSpec("sp_core.host.worker.service:HostService"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    try:
        workers.start(shared_state="", requests="", replies=[], start_timeout_s=1)
    except SPError as error:
        sentence = str(error)
    finally:
        workers.stop(0)
        workers.remove_directory()
    assert "/nonexistent/python" in sentence
    assert "disk space" not in sentence and "cannot be written" not in sentence, sentence


# -- lives ----------------------------------------------------------------------------------


def test_a_patch_that_begins_anew_with_each_run(server: ComfyServer) -> None:
    for seed in (71, 72):

        def case(branch: Branch, seed: int = seed) -> Link:
            model = branch.patch(branch.add("SPForeignPerRun", model=load(branch, "tiny_wan_t2v"))[0])
            return on_wan(branch, model, seed=seed)

        compare(server, named(f"run_{seed}", case), DEVICES, cfg_split=1)


def test_runs_begin_and_end_in_the_workers(server: ComfyServer) -> None:
    watched(server)
    notes(server, "lives")
    for seed in (73, 74):

        def case(branch: Branch, seed: int = seed) -> Link:
            return on_wan(branch, branch.patch(branch.add("SPForeignPerRun", model=load(branch, "tiny_wan_t2v_low"))[0]), seed=seed)

        run_sp(server, named(f"life_{seed}", case))
    # the end of a run is told to the workers behind the prompt
    time.sleep(1.0)
    lives = notes(server, "lives")
    assert lives == {rank: Counter(pre_run=2, cleanup=2) for rank in (0, 1)}, lives


def test_companions_of_a_model_are_loaded_in_the_workers(server: ComfyServer) -> None:
    watched(server)
    notes(server, "companions")
    compare(server, before("SPForeignCompanion", "tiny_wan_t2v_low"), DEVICES)
    loaded = notes(server, "companions")
    assert {rank: set(counts) for rank, counts in loaded.items()} == {rank: {"first", "second"} for rank in (0, 1)}, loaded


def test_a_callback_behind_the_patch_is_named_in_a_warning(server: ComfyServer) -> None:
    since = len(server.log())
    compare(server, behind("SPForeignCallback"), DEVICES)
    lines = [line for line in server.log(since).splitlines() if "set_fast_sums" in line or "SPForeignCallback" in line]
    assert lines, "no line names the callback"


# -- one failure stays one ------------------------------------------------------------------


def test_a_class_that_another_branch_left_behind(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_class")
    stock = alone(None)
    model = stock.add("SPForeignClass", model=load(stock, "tiny_wan_class"))[0]
    stock.add("SPTestSaveLatent", samples=on_wan(stock, model, seed=81), name="class-left")
    server.run(stock.graph.prompt)

    def other_branch(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(load(branch, "tiny_wan_class")), seed=82)

    mine = run_sp(server, other_branch).parts[0]
    expected = alone(None)
    saved = expected.add("SPTestSaveLatent", samples=other_branch(expected), name="class-left-other")
    assert relative(mine, read(server.run(expected.graph.prompt)[saved.id]).parts[0]) <= TOLERANCE


def test_patches_that_another_branch_left_are_no_foreign_code(server: ComfyServer) -> None:
    """ComfyUI leaves a stock branch's patches in the model that the branches share; the workers have a model without them."""
    stock = alone(None)
    model = stock.add("SPForeignModuleForward", model=load(stock, "tiny_wan_t2v"), module="self_attn")[0]
    stock.add("SPTestSaveLatent", samples=on_wan(stock, model, seed=83), name="patches-left")
    server.run(stock.graph.prompt)
    other = named("other_branch", lambda branch: on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=84))
    mine = run_sp(server, other).parts[0]
    expected = alone(None)
    saved = expected.add("SPTestSaveLatent", samples=other(expected), name="patches-left-other")
    assert relative(mine, read(server.run(expected.graph.prompt)[saved.id]).parts[0]) <= TOLERANCE


# -- the order of blocks --------------------------------------------------------------------


def vace_order(layers: int = 40, controls: int = 8) -> list[int]:
    """Block numbers in the order in which VACE calls them: control blocks have the numbers behind those of the main blocks."""
    after = {layer: layers + number for number, layer in enumerate(range(0, layers, layers // controls))}
    return [block for layer in range(layers) for block in ([layer, after[layer]] if layer in after else [layer])]


def follows(order: list[int], ahead: int = 3) -> bool:
    """A rank gets through the first blocks after the leader has queued ``ahead`` of them, as it does on asynchronous devices."""
    from sp_core.pool.errors import PeerFailed
    from sp_core.pool.run_ahead import RunAheadLimit
    from sp_core.pool.shared_buffer import SharedBuffer
    from sp_core.pool.shared_state import SharedState
    from sp_core.pool.worker import WorkerContext

    with tempfile.TemporaryDirectory() as folder:
        buffer = SharedBuffer.create(Path(folder), "shared_state", SharedState.nbytes(2))
        state = SharedState(buffer, 2)
        device = torch.device("cpu")
        leader, follower = (WorkerContext(rank, 2, device, state, Path(folder), RunAheadLimit(device), request=1) for rank in (0, 1))
        for block in order[:ahead]:
            leader.enter_block(block, len(order))
        through = threading.Event()

        def follow() -> None:
            with contextlib.suppress(PeerFailed):
                for block in order[:ahead]:
                    follower.enter_block(block, len(order))
                through.set()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        done = through.wait(2.0)
        state.abort(1)  # releases a rank that waits for ever
        thread.join()
        return done


def test_a_rank_follows_the_leader_through_blocks_in_order() -> None:
    assert follows(list(range(40)))


def test_a_rank_follows_the_leader_through_blocks_out_of_order() -> None:
    assert follows(vace_order())


# -- stale directories ----------------------------------------------------------------------

SWEEP = "import sp_core.pool.launcher as launcher; launcher.remove_stale_directories()"


def test_a_start_in_another_container_leaves_a_running_pool_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sp_core.pool.devices import WorkerDevice
    from sp_core.pool.launcher import ServiceSpec, Workers

    wrapper = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace needs more rights than this user has")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    workers = Workers([WorkerDevice("cpu", 0), WorkerDevice("cpu", 1)], ServiceSpec("sp_core.host.worker.service:HostService"))
    assert workers.directory.exists()
    root = Path(__file__).resolve().parents[2]
    subprocess.run([*wrapper, sys.executable, "-c", SWEEP], check=True, cwd=root)
    assert workers.directory.exists()
