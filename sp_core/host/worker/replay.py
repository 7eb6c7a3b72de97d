"""Replays the part of the user's graph that makes a model, with the host's own executor and its cache."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

import torch

from ...errors import SPError
from ...pool.errors import Cancelled
from ...pool.worker import WorkerContext
from .. import comfy_api
from .interrupt import interruptible
from .values import Values

log = logging.getLogger(__name__)

#: where each node class comes from, in ComfyUI's process: class type -> (parent of its module, path)
Catalogue = dict[str, tuple[str, str]]


class GraphReplay:
    """The executor of one worker. What it computed stays in its cache until a graph leaves it out."""

    def __init__(self, context: WorkerContext, catalogue: Catalogue) -> None:
        self._context = context
        _install_lazy_nodes(catalogue)
        self._values = Values()
        self._values.install()
        self._executor = comfy_api.make_executor(_Server())

    def output(self, graph: dict[str, Any], values: dict[str, list[Any]], node: str, index: int, list_index: int | None) -> Any:
        """Run what ``node`` needs of ``graph``, and return its output number ``index``, of a list the member ``list_index``.

        Args:
            values: what the value nodes of ``graph`` give, by digest.

        Raises:
            Cancelled: the user cancelled meanwhile.
            SPError: a node failed; the message names it by its name in ``graph``.
        """
        graph = {name: {"class_type": entry["class_type"], "inputs": dict(entry["inputs"])} for name, entry in graph.items()}
        self._executor.success = True
        with torch.inference_mode(), interruptible(self._context.cancelled), self._values.given(values):
            comfy_api.execute(self._executor, graph, f"sp-{time.monotonic_ns()}", [node])
        if self._context.cancelled():
            raise Cancelled
        if not self._executor.success:
            raise SPError(execution_error(self._executor.status_messages))
        outputs = comfy_api.cached_outputs(self._executor, node)
        if outputs is None or index >= len(outputs) or not outputs[index]:
            raise SPError(f"{node} gave no model")
        return member_of(outputs[index], list_index, node)

    def cached(self, node: str, index: int) -> list[Any] | None:
        """The list that a node gave as its output number ``index``, if the cache has it."""
        outputs = comfy_api.cached_outputs(self._executor, node)
        return outputs[index] if outputs is not None and index < len(outputs) else None

    def trim(self, graph: dict[str, Any]) -> None:
        """Forget what was computed for nodes that are not in ``graph``."""
        comfy_api.trim_cache(self._executor, graph)


def member_of(values: list[Any], list_index: int | None, node: str) -> Any:
    """The value that ComfyUI gives to call ``list_index`` of the next node: the last one where the list is too short.

    Raises:
        SPError: there are several values, and nobody knows which is meant.
    """
    if list_index is None and len(values) > 1:
        raise SPError(f"{node} gave a list of {len(values)} models, and this ComfyUI does not say which of them is meant. Give it one")
    return values[min(list_index or 0, len(values) - 1)]


class _Server:
    """Stands where the executor expects the host's server. It would send news, and nobody here reads them."""

    client_id: str | None = None
    last_node_id: str | None = None
    last_prompt_id: str | None = None

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        pass


def _install_lazy_nodes(catalogue: Catalogue) -> None:
    """Load a node pack when a graph, or a node that expands into a graph, asks for one of its nodes."""
    import nodes

    class LazyNodes(dict):
        def __missing__(self, class_type: str) -> Any:
            if class_type not in catalogue:
                raise SPError(f"the graph needs the node {class_type}, which the UI process does not have")
            parent, path = catalogue[class_type]
            if parent == "custom_nodes":
                _make_prompt_server()
            log.info("loading %s for %s", os.path.basename(path), class_type)
            if not comfy_api.load_node_pack(path, parent) or class_type not in self:
                raise SPError(f"{os.path.basename(path)}, which has the node {class_type}, does not load in the worker")
            return self[class_type]

    nodes.NODE_CLASS_MAPPINGS = LazyNodes(nodes.NODE_CLASS_MAPPINGS)


def _make_prompt_server() -> None:
    """Node packs add routes to the host's server while they are imported; give them one that is never started."""
    import asyncio

    import server

    if not hasattr(server.PromptServer, "instance"):
        server.PromptServer(asyncio.new_event_loop())


def execution_error(messages: list[Any]) -> str:
    """Why a graph failed, from the executor's ``status_messages``: "node: message" where a node did."""
    for event, data in reversed(messages):
        if event == "execution_error":
            with contextlib.suppress(KeyError, TypeError):
                return f"{data['node_id']}: {str(data['exception_message']).strip()}"
        if event == "execution_interrupted":
            return "the graph was interrupted"
    return "the graph did not run"
