"""Replays the part of the user's graph that makes a model, with the host's own executor and its cache."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import torch

from ...errors import SPError
from ...pool.errors import Cancelled
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from .. import comfy_api
from .interrupt import interruptible
from .node_packs import Catalogue, Graph, NodePacks, PackFailed
from .value_node import Values

log = logging.getLogger(__name__)


class NodeFailed(SPError):
    """A node of the graph failed; ``class_type`` is its class, where the executor tells it."""

    def __init__(self, message: str, class_type: str | None) -> None:
        super().__init__(message)
        self.class_type = class_type


class GraphReplay:
    """The executor of one worker. What it computed stays in its cache until a graph leaves it out."""

    def __init__(self, context: WorkerContext, catalogue: Catalogue) -> None:
        self._context = context
        self.packs = NodePacks(catalogue, self._get_on)
        self._values = Values()
        self._values.install()
        self._executor = comfy_api.make_executor(self.packs.server)

    def output(self, graph: Graph, values: dict[str, list[Any]], node: str, index: int, list_index: int | None) -> Any:
        """Run what ``node`` needs of ``graph``, and return its output number ``index``, of a list the member ``list_index``.

        A pack may need another one that ComfyUI has loaded, and nothing says so but a failure. Then all are loaded, and
        the graph runs once more.

        Args:
            values: what the value nodes of ``graph`` give, by digest.

        Raises:
            Cancelled: the user cancelled meanwhile.
            SPError: a node failed; the message names it by its name in ``graph``.
        """
        with self._values.given(values):
            self._run_with_packs(graph, node)
        outputs = comfy_api.cached_outputs(self._executor, node)
        if outputs is None or index >= len(outputs) or not outputs[index]:
            raise SPError(f"{node} gave no model")
        return member_of(outputs[index], list_index, node)

    def cached(self, node: str, index: int) -> list[Any] | None:
        """The list that a node gave as its output number ``index``, if the cache has it."""
        outputs = comfy_api.cached_outputs(self._executor, node)
        return outputs[index] if outputs is not None and index < len(outputs) else None

    def _run_with_packs(self, graph: Graph, node: str) -> None:
        try:
            self._run(graph, node)
        except (NodeFailed, PackFailed) as error:
            of_a_pack = isinstance(error, PackFailed) or self.packs.is_custom(error.class_type)
            if not (of_a_pack and self.packs.load_rest()):
                raise
            log.info("%s; once more, with all packs that ComfyUI has loaded", error)
            self._run(graph, node)

    def _run(self, graph: Graph, node: str) -> None:
        try:
            graph = copied(self.packs.load_for(graph, node))
            self._executor.success, self._executor.server = True, self.packs.server
            prompt_id = self.packs.server.last_prompt_id = f"sp-{time.monotonic_ns()}"
            with torch.inference_mode(), interruptible(self._context.cancelled):
                comfy_api.execute(self._executor, graph, prompt_id, [node])
        finally:
            # what fails because of a cancel is no failure
            if self._context.cancelled():
                raise Cancelled
        if not self._executor.success:
            messages = self._executor.status_messages
            raise NodeFailed(execution_error(messages), failed_class(messages))

    def _get_on(self) -> None:
        """Between two packs: tell that this rank gets on, and end when the user cancelled."""
        self._context.show(Phase.REPLAYING)
        if self._context.cancelled():
            raise Cancelled

    def trim(self, graph: dict[str, Any]) -> None:
        """Forget what was computed for nodes that are not in ``graph``."""
        comfy_api.trim_cache(self._executor, copied(self.packs.loaded_part(graph)))


def member_of(values: list[Any], list_index: int | None, node: str) -> Any:
    """The value that ComfyUI gives to call ``list_index`` of the next node: the last one where the list is too short.

    Raises:
        SPError: there are several values, and nobody knows which is meant.
    """
    if list_index is None and len(values) > 1:
        raise SPError(f"{node} gave a list of {len(values)} models, and this ComfyUI does not say which of them is meant. Give it one")
    return values[min(list_index or 0, len(values) - 1)]


def copied(graph: Graph) -> Graph:
    """A copy that the executor may change."""
    return {name: {"class_type": entry["class_type"], "inputs": dict(entry["inputs"])} for name, entry in graph.items()}


def execution_error(messages: list[Any]) -> str:
    """Why a graph failed, from the executor's ``status_messages``: "node: message" where a node did."""
    for event, data in reversed(messages):
        if event == "execution_error":
            with contextlib.suppress(KeyError, TypeError):
                return f"{data['node_id']}: {str(data['exception_message']).strip()}"
        if event == "execution_interrupted":
            return "the graph was interrupted"
    return "the graph did not run"


def failed_class(messages: list[Any]) -> str | None:
    """Class of the node at which a graph failed, from the executor's ``status_messages``."""
    errors = (data for event, data in reversed(messages) if event == "execution_error")
    return next((data.get("node_type") for data in errors if isinstance(data, dict)), None)
