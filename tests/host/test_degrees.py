"""All parallel degrees and layouts against the stock sampler: Ulysses, ring, their product, each in CFG halves, flat and in tiles."""

from __future__ import annotations

import re
from typing import Any

import pytest
from host.graphs import TOLERANCE, Branch, Case, Graph, Link, compare, latent, load, read, relative, sample, text

from sp_core.demo.comfy_server import ComfyServer
from sp_core.planner.degrees import Degrees

DEVICES = "cpu:4"


def wan(branch: Branch) -> Link:
    """165 tokens, 3 heads: fewer heads than ranks from four on."""
    return sample(branch, branch.patch(load(branch, "tiny_wan_t2v")), text(branch, 4096), latent(branch, "1,16,3,10,22"))


def wan_per_frame(branch: Branch) -> Link:
    """Wan 2.2 5B with a given first frame: every frame has a timestep of its own."""
    start = latent(branch, "1,48,3,10,22", scale=1.0, mask="first_frame")
    return sample(branch, branch.patch(load(branch, "tiny_wan22_5b")), text(branch, 4096), start)


def ltxav(branch: Branch) -> Link:
    """165 video tokens, 4 heads, 9 audio tokens."""
    return sample(branch, branch.patch(load(branch, "tiny_ltxav")), text(branch, 96), latent(branch, "1,128,3,5,11;1,8,9,16"))


def requests(count: int) -> dict[str, dict[str, Any]]:
    """Inputs of SP Model Patch that ask for each way to use ``count`` devices."""
    found: dict[str, dict[str, Any]] = {
        "automatic": {},
        "Ulysses": {"cfg_split": 1, "ring": 1},
        "ring": {"cfg_split": 1, "ring": count},
        "Ulysses, tiles": {"cfg_split": 1, "ring": 1, "layout": "tiles"},
        "ring, tiles": {"cfg_split": 1, "ring": count, "layout": "tiles"},
        "Ulysses, flat": {"cfg_split": 1, "ring": 1, "layout": "flat"},
    }
    if count % 2 == 0:
        found["CFG x Ulysses"] = {"cfg_split": 2, "ring": 1}
        found["CFG x ring"] = {"cfg_split": 2, "ring": count // 2}
    if count in (4, 6, 8):
        found["ring x Ulysses"] = {"cfg_split": 1, "ring": 2}
    if count % 2 == 0 and count > 2:
        found["CFG x Ulysses, tiles"] = {"cfg_split": 2, "ring": 1, "layout": "tiles"}
    if count == 8:
        found["ring 4 x Ulysses"] = {"cfg_split": 1, "ring": 4}
        found["CFG x ring x Ulysses, tiles"] = {"cfg_split": 2, "ring": 2, "layout": "tiles"}
    return found


def expected_words(count: int, requested: dict[str, Any]) -> str:
    """How the report names what was requested; "" where nothing was."""
    if not requested:
        return ""
    cfg, ring = requested["cfg_split"], requested["ring"]
    words = f"{count} devices: {Degrees(cfg, ring, count // cfg // ring).describe()}, "
    return words + requested.get("layout", "")


def every_case(count: int) -> list[Any]:
    return [(count, case, name) for case in (wan, wan_per_frame, ltxav) for name in requests(count)]


def is_plain(count: int, case: Case, name: str) -> bool:
    """Of three devices nothing divides, and four have every request that there is up to eight. Not all models get all of these."""
    some = ("automatic", "ring, tiles", "Ulysses, flat") if count == 3 else ("ring x Ulysses", "CFG x ring", "CFG x Ulysses, tiles")
    return count in (3, 4) and (case is wan or name in some)


EVERY = [case for count in (3, 4, 2, 5, 6, 8) for case in every_case(count)]


@pytest.mark.parametrize(
    ("count", "case", "name"),
    [
        pytest.param(*case, id=f"cpu:{case[0]}-{case[1].__name__}-{case[2]}", marks=() if is_plain(*case) else pytest.mark.campaign)
        for case in EVERY
    ],
)
def test_every_request_gives_the_stock_picture(server: ComfyServer, count: int, case: Case, name: str) -> None:
    requested = requests(count)[name]
    made = compare(server, case, f"cpu:{count}", **requested)
    assert [part.shape for part in made.sp.parts] == [part.shape for part in made.stock.parts], "the size depends on the devices"
    assert expected_words(count, requested) in made.sp.report, made.sp.report


def test_a_second_stage_without_guidance_uses_all_devices_for_the_sequence(server):
    """Two samplers behind one SP Model Patch, CFG above 1 and then 1: the degrees change from run to run."""

    def two_stages(branch: Branch) -> Link:
        model = branch.patch(load(branch, "tiny_wan_t2v"))
        first = sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,22"), steps=2)
        return sample(branch, model, text(branch, 4096), first, steps=2, denoise=0.5, cfg=1.0)

    before, graph = len(server.log()), Graph()
    plain, shared = Branch(graph), Branch(graph, "cpu:4")
    nodes = [
        branch.add("SPTestSaveLatent", samples=two_stages(branch), name=f"two-stages-{i}", **extra()).id
        for i, (branch, extra) in enumerate(((plain, dict), (shared, lambda: {"model": shared.patched[-1]})))
    ]
    outputs = server.run(graph.prompt)
    stock, sp = (read(outputs[node]) for node in nodes)
    assert relative(sp.parts[0], stock.parts[0]) <= TOLERANCE
    lines = [line for line in server.log(before).splitlines() if "SP: 4 devices: " in line]
    assert any("CFG 2 x " in line for line in lines), lines
    # three heads: a ring of two, so that no rank is without one
    assert "4 devices: ring 2 x Ulysses 2" in sp.report, sp.report


@pytest.mark.parametrize(
    ("requested", "message"),
    [({"ring": 3}, "ring 3 cannot be laid over 4 devices. Nearest possible: "), ({"cfg_split": 2, "ulysses": 3}, "cannot be laid over 4")],
)
def test_impossible_requests_are_refused_when_the_prompt_is_validated(server, requested, message):
    from sp_core.demo.comfy_server import PromptFailed

    graph = Graph()
    branch = Branch(graph, "cpu:4", requested)
    branch.add("SPTestSaveLatent", samples=wan(branch), name="never")
    with pytest.raises(PromptFailed, match=message):
        server.queue(graph.prompt)


def test_a_ring_refuses_what_needs_its_own_attention(server):
    """An attention function of another node gives no log-sum-exp, so its partial results cannot be merged."""
    from sp_core.demo.comfy_server import PromptFailed

    def overridden(branch: Branch) -> Link:
        model = branch.add("SPTestAttentionOverride", model=load(branch, "tiny_wan_t2v"))[0]
        return sample(branch, branch.patch(model), text(branch, 4096), latent(branch, "1,16,3,10,22"))

    graph = Graph()
    branch = Branch(graph, "cpu:4", {"ring": 2})
    branch.add("SPTestSaveLatent", samples=overridden(branch), name="never")
    with pytest.raises(PromptFailed, match="Ring attention cannot use an attention function that another node installed"):
        server.run(graph.prompt)


@pytest.mark.parametrize("cfg", [6.0, 1.0])
def test_ranks_that_stay_idle_in_some_steps(server, cfg):
    """As on GPUs: where more devices would be slower, some do nothing; the next step may want them again."""

    def over(link: str) -> Case:
        def case(branch: Branch) -> Link:
            model = branch.patch(branch.add(link, model=load(branch, "tiny_wan_t2v"), number=int(cfg))[0])
            return sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,22"), steps=5, cfg=cfg)

        return case

    before = len(server.log())
    compare(server, over("SPTestUnsteadyLink"), "cpu:4")
    lines = [line for line in server.log(before).splitlines() if "SP: 4 devices: " in line]
    idle = {int(count) for line in lines for count in re.findall(r"(\d) idle", line)}
    assert idle >= {2 if cfg > 1 else 3}, lines
    assert any("idle" not in line for line in lines), lines
    # and the workers are as they were
    assert "idle" not in compare(server, over("SPTestSteadyLink"), "cpu:4").sp.report
