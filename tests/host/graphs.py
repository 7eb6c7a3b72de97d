"""Small functions that make API graphs, and the comparison that every test is about: stock beside SP in one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from sp_core.demo.comfy_server import ComfyServer
from sp_core.demo.run import relative_l2 as relative

#: relative L2 distance between two fp32 runs that differ in the order of their sums only
TOLERANCE = 2e-5

#: of KSampler
SETTINGS: dict[str, Any] = {"seed": 5, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}

Link = list[Any]


@dataclass(frozen=True)
class Node:
    """A node in a graph; ``node[index]`` is a wire from one of its outputs."""

    id: str

    def __getitem__(self, index: int) -> Link:
        return [self.id, index]


class Graph:
    """An API-format prompt. A node that is there already is not added again, so branches share what they can."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}
        self._known: dict[str, Node] = {}

    def add(self, class_type: str, **inputs: Any) -> Node:
        content = json.dumps([class_type, inputs], sort_keys=True)
        if content not in self._known:
            node = self._known[content] = Node(str(len(self.prompt) + 1))
            self.prompt[node.id] = {"class_type": class_type, "inputs": inputs}
        return self._known[content]


@dataclass
class Branch:
    """One way through a graph: stock when ``devices`` is None, else with SP Model Patch wherever the case says ``patch``."""

    graph: Graph
    devices: str | None = None
    #: further inputs of SP Model Patch
    requested: dict[str, Any] = field(default_factory=dict)
    #: wires of the patched MODELs, for the report
    patched: list[Link] = field(default_factory=list)
    report: Link | None = None

    def add(self, class_type: str, **inputs: Any) -> Node:
        return self.graph.add(class_type, **inputs)

    def patch(self, model: Link) -> Link:
        if self.devices is None:
            return model
        self.patched.append(self.add("SPModelPatch", model=model, devices=self.devices, **self.requested)[0])
        return self.patched[-1]


#: builds one branch and returns the wire of its latent
Case = Callable[[Branch], Link]


# -- parts of a branch ------------------------------------------------------------------


def load(branch: Branch, name: str) -> Link:
    return branch.add("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default")[0]


def text(branch: Branch, dim: int, tokens: int = 7, **extra: Any) -> tuple[Link, Link]:
    """(positive, negative)"""
    return tuple(branch.add("SPTestConditioning", seed=seed, tokens=tokens, dim=dim, **extra)[0] for seed in (1, 2))  # type: ignore[return-value]


def latent(branch: Branch, shapes: str, scale: float = 0.0, mask: str = "", seed: int = 0) -> Link:
    return branch.add("SPTestLatent", shapes=shapes, seed=seed, scale=scale, mask=mask)[0]


def sample(branch: Branch, model: Link, conditioning: tuple[Link, Link], start: Link, **changes: Any) -> Link:
    """KSampler: two Euler steps unless told otherwise."""
    settings = {**SETTINGS, **changes}
    return branch.add("KSampler", model=model, positive=conditioning[0], negative=conditioning[1], latent_image=start, **settings)[0]


# -- running ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    parts: list[Tensor]
    report: str


@dataclass(frozen=True)
class Comparison:
    stock: Result
    sp: Result

    @property
    def errors(self) -> list[float]:
        """Relative L2 distance of each part (video; audio)."""
        return [relative(mine, theirs) for mine, theirs in zip(self.sp.parts, self.stock.parts, strict=True)]

    @property
    def decision(self) -> str:
        """The report's line about how the work was split."""
        return self.sp.report.splitlines()[1]

    def check(self, devices: str, tolerance: float = TOLERANCE) -> None:
        for part in self.stock.parts:
            assert part.isfinite().all()
            assert part.std() > 1e-3, "the stock picture is empty: the case compares nothing"
        assert f"on {devices.removeprefix('cpu:')} devices" in self.sp.report, self.sp.report
        assert max(self.errors) <= tolerance, f"relative L2 {self.errors}; {self.sp.report}"


def branches(case: Case, devices: str, **requested: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """A prompt with both branches, and the ids of the nodes that save the stock and the SP latent."""
    graph, saved = Graph(), []
    for kind, branch in (("stock", Branch(graph)), ("sp", Branch(graph, devices, requested))):
        saved.append(save(branch, case, f"{case.__name__}-{kind}"))
    return graph.prompt, saved


def save(branch: Branch, case: Case, name: str) -> str:
    """The id of the node that saves the case's latent, and its report where the branch has one."""
    samples = case(branch)
    extra: dict[str, Any] = {"model": branch.patched[-1]} if branch.patched else {}
    if branch.report is not None:
        extra = {"report": branch.report}
    return branch.add("SPTestSaveLatent", samples=samples, name=name, **extra).id


def read(output: dict[str, Any]) -> Result:
    """What SPTestSaveLatent wrote."""
    tensors = load_file(Path(output["saved"][0]))
    return Result([tensors[name] for name in sorted(tensors)], output["report"][0])


def compare(server: ComfyServer, case: Case, devices: str, check: bool = True, **requested: Any) -> Comparison:
    """Runs ``case`` stock and on ``devices`` in one prompt; by default also check that both agree."""
    prompt, saved = branches(case, devices, **requested)
    outputs = server.run(prompt)
    comparison = Comparison(*(read(outputs[node]) for node in saved))
    print(f"\n{case.__name__} on {devices}: relative L2 {', '.join(f'{error:.2g}' for error in comparison.errors)}; {comparison.decision}")
    if check:
        comparison.check(devices)
    return comparison


def nodes_of(case: Case) -> list[dict[str, Any]]:
    """The nodes that a case is made of."""
    graph = Graph()
    case(Branch(graph, "cpu:2"))
    return list(graph.prompt.values())


def run_sp(server: ComfyServer, case: Case, devices: str = "cpu:2", **requested: Any) -> Result:
    """The SP branch alone."""
    graph = Graph()
    saved = save(Branch(graph, devices, requested), case, f"{case.__name__}-alone")
    return read(server.run(graph.prompt)[saved])
