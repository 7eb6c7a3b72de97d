"""What ComfyUI's process has computed of the prompt that it runs: values that cross to the workers, MODELs that a node left alone.

A value that the wire can send is data, and data crosses. So no worker encodes text, loads a VAE or samples a first stage,
and a number that a node draws is the same for all ranks. Models and their parts cannot be sent, and are replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...pool import wire
from ..model_digest import Part, Weights

#: node id -> its outputs, each a list; None for a node that was not computed, or whose result ComfyUI has dropped
Outputs = Callable[[str], "list[list[Any]] | None"]


@dataclass(frozen=True, eq=False)
class Value:
    """What one wire carries: all members of its list, which has one where no list was made."""

    digest: str
    members: list[Any]


class AboutModels(NamedTuple):
    """Answers about values that are MODELs; what is no MODEL is never the same."""

    #: a worker could not tell the two apart
    same: Callable[[Any, Any], bool]
    #: neither, if they had equal weights
    same_but_for_weights: Callable[[Any, Any], bool]
    #: see :func:`sp_core.host.model_digest.model_digest`
    digest: Callable[[Any, Weights], dict[str, Part]]


class ComputedValues:
    """Answers about the wires of one prompt while ComfyUI runs it.

    Args:
        outputs: what was computed so far, see :func:`sp_core.host.comfy_api.outputs_so_far`.
        models: answers about MODELs among the values.
    """

    def __init__(self, outputs: Outputs, models: AboutModels) -> None:
        self._outputs, self._about = outputs, models
        self._weights: Weights = {}
        self._digests: dict[tuple[str, int], list[dict[str, Part]]] = {}
        self._values: dict[tuple[str, int], Value | None] = {}

    def members(self, link: list[Any]) -> list[Any] | None:
        """The list that the wire ``link`` carries, if ComfyUI still has it."""
        outputs = self._outputs(link[0])
        return outputs[int(link[1])] if outputs is not None and int(link[1]) < len(outputs) else None

    def value(self, link: list[Any]) -> Value | None:
        """The value on the wire ``link``, if it is there and can be sent."""
        place = (link[0], int(link[1]))
        if place not in self._values:
            members = self.members(link)
            sendable = members is not None and wire.unsendable(members) is None
            self._values[place] = Value(digest(members), list(members)) if sendable and members is not None else None
        return self._values[place]

    def model_digests(self, link: list[Any]) -> list[dict[str, Part]] | None:
        """What the MODELs on the wire ``link`` are; None for a wire that carries none, or whose MODELs are gone."""
        place, members = (link[0], int(link[1])), self.members(link)
        if place not in self._digests and members is not None and self._models(members):
            self._digests[place] = [self._about.digest(member, self._weights) for member in members]
        return self._digests.get(place)

    def unchanged(self, link: list[Any], inputs: Mapping[str, list[Any]]) -> list[Any] | None:
        """The wire among a node's ``inputs`` that brought it the MODEL of its output ``link``, if the node left that as it was.

        Only a node that needs an object beside MODELs (a VAE) is looked at: a worker would have to make the object. Other
        nodes are cheap, and some are there for what they do besides.
        """
        after = self.members(link)
        if not after:
            return None
        brought = {name: self.members(source) for name, source in inputs.items()}
        models = [name for name, members in brought.items() if _alike(self._about.same, members, after)]
        objects = [name for name, members in brought.items() if self.value(inputs[name]) is None and not self._models(members)]
        return inputs[models[0]] if models and objects else None

    def weights_patched(self, link: list[Any], inputs: Mapping[str, list[Any]]) -> bool:
        """The node with the output ``link`` gave one of the MODELs of its ``inputs`` with other weights, and changed nothing else."""
        after = self.members(link)
        return bool(after) and any(_alike(self._about.same_but_for_weights, self.members(source), after) for source in inputs.values())

    def _models(self, members: list[Any] | None) -> bool:
        return members is not None and all(self._about.same(member, member) for member in members)


def _alike(same: Callable[[Any, Any], bool], before: list[Any] | None, after: list[Any] | None) -> bool:
    return before is not None and after is not None and len(before) == len(after) and all(map(same, before, after))


def digest(members: list[Any]) -> str:
    """Equal for equal values, whatever tensors hold them."""
    encoded = wire.encode(members)
    known = hashlib.blake2b(json.dumps(encoded.tree, sort_keys=True).encode(), digest_size=10)
    for tensor in encoded.tensors:
        known.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        known.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return known.hexdigest()
