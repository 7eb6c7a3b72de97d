"""What ships beside the code, on a bare host: API workflows, help pages, translations, the demo."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sp_core.demo import run as demo
from sp_core.demo.comfy_server import EXTENSION, ComfyServer, PromptFailed

API = sorted((EXTENSION / "workflows" / "api").glob("*.json"))
PACK = "sequence-parallel"


def fetch(server: ComfyServer, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as response:
        return response.read().decode()


#: ComfyUI brings this picture along in its own input folder, and the server of these tests has another. The video and the speeches
#: are the user's own
INPUTS = (
    "image - Invalid image file: example.png",
    "file - Invalid video file: longcat_480p.mp4",
    "audio - Invalid audio file: speech.wav",
    "audio - Invalid audio file: speech_2.wav",
)


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_a_workflow_lacks_nothing_but_model_files(server: ComfyServer, path: Path) -> None:
    """Posted as the README's curl line does; the host answers with every input that it cannot accept."""
    with pytest.raises(PromptFailed) as refused:
        server.queue(json.loads(path.read_text()))
    errors = [error for node in refused.value.details["node_errors"].values() for error in node["errors"]]
    assert errors
    for error in errors:
        if error["details"] in INPUTS:
            continue
        assert error["type"] == "value_not_in_list", error
        assert error["extra_info"]["received_value"].endswith(".safetensors"), error


def test_every_loader_complains(server: ComfyServer) -> None:
    """The test above would pass if the host looked at one node only."""
    prompt = json.loads((EXTENSION / "workflows" / "api" / "wan2.2_14B_t2v.json").read_text())
    with pytest.raises(PromptFailed) as refused:
        server.queue(prompt)
    loaders = {key for key, node in prompt.items() if node["class_type"].endswith("Loader")}
    assert set(refused.value.details["node_errors"]) == loaders


def test_the_host_lists_the_workflows(server: ComfyServer) -> None:
    assert set(server.get("/workflow_templates")[PACK]) == {path.stem for path in API}


@pytest.mark.parametrize("page", sorted(path.relative_to(EXTENSION / "web") for path in (EXTENSION / "web").rglob("*.md")), ids=str)
def test_the_host_serves_the_help_pages(server: ComfyServer, page: Path) -> None:
    assert fetch(server, f"/extensions/{PACK}/{page.as_posix()}") == (EXTENSION / "web" / page).read_text()


def test_texts_are_those_of_the_nodes(server: ComfyServer) -> None:
    """English texts are made from the nodes; other languages name the same inputs."""
    translations = server.get("/i18n")
    catalogue = server.get("/object_info")
    ours = {name: info for name, info in catalogue.items() if info["python_module"] == f"custom_nodes.{PACK}"}
    assert set(ours) >= {"SPModelPatch", "SPSampler"}
    for name, info in ours.items():
        inputs: dict[str, Any] = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        english = translations["en"]["nodeDefs"][name]
        assert english["description"] == info["description"], "run tools/make_texts.py"
        tooltips = {key: value[1]["tooltip"] for key, value in inputs.items()}
        assert {key: text["tooltip"] for key, text in english["inputs"].items()} == tooltips, "run tools/make_texts.py"
    assert translations["zh"]["nodeDefs"]["SPModelPatch"]["display_name"] == "SP 模型补丁"


def test_the_demo_on_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--devices", "cpu:2"]) == 0
    shown = capsys.readouterr().out
    assert "started headless" in shown
    assert "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors -> tiny_wan_t2v.safetensors" in shown
    assert "DIFFERS" not in shown
