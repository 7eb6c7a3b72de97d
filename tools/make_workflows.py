"""Writes workflows/*.json and workflows/api/*.json from :mod:`workflow_graphs`: ``python tools/make_workflows.py``.

What inputs and outputs a node has, and in which order, comes from a running ComfyUI
(``COMFYUI_PATH``), which is started for it with this extension.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from workflow_graphs import MODELS, Graph, Node, Wire, all_graphs  # noqa: E402

from nodes import NODES  # noqa: E402
from sp_core.demo.comfy_server import ComfyServer, prepare_base  # noqa: E402
from sp_core.host_path import find_comfyui  # noqa: E402

_WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
_OURS = {row.node_id for row in NODES}
_NOTE_ID = 100


def inputs_of(info: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, type, options) of every input, in the frontend's order."""
    found = []
    for group in ("required", "optional"):
        for name, (kind, *options) in info["input"].get(group, {}).items():
            settings = options[0] if options else {}
            shown = "COMBO" if isinstance(kind, list) else settings.get("widgetType", kind)
            found.append((name, shown, {"list": kind, "optional": group == "optional", **settings}))
    return found


def is_widget(kind: str, options: dict[str, Any]) -> bool:
    return kind in _WIDGETS and not options.get("forceInput")


def is_left_out(node: Node, name: str, options: dict[str, Any]) -> bool:
    """An optional widget that the graph does not set keeps the node's default, whatever that will be."""
    return options["optional"] and name not in node.values


def value_of(node: Node, name: str, kind: str, options: dict[str, Any]) -> Any:
    if name in node.values:
        return node.values[name]
    if "default" in options:
        return options["default"]
    choices = options["options"] if "options" in options else options["list"]
    first = choices[0]
    return first["key"] if isinstance(first, dict) else first


def api_format(graph: Graph, catalogue: dict[str, Any]) -> dict[str, Any]:
    prompt = {}
    for node in graph.nodes:
        inputs: dict[str, Any] = {}
        for name, kind, options in inputs_of(catalogue[node.type]):
            value = node.values.get(name)
            if isinstance(value, Wire):
                inputs[name] = [str(value.node), value.output]
            elif is_widget(kind, options) and not is_left_out(node, name, options):
                inputs[name] = value_of(node, name, kind, options)
        unknown = set(node.values) - set(inputs)
        if unknown:
            raise KeyError(f"{node.type} has no input {', '.join(sorted(unknown))}")
        title = node.title or catalogue[node.type]["display_name"] or node.type
        prompt[str(node.id)] = {"inputs": inputs, "class_type": node.type, "_meta": {"title": title}}
    return prompt


def ui_format(graph: Graph, catalogue: dict[str, Any]) -> dict[str, Any]:
    links: list[list[Any]] = []
    nodes = [_node_entry(graph, order, links, catalogue) for order in range(len(graph.nodes))]
    for entry in nodes:
        info = catalogue[entry["type"]]
        entry["outputs"] = [
            {"name": name, "type": kind, "links": [link[0] for link in links if link[1:3] == [entry["id"], slot]]}
            for slot, (name, kind) in enumerate(zip(info["output_name"], info["output"], strict=True))
        ]
    nodes.append(_note_entry(graph, len(nodes)))
    groups = [
        {"id": number, "title": title, "bounding": list(box), "color": "#3f789e", "font_size": 24, "flags": {}}
        for number, (title, box) in enumerate(graph.groups, 1)
    ]
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, graph.name)),
        "revision": 0,
        "last_node_id": _NOTE_ID,
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {"ds": {"scale": 0.6, "offset": [530, 190]}},
        "version": 0.4,
    }


def _node_entry(graph: Graph, order: int, links: list[list[Any]], catalogue: dict[str, Any]) -> dict[str, Any]:
    """One node without its outputs; the wires that arrive at it are added to ``links``."""
    node = graph.nodes[order]
    sockets, values = _sockets_and_values(graph, node, links, catalogue)
    return {
        "id": node.id,
        "type": node.type,
        "pos": list(node.pos),
        "size": list(node.size or (270, 100)),
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": sockets,
        "outputs": [],
        **({"title": node.title} if node.title else {}),
        "properties": {"Node name for S&R": node.type, **_origin(node), **_files(node)},
        "widgets_values": values,
        **({"color": "#233", "bgcolor": "#355"} if node.type in _OURS else {}),
    }


def _sockets_and_values(graph: Graph, node: Node, links: list[list[Any]], catalogue: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The places where wires can arrive, and the values of the widgets."""
    types = {other.id: other.type for other in graph.nodes}
    sockets: list[Any] = []
    values: list[Any] = []
    for name, kind, options in inputs_of(catalogue[node.type]):
        value = node.values.get(name)
        if is_widget(kind, options):
            if is_left_out(node, name, options):
                continue
            values.append(value_of(node, name, kind, options))
            if options.get("control_after_generate"):
                values.append(node.after)
            continue
        link = None
        if isinstance(value, Wire):
            link = len(links) + 1
            links.append([link, value.node, value.output, node.id, len(sockets), catalogue[types[value.node]]["output"][value.output]])
        sockets.append({"name": name, "type": options["list"], "link": link})
    return sockets, values


def _note_entry(graph: Graph, order: int) -> dict[str, Any]:
    """The note that says what the workflow is."""
    return {
        "id": _NOTE_ID,
        "type": "MarkdownNote",
        "pos": [-420, 40],
        "size": [360, 330],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": "About",
        "properties": {},
        "widgets_values": [graph.note],
        "color": "#432",
        "bgcolor": "#653",
    }


def _origin(node: Node) -> dict[str, str]:
    return {"cnr_id": "sequence-parallel" if node.type in _OURS else "comfy-core"}


def _files(node: Node) -> dict[str, Any]:
    """What lets the frontend offer a download for a model file that is missing."""
    named = [value for value in node.values.values() if isinstance(value, str) and value in MODELS]
    models = [{"name": name, "url": f"{MODELS[name][1]}/{name}", "directory": MODELS[name][0]} for name in named]
    return {"models": models} if models else {}


def main() -> int:
    host = find_comfyui()
    if host is None:
        print("no ComfyUI checkout was found: set COMFYUI_PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        prepare_base(host, Path(folder))
        with ComfyServer(host, Path(folder), "--cpu") as server:
            catalogue = server.get("/object_info")
    (ROOT / "workflows" / "api").mkdir(parents=True, exist_ok=True)
    for graph in all_graphs():
        for path, content in (
            (ROOT / "workflows" / f"{graph.name}.json", ui_format(graph, catalogue)),
            (ROOT / "workflows" / "api" / f"{graph.name}.json", api_format(graph, catalogue)),
        ):
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
