"""How the workers make what came to one of our nodes over a wire."""

from __future__ import annotations

from typing import Any

from .. import comfy_api
from ..model_digest import model_digest
from .computed_values import AboutModels, ComputedValues
from .recipe import Recipe, is_link, names_of_loaders, trace
from .remote_model import RemoteModel
from .session import session
from .unchanged_model import same_but_for_weights, same_for_workers


def recipe_of_input(dynprompt: Any, unique_id: str, name: str) -> Recipe:
    """The recipe of what the node ``unique_id`` of the prompt that runs got as its input ``name``.

    Raises:
        SPError: it came over no wire, or its graph cannot be replayed.
    """
    link = dynprompt.get_node(unique_id)["inputs"].get(name)
    computed = ComputedValues(comfy_api.outputs_so_far(), AboutModels(same_for_workers, same_but_for_weights, model_digest))
    return trace(dynprompt.get_node, link, computed, list_index(computed, link), comfy_api.output_types)


def register(model: RemoteModel, dynprompt: Any) -> None:
    """Have the session count ``model``, which a node of the prompt ``dynprompt`` made, among those that ComfyUI holds."""
    session().register(model, names_of_loaders(map(dynprompt.get_node, dynprompt.all_node_ids())))


def list_index(computed: ComputedValues, link: Any) -> int | None:
    """Which member of the list on the wire ``link`` this call of the node got: the last one where another input has more."""
    members, index = computed.members(link) if is_link(link) else None, comfy_api.executing_list_index()
    return index if index is None or members is None else min(index, len(members) - 1)
