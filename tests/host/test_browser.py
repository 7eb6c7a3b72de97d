"""The shipped workflows in the real frontend: every node is known and drawn, nothing complains."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from host.browser import Page, find_browser, open_page
from PIL import Image

from sp_core.demo.comfy_server import EXTENSION, ComfyServer, prepare_base

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no browser (Chromium) is installed")

WORKFLOWS = sorted((EXTENSION / "workflows").glob("*.json"))
#: background of SP nodes in the shipped workflows (#355)
SP_COLOUR = (0x33, 0x55, 0x55)
TWO_NODES = {"SPModelPatch", "SPSampler"}

_READY = "!!(window.app?.graph && window.LiteGraph)"
_OPEN = 'window.app.handleFile(new File([{text}], {name}, {{type: "application/json"}}))'
_UNKNOWN = "window.app.graph._nodes.filter(node => !LiteGraph.registered_node_types[node.type]).map(node => node.type)"
_COMPLAINTS = r"document.body.innerText.match(/[^\n]*(missing node|nodes? not found|errors? found|unknown node)[^\n]*/ig)"
# a node's middle of the bottom edge in pixels of the page: there is always background
_PLACES = """window.app.graph._nodes.filter(node => node.type.startsWith("SP")).map(node => {
    const [x, y] = window.app.canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] + node.size[1] - 4]);
    const canvas = window.app.canvas.canvas.getBoundingClientRect();
    return [node.type, x + canvas.left, y + canvas.top, (node.widgets || []).map(widget => widget.name)];
})"""


def model_files(node: dict[str, Any]) -> list[tuple[str, str]]:
    return [(model["directory"], model["name"]) for model in node.get("properties", {}).get("models", [])]


@pytest.fixture(scope="module")
def own_base(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty files under the names that the workflows use: what the frontend still complains about is the graph's own fault.

    In a base directory of its own: other modules ask what the host says when those files are missing.
    """
    base = tmp_path_factory.mktemp("browser")
    prepare_base(comfyui, base)
    for path in WORKFLOWS:
        for node in json.loads(path.read_text())["nodes"]:
            for folder, name in model_files(node):
                (base / "models" / folder).mkdir(parents=True, exist_ok=True)
                (base / "models" / folder / name).touch()
    return base


async def settled(page: Page, expression: str) -> Any:
    """The value once it has stayed the same for a second."""
    value = await page.evaluate(expression)
    for _ in range(30):
        await asyncio.sleep(1)
        before, value = value, await page.evaluate(expression)
        if before == value:
            break
    return value


async def look(server: ComfyServer, profile: Path, pictures: Path) -> dict[str, dict[str, Any]]:
    seen = {}
    async with open_page(find_browser() or "", profile, f"http://127.0.0.1:{server.port}/", 1900, 1000) as page:
        await page.wait_for(_READY, timeout=120)
        for path in WORKFLOWS:
            expected = len(json.loads(path.read_text())["nodes"])
            await page.evaluate(_OPEN.format(text=json.dumps(path.read_text()), name=json.dumps(path.name)))
            await page.wait_for(f"window.app.graph._nodes.length === {expected}")
            complaints = await settled(page, _COMPLAINTS)
            picture = pictures / f"{path.stem}.png"
            await page.screenshot(picture)
            seen[path.stem] = {
                "unknown": await page.evaluate(_UNKNOWN),
                "complaints": complaints,
                "places": await page.evaluate(_PLACES),
                "pixels": Image.open(io.BytesIO(picture.read_bytes())).convert("RGB"),
            }
        assert page.console == []
    return seen


def test_every_shipped_workflow_opens_and_draws(own: ComfyServer, tmp_path: Path) -> None:
    profile, pictures = tmp_path / "profile", tmp_path / "pictures"
    pictures.mkdir()
    # a new user is shown the templates first
    own.post("/settings/Comfy.TutorialCompleted", True)
    seen = asyncio.run(look(own, profile, pictures))
    print(f"\npictures: {pictures}")
    drawn = set()
    for name, view in seen.items():
        assert view["unknown"] == [], f"{name}: nodes that the frontend does not know"
        assert view["complaints"] is None, f"{name}: the frontend complains"
        assert view["places"], f"{name} has no SP node"
        for node, x, y, widgets in view["places"]:
            if node in TWO_NODES:
                assert "devices" in widgets, f"{name}: {node} shows no devices"
            colour = view["pixels"].getpixel((round(x), round(y)))
            distance = max(abs(a - b) for a, b in zip(colour, SP_COLOUR, strict=True))
            assert distance < 24, f"{name}: {node} is not drawn at {x:.0f}, {y:.0f}, there is {colour}"
            drawn.add(node)
    assert drawn >= TWO_NODES
