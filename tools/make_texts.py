"""Writes the texts that are made from the code: ``python tools/make_texts.py``.

Model names: ``title`` and ``covers`` of the sequence plans go into

* Markdown (README.md, docs, help pages): ``<!-- models -->list<!-- /models -->`` in a line, and
  ``<!-- models table -->``, the table, ``<!-- /models table -->`` on lines of their own;
* ``locales/*/nodeDefs.json``: the tooltip of SP Model Patch's model input, between its colon and its full stop.

Node packs: ``<!-- packs table -->`` in docs/patches.md, from the cases that ``tests/host/test_real_packs.py`` runs.

Classes of models: ``<!-- coverage table -->`` in docs/models.md, from a ComfyUI checkout (tools/model_coverage.py).

Node texts: ``locales/en/nodeDefs.json`` is what a running ComfyUI says of this extension's nodes, so
this part needs a ComfyUI checkout. Other languages are written by hand; what they lack is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sp_core.plans import PLANS, SequencePlan  # noqa: E402

PACK = "custom_nodes.sequence-parallel"
#: between two names of a list
_SEPARATORS = {"en": ", ", "zh": "、"}
_LIST = re.compile(r"(<!-- models -->).*?(<!-- /models -->)")
_TABLE = re.compile(r"(<!-- models table -->\n).*?(<!-- /models table -->)", re.DOTALL)
_COVERAGE = re.compile(r"(<!-- coverage table -->\n).*?(<!-- /coverage table -->)", re.DOTALL)
_PACKS = re.compile(r"(<!-- packs table -->\n).*?(<!-- /packs table -->)", re.DOTALL)
#: a sentence that ends in a list: "A video diffusion transformer: Wan, LTX."
_SENTENCE = re.compile(r"(.*?(?:: |：)).*([.。])", re.DOTALL)


# -- model names ---------------------------------------------------------------------------


def model_list(plans: Iterable[SequencePlan], language: str) -> str:
    """Names of all models. They are the same in every language; what stands between them is not."""
    return _SEPARATORS[language].join(plan.title for plan in plans)


def model_table(plans: Iterable[SequencePlan]) -> str:
    """README's table, one row a plan."""
    rows = [f"| {plan.title} | {plan.covers} | `{plan.architecture}` |" for plan in plans]
    return "\n".join(["| model | what works | ComfyUI's class |", "| --- | --- | --- |", *rows, ""])


def page(text: str, plans: Iterable[SequencePlan], language: str) -> str:
    """A Markdown page with the lists and tables between its markers made anew."""
    plans = list(plans)
    text = _LIST.sub(lambda found: f"{found[1]}{model_list(plans, language)}{found[2]}", text)
    return _TABLE.sub(lambda found: f"{found[1]}{model_table(plans)}{found[2]}", text)


def node_definitions(text: str, plans: Iterable[SequencePlan], language: str) -> str:
    """A ``nodeDefs.json`` with the models in SP Model Patch's tooltip made anew.

    Raises:
        ValueError: the tooltip is no sentence that ends in a list.
    """
    tree = json.loads(text)
    model = tree["SPModelPatch"]["inputs"]["model"]
    found = _SENTENCE.fullmatch(model["tooltip"])
    if found is None:
        raise ValueError(f"locales/{language}: the tooltip of SP Model Patch's model has no colon before the models or no full stop behind")
    model["tooltip"] = f"{found[1]}{model_list(plans, language)}{found[2]}"
    return _json(tree)


def texts(plans: Iterable[SequencePlan], root: Path = ROOT) -> dict[Path, str]:
    """Every file with names of models in it, and what it should say."""
    plans = list(plans)
    made: dict[Path, str] = {}
    for path in sorted([root / "README.md", *(root / "docs").rglob("*.md"), *(root / "web" / "docs").rglob("*.md")]):
        text = path.read_text()
        if "<!-- models" in text:
            made[path] = page(text, plans, path.stem if path.stem in _SEPARATORS else "en")
    for path in sorted((root / "locales").glob("*/nodeDefs.json")):
        made[path] = node_definitions(path.read_text(), plans, path.parent.name)
    return made


# -- node packs ----------------------------------------------------------------------------


def packs_page(root: Path = ROOT) -> tuple[Path, str]:
    """docs/patches.md with its table of node packs made anew."""
    sys.path.insert(0, str(ROOT / "tests"))
    from host.real_packs.rows import CASES
    from host.real_packs.table import table

    path = root / "docs" / "patches.md"
    return path, _PACKS.sub(lambda found: f"{found[1]}{table(CASES)}{found[2]}", path.read_text())


# -- classes of models ---------------------------------------------------------------------


def coverage_page(version: str, table: str, root: Path = ROOT) -> tuple[Path, str]:
    """docs/models.md with its table of a ComfyUI's classes made anew."""
    path = root / "docs" / "models.md"
    return path, _COVERAGE.sub(lambda found: f"{found[1]}ComfyUI {version}:\n\n{table}{found[2]}", path.read_text())


def coverage_of_the_host() -> list[tuple[Path, str]]:
    """The page as the ComfyUI that is found would have it; nothing where none is. In a process of its own, for ComfyUI is imported."""
    from sp_core.host_path import find_comfyui

    host = find_comfyui()
    if host is None:
        return []
    command = [sys.executable, str(ROOT / "tools" / "model_coverage.py"), str(host)]
    version, _, table = subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition("\n")
    return [coverage_page(version, table)]


# -- node texts ----------------------------------------------------------------------------


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


def write_node_texts() -> bool:
    """Ask a ComfyUI for the nodes' texts and write the English file. False where no ComfyUI is found."""
    from sp_core.demo.comfy_server import ComfyServer, prepare_base
    from sp_core.host_path import find_comfyui

    host = find_comfyui()
    if host is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        prepare_base(host, Path(folder))
        with ComfyServer(host, Path(folder), "--cpu") as server:
            english = definitions(server.get("/object_info"))
    path = ROOT / "locales" / "en" / "nodeDefs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(english))
    for other in sorted((ROOT / "locales").glob("*/nodeDefs.json")):
        theirs = _keys(json.loads(other.read_text()))
        for key in sorted(_keys(english) - theirs):
            print(f"{other.parent.name} lacks {key}")
        for key in sorted(theirs - _keys(english)):
            print(f"{other.parent.name} has {key}, which no node has")
    return True


def _json(tree: Any) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def _keys(tree: Any, path: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {path}
    return {key for name, value in tree.items() for key in _keys(value, f"{path}.{name}" if path else name)}


def main() -> int:
    if not write_node_texts():
        print("no ComfyUI checkout was found, so locales/en keeps its node texts: set COMFYUI_PATH to make them anew", file=sys.stderr)
    for path, text in [*texts(PLANS.values()).items(), packs_page(), *coverage_of_the_host()]:
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
