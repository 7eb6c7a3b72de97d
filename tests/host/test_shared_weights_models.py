"""Shared weights of more models and forms of weights, on 2 to 6 ranks: stock's picture in fp32, else the bits of whole weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from host import quantised
from host.boundary import base_beside
from host.family_checkpoints import write_families
from host.graphs import Branch, Case, Link, compare, latent, run_sp, sample, text
from host.real_packs.trial import environment, link_packs, packs_folder, write_files
from host.test_hunyuan import text_to_video as hunyuan
from host.test_longcat_server import files as longcat_files  # noqa: F401 (a fixture)
from host.test_longcat_server import text_to_video as longcat
from host.test_shared_weights import is_shared, ltxav, two_loras, unchanged, wan, with_lora

from sp_core.demo.comfy_server import ComfyServer

pytestmark = pytest.mark.campaign

FOLDER = packs_folder()
RANKS = ("cpu:2", "cpu:3", "cpu:4", "cpu:6")
MODELS = {"wan": wan(change=two_loras), "ltxav": ltxav, "longcat": longcat, "hunyuan": hunyuan}


@pytest.fixture(scope="module", autouse=True)
def checkpoints(comfyui: Path, base: Path) -> None:
    write_families(comfyui, base, ["tiny_hunyuan", "tiny_hunyuan_i2v", "tiny_hunyuan15"])
    script, folder = Path(quantised.__file__), base / "models" / "diffusion_models"
    subprocess.run([sys.executable, str(script), str(comfyui), str(folder)], check=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", RANKS)
def test_the_picture_is_that_of_one_device(server: ComfyServer, devices: str, name: str) -> None:
    is_shared(compare(server, MODELS[name], devices, weights="shared").sp.report, devices)


def same_bits(server: ComfyServer, case: Case, devices: str) -> None:
    """As whole weights, on as many ranks."""
    shared, whole = (run_sp(server, case, devices, weights=weights) for weights in ("shared", "whole"))
    is_shared(shared.report, devices)
    assert "; whole:" not in shared.report, shared.report
    assert shared.parts[0].std() > 1e-3 and torch.equal(shared.parts[0], whole.parts[0])


@pytest.mark.parametrize("change", [unchanged, two_loras], ids=lambda change: change.__name__)
@pytest.mark.parametrize("form", [*quantised.FORMATS, quantised.BF16])
@pytest.mark.parametrize("devices", RANKS)
def test_other_forms_give_the_bits_of_whole_weights(
    server: ComfyServer, devices: str, form: str, change: Callable[[Branch, Link], Link]
) -> None:
    same_bits(server, wan(quantised.file_name(form), change), devices)


# -- GGUF, by the pack's own loader


@pytest.fixture(scope="module")
def with_packs(comfyui: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    if FOLDER is None:
        pytest.skip("no checked out node packs: set SP_PACKS to run the cases with real packs")
    folder = base_beside(base, tmp_path_factory.mktemp("packs"))
    link_packs(FOLDER, folder)
    write_files(FOLDER, base / "models")
    with ComfyServer(comfyui, folder, "--cpu", environment={"SP_VERIFY_RANKS": "1", **environment(FOLDER)}) as server:
        yield server


def gguf(file: str, change: Callable[[Branch, Link], Link]) -> Case:
    def case(branch: Branch) -> Link:
        model = branch.patch(change(branch, branch.add("UnetLoaderGGUF", unet_name=f"{file}.gguf")[0]))
        return sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"))

    case.__name__ = f"{file}-{change.__name__}"
    return case


@pytest.mark.parametrize("change", [unchanged, with_lora, two_loras], ids=lambda change: change.__name__)
@pytest.mark.parametrize("file", ["tiny_wan_q8", "tiny_wan_q4"])
@pytest.mark.parametrize("devices", ["cpu:2", "cpu:3"])
def test_gguf_gives_the_bits_of_whole_weights(
    with_packs: ComfyServer, devices: str, file: str, change: Callable[[Branch, Link], Link]
) -> None:
    same_bits(with_packs, gguf(file, change), devices)
