"""SP VAE Patch through a real server: what its VAE decodes and encodes is what the loader's VAE does, in every node that takes one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign import parameters, within
from host.graphs import TOLERANCE, Branch, Graph, Link, Result, latent, load, read, relative, sample, text
from host.observe import pids, wait_for, workers

from sp_core.demo.comfy_server import ComfyServer, PromptFailed
from sp_core.vae import PLANS

HERE = Path(__file__).resolve().parent
#: seven rows of the latent, which no count of ranks divides
SHAPE = "1,16,3,7,6"
WITHOUT_PLAN = "comfy.taesd.taesd.TAESD"
#: of eight rows and columns of the latent
TILES = {"tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}

OFFSET = {"x": 10, "y": 20, "operation": "add"}


def write_vaes(comfyui: Path, base: Path, *large: str) -> None:
    subprocess.run([sys.executable, str(HERE / "vaes.py"), str(comfyui), str(base / "models" / "vae"), *large], check=True)


@pytest.fixture(scope="module")
def own(comfyui: Path, base: Path, request: pytest.FixtureRequest) -> Iterator[ComfyServer]:
    wanted = any(sd_decode_in_tiles.__name__ in item.name for item in request.session.items)
    write_vaes(comfyui, base, *(["tiny_sd_vae"] if wanted else []))
    with ComfyServer(comfyui, base, "--cpu") as server:
        yield server


def vae(branch: Branch, name: str = "tiny_wan21_vae") -> Link:
    loaded = branch.add("VAELoader", vae_name=f"{name}.safetensors")[0]
    return loaded if branch.devices is None else branch.add("SPVAEPatch", vae=loaded, devices=branch.devices)[0]


def start_image(branch: Branch, frames: int = 1) -> Link:
    return branch.add("SPTestImage", frames=frames, height=56, width=48, seed=3)[0]


def decode(branch: Branch, samples: Link | None = None, **more: Any) -> Link:
    samples = latent(branch, SHAPE, scale=1.0) if samples is None else samples
    image = branch.add("VAEDecodeTiled" if more else "VAEDecode", samples=samples, vae=vae(branch), **more)[0]
    return branch.add("SPTestPixels", image=image)[0]


def decode_two(branch: Branch) -> Link:
    return decode(branch, latent(branch, "2,16,2,7,6", scale=1.0))


def decode_one_row(branch: Branch) -> Link:
    return decode(branch, latent(branch, "1,16,2,1,6", scale=1.0))


def ltx_decode(branch: Branch) -> Link:
    samples = latent(branch, "1,128,3,5,2", scale=1.0)
    image = branch.add("VAEDecode", samples=samples, vae=vae(branch, "tiny_ltx_vae"))[0]
    return branch.add("SPTestPixels", image=image)[0]


def ltx_encode(branch: Branch) -> Link:
    pixels = branch.add("SPTestImage", frames=9, height=96, width=64, seed=4)[0]
    return branch.add("VAEEncode", pixels=pixels, vae=vae(branch, "tiny_ltx_vae"))[0]


def decode_in_tiles(branch: Branch) -> Link:
    samples = latent(branch, "1,16,3,11,11", scale=1.0)
    return decode(branch, samples, **TILES)


def decoded_in_tiles(branch: Branch, shape: str, name: str) -> Link:
    image = branch.add("VAEDecodeTiled", samples=latent(branch, shape, scale=1.0), vae=vae(branch, name), **TILES)[0]
    return branch.add("SPTestPixels", image=image)[0]


def ltx_decode_in_tiles(branch: Branch) -> Link:
    return decoded_in_tiles(branch, "1,128,3,8,2", "tiny_ltx_vae")


def ltx_encode_in_tiles(branch: Branch) -> Link:
    pixels = branch.add("SPTestImage", frames=9, height=256, width=64, seed=4)[0]
    return branch.add("VAEEncodeTiled", pixels=pixels, vae=vae(branch, "tiny_ltx_vae"), **{**TILES, "overlap": 0})[0]


def image_decode_in_tiles(branch: Branch) -> Link:
    """A VAE without a decode plan, whose frames are pictures."""
    return decoded_in_tiles(branch, "2,4,11,12", "tiny_taesd_vae")


def sd_decode_in_tiles(branch: Branch) -> Link:
    """Its class is that of HunyuanVideo's VAE, and that one's decode plan does not fit."""
    return decoded_in_tiles(branch, "1,4,11,12", "tiny_sd_vae")


def image_encode_in_tiles(branch: Branch) -> Link:
    pixels = branch.add("SPTestImage", frames=2, height=96, width=120, seed=3)[0]
    return branch.add("VAEEncodeTiled", pixels=pixels, vae=vae(branch, "tiny_taesd_vae"), **TILES)[0]


def encode(branch: Branch) -> Link:
    return branch.add("VAEEncode", pixels=start_image(branch, frames=9), vae=vae(branch))[0]


def encode_in_tiles(branch: Branch) -> Link:
    pixels = branch.add("SPTestImage", frames=5, height=120, width=104, seed=3)[0]
    tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
    return branch.add("VAEEncodeTiled", pixels=pixels, vae=vae(branch), **tiles)[0]


def image_to_video(branch: Branch) -> Link:
    """The VAE encodes for the conditioning, SP Model Patch samples, the VAE decodes: one set of workers does all of it."""
    words = text(branch, 4096)
    size = {"width": 48, "height": 56, "length": 9, "batch_size": 1}
    wired = branch.add("WanImageToVideo", positive=words[0], negative=words[1], vae=vae(branch), start_image=start_image(branch), **size)
    model = branch.patch(load(branch, "tiny_wan_i2v"))
    return decode(branch, sample(branch, model, (wired[0], wired[1]), wired[2]))


def inpaint(branch: Branch) -> Link:
    """The VAE encodes a video that is grey under the mask, whose height and width are no whole number of rows of the latent."""
    pixels = branch.add("SPTestImage", frames=5, height=60, width=52, seed=3)[0]
    mask = branch.add("SolidMask", value=1.0, width=24, height=24)[0]
    hidden = branch.add("MaskComposite", destination=branch.add("SolidMask", value=0.0, width=52, height=60)[0], source=mask, **OFFSET)[0]
    wired = branch.add("VAEEncodeForInpaint", pixels=pixels, vae=vae(branch), mask=hidden, grow_mask_by=6)[0]
    return decode(branch, wired)


def first_and_last_frame(branch: Branch) -> Link:
    """The VAE encodes a video that is grey between the first and the last frame."""
    words = text(branch, 4096)
    size = {"width": 48, "height": 56, "length": 9, "batch_size": 1}
    last = branch.add("SPTestImage", frames=1, height=56, width=48, seed=9)[0]
    frames = {"start_image": start_image(branch), "end_image": last}
    wired = branch.add("WanFirstLastFrameToVideo", positive=words[0], negative=words[1], vae=vae(branch), **frames, **size)
    model = branch.patch(load(branch, "tiny_wan_i2v"))
    return decode(branch, sample(branch, model, (wired[0], wired[1]), wired[2]))


def ltx_pixels(branch: Branch, samples: Link) -> Link:
    image = branch.add("VAEDecode", samples=samples, vae=vae(branch, "tiny_ltx_vae"))[0]
    return branch.add("SPTestPixels", image=image)[0]


def ltx_guides(branch: Branch) -> Link:
    """A picture and a video as guides, which stand behind the video's frames while it is sampled."""
    positive, negative = text(branch, dim=48, tokens=16, frame_rate=25.0)
    positive, negative = (branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in (positive, negative))
    start = latent(branch, "1,128,3,5,7")
    for frames, index in ((1, 0), (9, 8)):
        image = branch.add("SPTestImage", frames=frames, height=160, width=224, seed=20 + frames)[0]
        wired = {"positive": positive, "negative": negative, "vae": vae(branch, "tiny_ltx_vae"), "latent": start, "image": image}
        node = branch.add("LTXVAddGuide", **wired, frame_idx=index, strength=0.8)
        positive, negative, start = node[0], node[1], node[2]
    sampled = sample(branch, branch.patch(load(branch, "tiny_ltxv")), (positive, negative), start)
    cropped = branch.add("LTXVCropGuides", positive=positive, negative=negative, latent=sampled)
    return ltx_pixels(branch, cropped[2])


def ltx_upscaled(branch: Branch) -> Link:
    """The upscaler takes the statistics of the latent from the VAE's module."""
    upscaler = branch.add("LatentUpscaleModelLoader", model_name="tiny_ltx_upscaler.safetensors")[0]
    samples = latent(branch, "1,128,2,4,3", scale=1.0)
    larger = branch.add("LTXVLatentUpsampler", samples=samples, upscale_model=upscaler, vae=vae(branch, "tiny_ltx_vae"))[0]
    return ltx_pixels(branch, larger)


def both(server: ComfyServer, case: Any, devices: str) -> tuple[Result, Result]:
    graph, saved = Graph(), []
    for kind, branch in (("stock", Branch(graph)), ("sp", Branch(graph, devices))):
        saved.append(branch.add("SPTestSaveLatent", samples=case(branch), name=f"vae-{case.__name__}-{kind}").id)
    outputs = server.run(graph.prompt)
    stock, mine = (read(outputs[node]) for node in saved)
    return stock, mine


def check(server: ComfyServer, case: Any, devices: str) -> None:
    stock, mine = both(server, case, devices)
    assert stock.parts[0].std() > 1e-3, "the stock picture is empty: the case compares nothing"
    assert mine.parts[0].shape == stock.parts[0].shape
    error = relative(mine.parts[0], stock.parts[0])
    print(f"\n{case.__name__} on {devices}: relative L2 {error:.2g}")
    tiles = case in (*IN_TILES, decode_too_large)
    assert error <= (2e-6 if tiles else TOLERANCE)
    states = [state for state in server.get("/sp/status")["models"] if state["architecture"] in {*PLANS, WITHOUT_PLAN}]
    rows = 1 if case is decode_one_row else int(devices.removeprefix("cpu:"))
    computed = [state["decision"] for state in states if state["forwards"]]
    assert any(f": {rows} of {devices.removeprefix('cpu:')} devices" in decision for decision in computed), computed
    if tiles and devices == "cpu:2":
        assert any("each a tile of its own" in decision for decision in computed), computed


IN_TILES = (
    decode_in_tiles,
    encode_in_tiles,
    ltx_decode_in_tiles,
    ltx_encode_in_tiles,
    image_decode_in_tiles,
    image_encode_in_tiles,
    sd_decode_in_tiles,
)
PLAIN_TILES = (decode_in_tiles, encode_in_tiles, ltx_decode_in_tiles, image_decode_in_tiles)
ALIKE = [decode, decode_two, decode_one_row, decode_in_tiles, encode, encode_in_tiles, image_to_video, ltx_decode, ltx_encode]
IN_GRAPHS = (first_and_last_frame, inpaint, ltx_guides, ltx_upscaled)
IN_PARTS = [(case, "cpu:2") for case in dict.fromkeys((*ALIKE, *PLAIN_TILES))]
#: of three devices the last tile is left over
MORE = [(case, "cpu:3") for case in ALIKE] + [(case, "cpu:2") for case in (*IN_TILES, *IN_GRAPHS) if (case, "cpu:2") not in IN_PARTS]


@pytest.mark.parametrize(
    ("case", "devices"), parameters(plain=IN_PARTS, campaign=MORE), ids=[f"{case.__name__}-{devices}" for case, devices in IN_PARTS + MORE]
)
def test_same_as_the_loaders_vae(own: ComfyServer, case: Any, devices: str) -> None:
    check(own, case, devices)


def decode_too_large(branch: Branch) -> Link:
    """ComfyUI decodes by tiles after the whole frame has not fitted."""
    little = branch.add("SPForeignVae", vae=branch.add("VAELoader", vae_name="tiny_wan21_little.safetensors")[0], how="little memory")[0]
    given = little if branch.devices is None else branch.add("SPVAEPatch", vae=little, devices=branch.devices)[0]
    image = branch.add("VAEDecode", samples=latent(branch, "1,16,1,40,40", scale=1.0), vae=given)[0]
    return branch.add("SPTestPixels", image=image)[0]


def test_what_does_not_fit_is_decoded_by_tiles_on_all_devices(own: ComfyServer) -> None:
    folder = own.base / "models" / "vae"
    shutil.copy(folder / "tiny_wan21_vae.safetensors", folder / "tiny_wan21_little.safetensors")
    said = len(own.log())
    check(own, decode_too_large, "cpu:2")
    assert own.log(said).count("retrying with tiled VAE decoding") == 2


def twice_patched(branch: Branch) -> Link:
    """A VAE that was shared out already, and its picture decoded again from what it encodes."""
    again = branch.add("SPVAEPatch", vae=vae(branch), devices=branch.devices)[0] if branch.devices else vae(branch)
    samples = branch.add("VAEEncode", pixels=start_image(branch, frames=5), vae=again)[0]
    return decode(branch, samples)


def test_a_vae_that_is_shared_out_already_stays_as_it_is(own: ComfyServer) -> None:
    check(own, twice_patched, "cpu:2")


def test_a_vae_without_a_plan_is_passed_on_with_a_line_in_the_log(own: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        other = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
        given = other if branch.devices is None else branch.add("SPVAEPatch", vae=other, devices=branch.devices)[0]
        return branch.add("VAEEncode", pixels=start_image(branch, frames=5), vae=given)[0]

    said = len(own.log())
    stock, mine = both(own, case, "cpu:2")
    assert stock.parts[0].equal(mine.parts[0])
    assert "_VideoEncoder has no decode plan; the VAE stays as it is" in own.log(said)


def test_weights_leave_on_the_unload_button_and_come_back(own: ComfyServer) -> None:
    check(own, decode, "cpu:2")
    assert all(worker["weight_bytes"] for worker in workers(own))
    own.post("/free", {"unload_models": True})
    wait_for(lambda: not any(worker["weight_bytes"] for worker in workers(own)), 20, "the weights to leave")
    check(own, decode_two, "cpu:2")


def long_decode(devices: str, seed: int, **tiles: int) -> dict[str, Any]:
    graph = Graph()
    branch = Branch(graph, devices)
    samples = decode(branch, latent(branch, "1,16,9,48,64", scale=1.0, seed=seed), **tiles)
    branch.add("SPTestSaveLatent", samples=samples, name="vae-long")
    return graph.prompt


def computing(server: ComfyServer) -> bool:
    return bool(workers(server)) and all(worker["phase"] == "computing" for worker in workers(server))


@pytest.mark.parametrize("tiles", [{}, TILES], ids=["bands", "tiles"])
def test_a_cancel_ends_a_decode_and_keeps_the_workers(own: ComfyServer, tiles: dict[str, int]) -> None:
    check(own, decode, "cpu:2")
    before = pids(own)
    prompt_id = own.queue(long_decode("cpu:2", seed=1, **tiles))
    wait_for(lambda: computing(own), 60, "the workers to decode")
    started = time.monotonic()
    own.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="interrupted"):
        own.wait(prompt_id)
    took = time.monotonic() - started
    print(f"\nthe cancel took {took:.2f} s")
    assert took < within(1.0)
    assert pids(own) == before
    check(own, decode_two, "cpu:2")


@pytest.mark.campaign
def test_a_worker_that_is_killed_in_a_decode_is_named_and_the_next_prompt_is_right(own: ComfyServer) -> None:
    check(own, decode, "cpu:2")
    prompt_id = own.queue(long_decode("cpu:2", seed=2))
    wait_for(lambda: computing(own), 60, "the workers to decode")
    os.kill(pids(own)[1], signal.SIGKILL)
    with pytest.raises(PromptFailed, match="VAEDecode: The worker of rank 1 ended unexpectedly"):
        own.wait(prompt_id)
    check(own, decode_two, "cpu:2")
