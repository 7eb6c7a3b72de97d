"""The part of the user's graph that leads to a MODEL, under names that say what it is.

Node ids are hashes of what a node is and of everything above it. So two loaders of one
file are one node, a changed LoRA strength renames that node and those below it only, and
the host's cache in a worker keeps exactly what did not change.

A recipe ends where a wire carries data: ComfyUI's process has computed it, and the value takes the wire's place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import SPError
from ...pool.wire import unsendable
from ..model_digest import Part
from ..recipe_values import VALUE_NODE
from .computed_values import ComputedValues

#: of this extension, the nodes that give or sample a shared-out MODEL
OUR_NODES = ("SPModelPatch", "SPSampler")

#: of this extension, the node that gives a shared-out VAE
VAE_NODE = "SPVAEPatch"

GetNode = Callable[[str], dict[str, Any]]
OutputTypes = Callable[[str], tuple[str, ...]]


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
    #: what the value nodes of the graph give, by digest: all members of a list
    values: dict[str, list[Any]] = field(default_factory=dict, compare=False)
    #: what the MODELs on the way are in ComfyUI's process, by node and output, the loader's first
    models: dict[tuple[str, int], list[dict[str, Part]]] = field(default_factory=dict, compare=False)
    #: the same with the CLIPs that this one leaves out: for when a node does not do without
    fallback: Recipe | None = field(default=None, compare=False)

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


def trace(
    get_node: GetNode, link: Any, computed: ComputedValues, list_index: int | None = None, output_types: OutputTypes = lambda class_type: ()
) -> Recipe:
    """Collect the ancestors of a wire, ComfyUI's ``link`` (``[node id, output index]``).

    Args:
        computed: what ComfyUI's process has computed of the prompt.
        list_index: which member of the output is meant, if the output is a list.
        output_types: class type of a node -> the types of its outputs.

    Raises:
        SPError: the input is not a wire, so there is no graph to run in the workers.
    """
    if not is_link(link):
        raise SPError("The model input has to be a wire from a model loader or from a node behind one")
    full = _Tracing(get_node, computed).recipe(link, list_index)
    lean = _Tracing(get_node, computed, output_types).recipe(link, list_index)
    return full if full == lean else replace(lean, fallback=full)


class _Tracing:
    """The graph of a recipe while it grows."""

    def __init__(self, get_node: GetNode, computed: ComputedValues, output_types: OutputTypes | None = None) -> None:
        self._get_node, self._computed, self._output_types = get_node, computed, output_types
        self.graph: dict[str, dict[str, Any]] = {}
        self.origin: dict[str, str] = {}
        self.values: dict[str, list[Any]] = {}
        self.models: dict[tuple[str, int], list[dict[str, Part]]] = {}
        self._names: dict[str, str] = {}

    def recipe(self, link: list[Any], list_index: int | None) -> Recipe:
        node, output_index = self.wire(link)
        self._refuse_sampling()
        return Recipe(self.graph, node, output_index, self.origin, list_index, self.values, self.models)

    def _refuse_sampling(self) -> None:
        """A worker alone would sample on one device, or start workers of its own."""
        for name, node in self.graph.items():
            if samples(node["class_type"], node["inputs"]):
                raise SPError(
                    f"The MODEL is made of what {self.origin[name]} gives, which the workers cannot run, and ComfyUI has not kept the "
                    "result in a form that can be sent to them. Take the MODEL from the loader and not from this node. If only a latent "
                    "or a number comes from it, start ComfyUI with a cache (without --cache-none)"
                )

    def wire(self, link: Any) -> list[Any]:
        """The wire of the recipe that carries what ``link`` carries in the user's graph."""
        node = self._get_node(link[0])
        if node["class_type"] == VAE_NODE and is_link(source := node["inputs"].get("vae")):
            return self.wire(source)  # a worker has the VAE to itself
        if (value := self._computed.value(link)) is not None:
            name = f"{VALUE_NODE}-{value.digest}"
            self.graph[name] = {"class_type": VALUE_NODE, "inputs": {"digest": value.digest}}
            self.origin[name] = f"the value of {node['class_type']} (node {link[0]})"
            self.values[value.digest] = value.members
            return [name, 0]
        inputs = {name: source for name, source in node.get("inputs", {}).items() if is_link(source)}
        if (unchanged := self._computed.unchanged(link, inputs)) is not None:
            return self.wire(unchanged)
        place = (self._visit(link, node, inputs), int(link[1]))
        if place not in self.models and (digests := self._computed.model_digests(link)) is not None:
            self.models[place] = digests
        return list(place)

    def _passed_on(self, link: list[Any], class_type: str, links: dict[str, list[Any]]) -> set[str]:
        """Inputs for a CLIP that a node patches and passes on beside its MODEL, as LoRA loaders do: the MODEL does not need it."""
        types = self._output_types
        if types is None or "CLIP" not in types(class_type) or not self._computed.weights_patched(link, links):
            return set()
        of = {name: (types(self._get_node(source[0])["class_type"]), int(source[1])) for name, source in links.items()}
        return {name for name, (given, index) in of.items() if index < len(given) and given[index] == "CLIP"}

    def _visit(self, link: list[Any], node: dict[str, Any], links: dict[str, list[Any]]) -> str:
        node_id, class_type = link[0], node["class_type"]
        if node_id in self._names:
            return self._names[node_id]
        inputs = dict(sorted(node.get("inputs", {}).items())) | dict.fromkeys(self._passed_on(link, class_type, links))
        for given, value in inputs.items():
            if not is_link(value) and is_object(value):
                raise SPError(
                    f"{class_type} (node {node_id}) got its input '{given}' as an object and not over a wire, as a node does that puts "
                    "others in its place. The workers run it again and have no such object. Use the nodes that it stands for, wired "
                    "one behind the other"
                )
        inputs = {name: self.wire(value) if is_link(value) else value for name, value in inputs.items()}
        name = self._names[node_id] = name_in_recipe(class_type, inputs)
        self.graph[name] = {"class_type": class_type, "inputs": inputs}
        self.origin[name] = f"{class_type} (node {node_id})"
        return name


def is_object(value: Any) -> bool:
    """No part of a prompt as a user can write it: it has no place in a recipe, whose key is the model's identity."""
    return unsendable(value) is not None or any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def samples(class_type: str, inputs: Collection[str]) -> bool:
    """A node that samples, or that shares a model out, by its class and the names of its inputs."""
    begins = any(name.startswith("latent") for name in inputs)
    return class_type in OUR_NODES or (begins and ("sampler_name" in inputs or "sampler" in inputs))


def name_in_recipe(class_type: str, inputs: dict[str, Any]) -> str:
    """A node's name: a hash of what it is, where wires are named by what stands at their other end."""
    content = json.dumps([class_type, inputs], sort_keys=True, default=str)
    return f"{class_type}-{hashlib.blake2b(content.encode(), digest_size=10).hexdigest()}"


def names_of_loaders(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """The names that those of ``nodes`` have in a recipe which take no wire, such as loaders of checkpoints."""
    inputs = ((node["class_type"], node.get("inputs", {})) for node in nodes)
    return {name_in_recipe(class_type, given) for class_type, given in inputs if not any(map(is_link, given.values()))}


def union(recipes: Iterable[Recipe]) -> dict[str, dict[str, Any]]:
    """One graph that makes all of them; equal parts appear once."""
    graph: dict[str, dict[str, Any]] = {}
    for recipe in recipes:
        graph |= recipe.graph
    return graph
