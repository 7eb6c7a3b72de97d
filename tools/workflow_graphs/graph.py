"""A workflow as the graph that it is: nodes, their places, wires."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Node:
    """One node; ``node[i]`` is its i-th output."""

    id: int
    type: str
    pos: tuple[int, int]
    values: dict[str, Any]
    title: str | None = None
    size: tuple[int, int] | None = None
    #: what the frontend does to a seed after a run
    after: str = "fixed"

    def __getitem__(self, output: int) -> Wire:
        return Wire(self.id, output)


@dataclass(frozen=True)
class Wire:
    node: int
    output: int


@dataclass
class Graph:
    """One workflow; ``note`` is shown beside the nodes."""

    name: str
    note: str
    nodes: list[Node] = field(default_factory=list)
    groups: list[tuple[str, tuple[int, int, int, int]]] = field(default_factory=list)

    def add(self, type: str, x: int, y: int, title: str | None = None, size: tuple[int, int] | None = None, /, **values: Any) -> Node:
        self.nodes.append(Node(len(self.nodes) + 1, type, (x, y), values, title, size))
        return self.nodes[-1]

    def group(self, title: str, x: int, y: int, width: int, height: int) -> None:
        self.groups.append((title, (x, y, width, height)))
