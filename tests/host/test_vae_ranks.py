"""Every VAE that has a decode plan, decode and encode over ranks against one process: odd heights, one frame, fewer rows than ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.band_nets import one_row_short, own_statistics, padded_at_the_cuts
from distributed.ranks import RankPool
from host.graphs import TOLERANCE
from host.vaes import VAES, chunks_of_its_own, serve

from sp_core.planner.decode_cost import Video, WanDecoder, halo_bytes

CASES = [
    (name, method, size, frames[method == "encode"])
    for name, vae in VAES.items()
    for method in ("decode", "encode")
    for size in (2, 3, 4)
    for frames in vae.frames
]
#: of their cases, the plain run has those on three ranks of several frames
SELDOM = ("Mochi", "Cosmos", "SeedVR2")
CAMPAIGN = [case for case in CASES if case[0] in SELDOM and (case[2] != 3 or case[3] == 1)]
PLAIN = [case for case in CASES if case not in CAMPAIGN]


@pytest.fixture(scope="module")
def ranks(comfyui: Path) -> Iterator[RankPool]:
    with RankPool(4, functools.partial(serve, str(comfyui))) as pool:
        yield pool


@pytest.fixture(autouse=True)
def in_this_host(request: pytest.FixtureRequest, comfyui: Path) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name and not (comfyui / f"{VAES[name].module.replace('.', '/')}.py").exists():
        pytest.skip(f"this ComfyUI has no {VAES[name].module}")


def answers(ranks: RankPool, *case: Any) -> list[dict[str, Any]]:
    found = [answer for answer in ranks.call(*case, timeout=300) if answer is not None]
    failures = [answer["failure"] for answer in found if "failure" in answer]
    assert not failures, failures[0]
    return [answer for answer in found if "idle" not in answer]


@pytest.mark.parametrize(("name", "method", "size", "frames"), parameters(plain=PLAIN, campaign=CAMPAIGN))
def test_same_as_one_process(ranks: RankPool, name: str, method: str, size: int, frames: int) -> None:
    for height in VAES[name].heights:
        found = answers(ranks, name, method, height, frames, size)
        assert len(found) == min(size, height)
        assert found[0]["alive"] > 1e-2, "the stock picture is empty: the case compares nothing"
        errors = [answer["error"] for answer in found]
        cuts = [answer["at cuts"] for answer in found]
        print(f"\n{name} {method}, {height} rows, {frames} frames on {size}: {max(errors):.1e}, at the cuts {max(cuts):.1e}")
        assert max(errors) <= TOLERANCE
        assert max(cuts) <= 2 * TOLERANCE, "a seam"
        assert height == 1 or all(answer["messages"] for answer in found)


def test_bytes_are_those_of_the_formula(ranks: RankPool, comfyui: Path) -> None:
    """That of the planner, for Wan 2.1: the rank in the middle sends twice as much as those at the borders."""
    if "1 + z.shape[2] // 2" not in (comfyui / "comfy" / "ldm" / "wan" / "vae.py").read_text():
        pytest.skip("this ComfyUI's VAE of Wan decodes another number of frames a call")
    for frames in (1, 3, 4):
        sent = [answer["bytes"] for answer in answers(ranks, "Wan 2.1", "decode", 7, frames, 3)]
        halo = halo_bytes(WanDecoder(8, (1, 2, 4, 4), 1, 4, 2), Video(frames, 7, 3), 4)
        assert sent == [halo, 2 * halo, halo]


#: torch has no pooling in bfloat16 for CPUs, which Cosmos' encoder needs
IN_BFLOAT16 = [(name, method) for name in VAES for method in ("decode", "encode") if (name, method) != ("Cosmos", "encode")]


@pytest.mark.parametrize(("name", "method"), parameters(plain=IN_BFLOAT16[:1], campaign=IN_BFLOAT16[1:]))
def test_in_bfloat16_bands_are_as_near_to_float32_as_one_device_is(ranks: RankPool, name: str, method: str) -> None:
    found = answers(ranks, name, method, 7, VAES[name].frames[-1][method == "encode"], 3, contextlib.nullcontext, torch.bfloat16)
    ours, one = (max(answer[part] for answer in found) for part in ("error", "one device"))
    print(f"\n{name} {method} in bfloat16, from float32: {ours:.2e} in bands, {one:.2e} on one device")
    assert one > 1e-4, "the case compares nothing"
    assert ours <= 1.1 * one


BOTH = ("decode", "encode")
SHORT = [(name, one_row_short, method) for name in VAES for method in BOTH]
#: VAEs whose group norms have statistics of the whole frame, and those whose decoder's convolutions pad by themselves alone
NORMED = ("HunyuanVideo", "CogVideoX", "Mochi", "Cosmos", "SeedVR2")
PADDING = ("Wan 2.1", "Wan 2.2", "LTX-Video", "Mochi", "SeedVR2")
FAULTS = [(name, own_statistics, method) for name in NORMED for method in BOTH] + [(name, padded_at_the_cuts, "decode") for name in PADDING]


@pytest.mark.parametrize(("name", "fault", "method"), parameters(plain=SHORT, campaign=FAULTS))
def test_a_fault_is_noticed(ranks: RankPool, name: str, fault: Any, method: str) -> None:
    found = answers(ranks, name, method, 7, VAES[name].frames[-1][method == "encode"], 2, fault)
    assert max(answer["error"] for answer in found) > 1e-3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("method", "frames"), [("decode", 5), ("encode", 17)])
def test_ranks_with_other_free_memory_cut_the_frames_alike(ranks: RankPool, method: str, frames: int, size: int) -> None:
    found = answers(ranks, "LTX-Video", method, 7, frames, size, chunks_of_its_own)
    assert len(found) == size
    assert max(answer["error"] for answer in found) <= TOLERANCE
    assert len({answer["messages"] for answer in found}) == 1, "ranks waited for each other a different number of times"
    whole = answers(ranks, "LTX-Video", method, 7, frames, size)
    assert found[0]["messages"] > whole[0]["messages"], "the frames were not cut: the case shows nothing"
    # one device's chunks are those of rank 0, which has least memory; a chunk of more frames would take a worker above its share
    assert found[0]["convolutions"] == found[0]["convolutions on one device"]
