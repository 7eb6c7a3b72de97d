"""MiniMax-H3 on 2 to 4 workers: sound and picture together, keyframes, references of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import on_devices
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, load, sample, text

from sp_core.demo.comfy_server import ComfyServer

#: 3 x 5 x 7 video tokens of 2 x 2 places, the last row and column padded; 22 audio and 7 text tokens: 134 in all
BOTH = "1,24,3,9,14;1,32,2,11"


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, ["tiny_minimax"])


@pytest.fixture(scope="module", params=on_devices())
def devices(request: pytest.FixtureRequest) -> str:
    return request.param


def words(branch: Branch) -> tuple[Link, Link]:
    return text(branch, 40)


def sampled(branch: Branch, conditioning: tuple[Link, Link], **changes: float) -> Link:
    return sample(branch, branch.patch(load(branch, "tiny_minimax")), conditioning, latent(branch, BOTH), **changes)


def text_to_video(branch: Branch) -> Link:
    return sampled(branch, words(branch))


def without_guidance(branch: Branch) -> Link:
    return sampled(branch, words(branch), cfg=1.0)


def conditioned(kind: str) -> Case:
    def case(branch: Branch) -> Link:
        made = [branch.add("SPTestMiniMaxConditions", conditioning=c, kind=kind, height=10, width=14)[0] for c in words(branch)]
        return sampled(branch, (made[0], made[1]))

    case.__name__ = kind
    return case


CASES: list[Case] = [text_to_video, without_guidance, conditioned("keyframes"), conditioned("references")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_stock(server: ComfyServer, devices: str, case: Case) -> None:
    if not server.get("/object_info/EmptyMiniMaxH3LatentAV"):
        pytest.skip("this ComfyUI has no MiniMax-H3")
    compare(server, case, devices, cfg_split=1)
