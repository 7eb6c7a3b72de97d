"""What ComfyUI's process has computed of the prompt that it runs: values that cross to the workers, MODELs that a node left alone.

A value that the wire can send is data, and data crosses. So no worker encodes text, loads a VAE or samples a first stage,
and a number that a node draws is the same for all ranks. Models and their parts cannot be sent, and are replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...pool import wire
from ..model_digest import Part

#: node id -> its outputs, each a list; None for a node that was not computed, or whose result ComfyUI has dropped
Outputs = Callable[[str], "list[list[Any]] | None"]


@dataclass(frozen=True, eq=False)
class Value:
    """What one wire carries: all members of its list, which has one where no list was made."""

    digest: str
    members: list[Any]


class ComputedValues:
    """Answers about the wires of one prompt while ComfyUI runs it.

    Args:
        outputs: what was computed so far, see :func:`sp_core.host.comfy_api.outputs_so_far`.
        same_model: tells of two of its values whether they are MODELs that a worker could not tell apart.
        model_digest: of a MODEL, see :func:`sp_core.host.model_digest.model_digest`.
    """

    def __init__(
        self, outputs: Outputs, same_model: Callable[[Any, Any], bool], model_digest: Callable[[Any, dict[int, Part]], dict[str, Part]]
    ) -> None:
        self._outputs, self._same_model, self._model_digest = outputs, same_model, model_digest
        self._weights: dict[int, Part] = {}
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
        members = self.members(link)
        return [self._model_digest(member, self._weights) for member in members or ()] if self._models(members) else None

    def unchanged(self, link: list[Any], inputs: Mapping[str, list[Any]]) -> list[Any] | None:
        """The wire among a node's ``inputs`` that brought it the MODEL of its output ``link``, if the node left that as it was.

        Only a node that needs an object beside MODELs (a VAE) is looked at: a worker would have to make the object. Other
        nodes are cheap, and some are there for what they do besides.
        """
        after = self.members(link)
        if not after:
            return None
        brought = {name: self.members(source) for name, source in inputs.items()}
        models = {name: members for name, members in brought.items() if self._same(members, after)}
        objects = [name for name, members in brought.items() if self.value(inputs[name]) is None and not self._models(members)]
        return inputs[next(iter(models))] if models and objects else None

    def _same(self, before: list[Any] | None, after: list[Any]) -> bool:
        return before is not None and len(before) == len(after) and all(map(self._same_model, before, after))

    def _models(self, members: list[Any] | None) -> bool:
        return members is not None and all(self._same_model(member, member) for member in members)


def digest(members: list[Any]) -> str:
    """Equal for equal values, whatever tensors hold them."""
    encoded = wire.encode(members)
    known = hashlib.blake2b(json.dumps(encoded.tree, sort_keys=True).encode(), digest_size=10)
    for tensor in encoded.tensors:
        known.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        known.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return known.hexdigest()
