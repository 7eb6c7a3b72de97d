"""Runs cases with real packs on one server: stock without the node, stock with it, and with SP Model Patch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host.boundary import copy_checkpoint
from host.graphs import Branch, Graph, Result, read, relative
from host.longcat_files import write_avatar
from host.real_packs.cases import BEFORE, BEHIND, FAILS, MODELS, PACKS, REFUSED, SAME, Case, Setting, complete

from sp_core.demo.comfy_server import ComfyServer, PromptFailed
from sp_core.host_path import find_comfyui

HERE = Path(__file__).resolve().parent
#: exact stand-ins for kernels that need a GPU, and what the packs need beside ComfyUI (``pip install --target``)
STAND_INS, REQUIREMENTS = HERE / "stand_ins", "site"
WRONG, UNCLEAR = "WRONG", "refused, unclear"


def packs_folder() -> Path | None:
    """The folder of checked out packs: $SP_PACKS, else ``packs`` beside the ComfyUI checkout; None where there is none."""
    comfyui, named = find_comfyui(), os.environ.get("SP_PACKS")
    folder = Path(named).expanduser() if named else comfyui.parent / "packs" if comfyui else None
    return folder if folder and folder.is_dir() else None


def link_packs(folder: Path, base: Path) -> None:
    for pack in PACKS:
        if (folder / pack.folder).is_dir():
            (base / "custom_nodes" / pack.folder).symlink_to(folder / pack.folder, target_is_directory=True)


def environment(folder: Path) -> dict[str, str]:
    """Of the server, which its workers inherit."""
    return {"PYTHONPATH": os.pathsep.join([str(STAND_INS), str(folder / REQUIREMENTS)])}


def write_files(folder: Path, models: Path) -> None:
    """Quantised files and whole checkpoints of the tiny models, in a process that has the packs' requirements."""
    write_avatar(models)
    script = HERE / "files.py"
    subprocess.run([sys.executable, str(script), str(models)], check=True, env={**os.environ, **environment(folder)})


@dataclass(frozen=True)
class Outcome:
    """``error`` and ``effect``: relative L2 from stock with the node, and of that from stock without it."""

    verdict: str
    error: float | None = None
    effect: float | None = None
    sentence: str = ""

    def __str__(self) -> str:
        numbers = [f"{name} {value:.2g}" for name, value in (("error", self.error), ("effect", self.effect)) if value is not None]
        return " ".join([self.verdict, *numbers, self.sentence])


class Trial:
    """All cases of a session. What stock gives is kept."""

    def __init__(self, server: ComfyServer) -> None:
        self.server = server
        self._info: dict[str, Any] = {}
        self._stock: dict[Any, Result | PromptFailed] = {}

    def run(self, case: Case, side: str, setting: Setting) -> Outcome:
        stock = self.stock(case, side, setting.cfg)
        sentence, mine = "", None
        try:
            mine = self._sampled(case, side, setting)
        except PromptFailed as error:
            sentence = str(error)
        if isinstance(stock, PromptFailed):
            if mine is not None or sentence == str(stock):
                return Outcome(FAILS if mine is None else WRONG, sentence=str(stock))
            return Outcome(REFUSED if self.is_clear(case, sentence) else FAILS, sentence=f"{sentence} | stock: {stock}")
        effect = self.effect(case, setting.cfg, stock)
        if mine is None:
            return Outcome(REFUSED if self.is_clear(case, sentence) else UNCLEAR, effect=effect, sentence=sentence)
        computed = case.report or f"on {setting.devices.removeprefix('cpu:')} devices"
        assert computed in mine.report, f"nothing was shared out: {mine.report}"
        error = distance(mine, stock)
        return Outcome(SAME if error <= case.tolerance else WRONG, error, effect, mine.report.replace("\n", " / "))

    def stock(self, case: Case, side: str | None, cfg: float) -> Result | PromptFailed:
        # on either side of nothing the graph is the same
        side = side and (BEFORE if case.before else BEHIND) if not case.plain_stock else None
        key = (case.id, side, cfg) if side else (case.checkpoint, cfg, case.steps, case.mask)
        if key not in self._stock:
            try:
                self._stock[key] = self._sampled(case, side, Setting("", cfg))
            except PromptFailed as error:
                self._stock[key] = error
        return self._stock[key]

    def effect(self, case: Case, cfg: float, with_node: Result) -> float:
        plain = self.stock(case, None, cfg)
        assert isinstance(plain, Result), plain
        same_shapes = [p.shape for p in plain.parts] == [p.shape for p in with_node.parts]
        return distance(with_node, plain) if same_shapes else 1.0

    def _sampled(self, case: Case, side: str | None, setting: Setting) -> Result:
        copy_checkpoint(self.server, case.checkpoint, MODELS[case.model].checkpoint)
        branch = Branch(Graph(), setting.devices or None, dict(setting.requested))
        samples = case.build(branch, side, setting.cfg)
        extra: dict[str, Any] = {"model": branch.patched[-1]} if branch.patched else {}
        name = re.sub(r"\W+", "-", f"{case.id}-{side}-{setting.name}")
        saved = branch.add("SPTestSaveLatent", samples=samples, name=name, **extra)
        complete(branch.graph.prompt, self._node)
        return read(self.server.run(branch.graph.prompt)[saved.id])

    def _node(self, class_type: str) -> Any:
        if class_type not in self._info:
            found = self.server.get(f"/object_info/{class_type.replace(' ', '%20')}")
            if class_type not in found:
                raise PromptFailed(f"no node {class_type}: its pack did not load")
            self._info[class_type] = found[class_type]
        return self._info[class_type]

    def title(self, class_type: str) -> str:
        return str(self._node(class_type).get("display_name") or class_type)

    def is_clear(self, case: Case, sentence: str) -> bool:
        """It names the node or its pack, and a way out that exists."""
        names = [case.node, self.title(case.node), case.pack, *([case.code] if case.code else [])]
        ways = r"[Rr]emove|Place SP Model Patch|[Uu]se |EasyCache"
        impossible = r"Place SP Model Patch (after|behind) (KSampler|SamplerCustom|.*Guider)"
        named = any(name in sentence for name in names)
        return bool(named and re.search(ways, sentence) and re.search(case.sentence, sentence) and not re.search(impossible, sentence))


def distance(mine: Result, theirs: Result) -> float:
    assert [part.shape for part in mine.parts] == [part.shape for part in theirs.parts]
    for part in theirs.parts:
        assert part.isfinite().all() and part.std() > 1e-3, "the stock picture is empty: the case compares nothing"
    return max(relative(a, b) for a, b in zip(mine.parts, theirs.parts, strict=True))


def keep(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def chosen(cases: Iterable[Case], has: Callable[[str], bool]) -> list[tuple[Case, str, Setting]]:
    """Those of equal devices one after another, as workers are started once for all of them."""
    rows = [(case, side, setting) for case in cases if has(case.pack) for setting in case.settings for side in sides(case)]
    return sorted(rows, key=lambda row: row[2].devices)


def sides(case: Case) -> list[str]:
    return [side for side, expected in ((BEFORE, case.before), (BEHIND, case.behind)) if expected is not None]


def expected(case: Case, side: str) -> str:
    found = case.before if side == BEFORE else case.behind
    assert found is not None
    return found
