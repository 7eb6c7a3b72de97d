"""Branches of one loader share the host's model object: what one of them patches must not be seen by another, in any order."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from campaign import parameters
from host.graphs import TOLERANCE, Branch, Graph, Link, latent, load, read, relative, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"

#: (node between the loader and SP Model Patch, does it compute on the workers)
PLAIN, SHIFTED, GUIDED = None, "ModelSamplingSD3", "SPTestCrossAttentionGuidance"
STATES = [(PLAIN, None), (SHIFTED, None), (PLAIN, DEVICES), (SHIFTED, DEVICES), (GUIDED, DEVICES)]


def picture(server: ComfyServer, patch: str | None, devices: str | None, seed: int) -> list:
    graph = Graph()
    branch = Branch(graph, devices)
    model = branch.patch(patched(branch, patch))
    samples = sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"), seed=seed)
    saved = branch.add("SPTestSaveLatent", samples=samples, name=f"sibling-{seed}-{devices}".replace(":", ""))
    return read(server.run(graph.prompt)[saved.id]).parts


def patched(branch: Branch, patch: str | None) -> Link:
    wire = load(branch, "tiny_wan_t2v")
    if patch is None:
        return wire
    return branch.add(patch, model=wire, **({"shift": 5.0} if patch == SHIFTED else {}))[0]


def every_pair(count: int) -> list[int]:
    """The shortest walk that goes from each of ``count`` states to each, itself among them."""
    left = set(product(range(count), repeat=2))
    # the highest state that is left, each time: this never ends in a state that has nowhere to go too early (Martin, 1934)
    walk = [0]
    while left:
        following = next(state for state in reversed(range(count)) if (walk[-1], state) in left)
        left.remove((walk[-1], following))
        walk.append(following)
    return walk


def test_the_walk_has_every_pair_once() -> None:
    walk = every_pair(len(STATES))
    assert len(walk) == len(STATES) ** 2 + 1
    assert set(pairwise(walk)) == set(product(range(len(STATES)), repeat=2))


@pytest.mark.parametrize(
    "states", parameters(plain=[[STATES[1], STATES[2], STATES[4]]], campaign=[(STATES,)]), ids=lambda states: str(len(states))
)
def test_every_order_of_two(server: ComfyServer, states: list[tuple[str | None, str | None]]) -> None:
    walk = every_pair(len(states))
    # a seed of its own makes the host compute each of them anew
    made = [picture(server, *states[state], seed=100 + turn) for turn, state in enumerate(walk)]
    wrong = []
    for turn, state in sorted(enumerate(walk), key=lambda item: item[1]):
        patch, devices = states[state]
        expected = picture(server, patch, None, seed=100 + turn)
        error = max(relative(mine, theirs) for mine, theirs in zip(made[turn], expected, strict=True))
        if error > TOLERANCE:
            wrong.append(f"{patch or 'plain'} on {devices or 'one device'} after {states[walk[turn - 1]]}: {error:.1e}")
    assert not wrong, "\n".join(wrong)


def test_the_patches_change_the_picture(server: ComfyServer) -> None:
    """Else the test above would show nothing."""
    plain, *others = (picture(server, patch, None, seed=99)[0] for patch in (PLAIN, SHIFTED, GUIDED))
    assert all(relative(other, plain) > 1e-3 for other in others)


def test_branches_in_one_prompt(server: ComfyServer) -> None:
    """A shifted and a plain one, and SP Model Patch behind the plain loader."""

    def second_of_two(branch: Branch) -> Link:
        model = branch.patch(load(branch, "tiny_wan_t2v"))
        words, start = text(branch, 4096), latent(branch, "1,16,3,10,14")
        shifted = sample(branch, patched(branch, SHIFTED), words, start, seed=41)
        return sample(branch, model, words, shifted, seed=42, denoise=0.6)

    stock = Graph()
    branch = Branch(stock)
    saved = branch.add("SPTestSaveLatent", samples=second_of_two(branch), name="second-of-two")
    expected = read(server.run(stock.prompt)[saved.id]).parts
    assert relative(run_sp(server, second_of_two, DEVICES).parts[0], expected[0]) <= TOLERANCE
