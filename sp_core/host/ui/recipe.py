"""The part of the user's graph that leads to a MODEL, under names that say what it is.

Node ids are hashes of what a node is and of everything above it. So two loaders of one
file are one node, a changed LoRA strength renames that node and those below it only, and
the host's cache in a worker keeps exactly what did not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import SPError

GetNode = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """How to make a MODEL: a graph in API format, and which output of which node is the MODEL."""

    graph: dict[str, dict[str, Any]]
    node: str
    output_index: int
    #: class type and id of every node in the user's graph, by its name in this one; for messages
    origin: dict[str, str]
    #: which member, where the output is a list of MODELs; None where ComfyUI does not say
    list_index: int | None = None

    @property
    def key(self) -> str:
        """Identity of the model: equal keys mean the same member of the same output of the same graph."""
        member = "" if self.list_index is None else f"[{self.list_index}]"
        return f"{self.node}:{self.output_index}{member}"

    def with_users_names(self, text: str) -> str:
        """``text`` with the nodes of the user's graph in the place of the names that the replayed graph has for them."""
        for name, origin in self.origin.items():
            text = text.replace(name, origin)
        return text


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], (int, float))


def trace(get_node: GetNode, link: Any, list_index: int | None = None) -> Recipe:
    """Collect the ancestors of ``link`` (``[node id, output index]``).

    Args:
        list_index: which member of the output is meant, if the output is a list.

    Raises:
        SPError: the input is not a link, so there is no graph to run in the workers.
    """
    if not is_link(link):
        raise SPError("The model input has to be a wire from a model loader or from a node behind one")
    graph: dict[str, dict[str, Any]] = {}
    origin: dict[str, str] = {}
    names: dict[str, str] = {}

    def visit(node_id: str) -> str:
        if node_id in names:
            return names[node_id]
        node = get_node(node_id)
        inputs = {name: [visit(value[0]), value[1]] if is_link(value) else value for name, value in sorted(node.get("inputs", {}).items())}
        class_type = node["class_type"]
        content = json.dumps([class_type, inputs], sort_keys=True, default=str)
        name = f"{class_type}-{hashlib.blake2b(content.encode(), digest_size=10).hexdigest()}"
        names[node_id] = name
        graph[name] = {"class_type": class_type, "inputs": inputs}
        origin[name] = f"{class_type} (node {node_id})"
        return name

    return Recipe(graph, visit(link[0]), int(link[1]), origin, list_index)


def union(recipes: list[Recipe]) -> dict[str, dict[str, Any]]:
    """One graph that makes all of them; equal parts appear once."""
    graph: dict[str, dict[str, Any]] = {}
    for recipe in recipes:
        graph |= recipe.graph
    return graph
