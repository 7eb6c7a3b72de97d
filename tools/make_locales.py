"""Writes locales/en/nodeDefs.json from the nodes' own texts: ``python tools/make_locales.py``.

Other languages are written by hand; what they lack is printed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sp_core.demo.comfy_server import ComfyServer, prepare_base  # noqa: E402
from sp_core.host_path import find_comfyui  # noqa: E402

PACK = "custom_nodes.sequence-parallel"


def definitions(catalogue: dict[str, Any]) -> dict[str, Any]:
    """``nodeDefs.json`` of this extension's nodes, as the frontend wants it."""
    found = {}
    for name, info in sorted(catalogue.items()):
        if info["python_module"] != PACK:
            continue
        inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        tooltips = info.get("output_tooltips") or [None] * len(info["output"])
        found[name] = {
            "display_name": info["display_name"],
            "description": info["description"],
            "inputs": {key: {"name": key, "tooltip": value[1]["tooltip"]} for key, value in inputs.items()},
            "outputs": {
                str(slot): {"name": output, **({"tooltip": tooltip} if tooltip else {})}
                for slot, (output, tooltip) in enumerate(zip(info["output_name"], tooltips, strict=True))
            },
        }
    return found


def keys(tree: Any, path: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {path}
    return {key for name, value in tree.items() for key in keys(value, f"{path}.{name}" if path else name)}


def main() -> int:
    host = find_comfyui()
    if host is None:
        print("no ComfyUI checkout was found: set COMFYUI_PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        prepare_base(host, Path(folder))
        with ComfyServer(host, Path(folder), "--cpu") as server:
            english = definitions(server.get("/object_info"))
    path = ROOT / "locales" / "en" / "nodeDefs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(english, indent=2, ensure_ascii=False) + "\n")
    for other in sorted((ROOT / "locales").glob("*/nodeDefs.json")):
        theirs = keys(json.loads(other.read_text()))
        for key in sorted(keys(english) - theirs):
            print(f"{other.parent.name} lacks {key}")
        for key in sorted(theirs - keys(english)):
            print(f"{other.parent.name} has {key}, which no node has")
    return 0


if __name__ == "__main__":
    sys.exit(main())
