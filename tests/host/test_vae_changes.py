"""What a node changes deep in a VAE: behind SP VAE Patch it is refused by its place, before it the workers have it, or it is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from host.graphs import TOLERANCE, Branch, Graph, Link, latent, relative
from host.test_vae import SHAPE, both, write_vaes

from sp_core.demo.comfy_server import ComfyServer, PromptFailed


@pytest.fixture(scope="module")
def own(comfyui: Path, base: Path) -> Iterator[ComfyServer]:
    write_vaes(comfyui, base)
    with ComfyServer(comfyui, base, "--cpu") as server:
        yield server


def load(server: ComfyServer, branch: Branch, name: str) -> Link:
    """The same weights under another name: ComfyUI makes a module of its own of them, which no other test shares."""
    folder = server.base / "models" / "vae"
    shutil.copy(folder / "tiny_wan21_vae.safetensors", folder / f"{name}.safetensors")
    return branch.add("VAELoader", vae_name=f"{name}.safetensors")[0]


def decoded(branch: Branch, vae: Link) -> Link:
    samples = latent(branch, SHAPE, scale=1.0, seed=5)
    return branch.add("SPTestPixels", image=branch.add("VAEDecode", samples=samples, vae=vae)[0])[0]


def refusal(server: ComfyServer, how: str, behind: bool) -> str:
    branch = Branch(Graph(), "cpu:2")
    vae = load(server, branch, f"changed_{how.replace(' ', '_')}")
    for node in ("SPVAEPatch", "SPForeignVae") if behind else ("SPForeignVae", "SPVAEPatch"):
        vae = branch.add(node, vae=vae, **({"devices": "cpu:2"} if node == "SPVAEPatch" else {"how": how}))[0]
    branch.add("SPTestSaveLatent", samples=decoded(branch, vae), name="changed")
    with pytest.raises(PromptFailed) as caught:
        server.run(branch.graph.prompt)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("padding", "padding_mode was changed from 'zeros' to 'reflect'"),
        ("number", "The VAE's decoder.head.0.scale was changed from "),
        ("forward", "The VAE's decoder.conv1.forward was replaced"),
        ("hook", "The VAE's decoder.forward was replaced"),
        ("weights", "The VAE's decoder.conv1.weight was written in place"),
    ],
)
def test_behind_our_node_it_is_refused(own: ComfyServer, how: str, says: str) -> None:
    message = refusal(own, how, behind=True)
    assert says in message, message
    assert "which has no effect on the workers. Place SP VAE Patch after the node that changes it" in message
    assert "SPForeignVae (node" in message


def test_before_our_node_the_workers_have_it(own: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        vae = branch.add("SPForeignVae", vae=load(own, branch, "changed_before"), how="number")[0]
        return decoded(branch, vae if branch.devices is None else branch.add("SPVAEPatch", vae=vae, devices=branch.devices)[0])

    def plain(branch: Branch) -> Link:
        return decoded(branch, load(own, branch, "unchanged"))

    stock, mine = both(own, case, "cpu:2")
    assert relative(mine.parts[0], stock.parts[0]) <= TOLERANCE
    assert relative(both(own, plain, "cpu:2")[0].parts[0], stock.parts[0]) > 1e-3, "the node changed nothing"


def test_a_vae_that_is_another_one_in_the_workers_is_not_used(own: ComfyServer) -> None:
    message = refusal(own, "in workers", behind=False)
    assert "made another VAE in the worker of ranks 0, 1 than elsewhere: its decoder.head.0.scale is another one" in message, message
    assert "SPForeignVae (node" in message
