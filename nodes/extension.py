"""Hands the nodes of the table to ComfyUI."""

from __future__ import annotations

from importlib import import_module

from comfy_api.latest import ComfyExtension, io

from sp_core.host.ui.status import register_routes
from sp_core.models.registration import register_models

from . import NODES


def load_nodes() -> list[type[io.ComfyNode]]:
    """Make our models known to ComfyUI and import the class of every row.

    Where ComfyUI does not take our models, their nodes are missing and the log says why.
    """
    have_models = register_models()
    rows = [row for row in NODES if have_models or not row.needs_our_models]
    return [getattr(import_module(f".{row.file}", __package__), row.node_id) for row in rows]


class SequenceParallelExtension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    def __init__(self, nodes: list[type[io.ComfyNode]]) -> None:
        self._nodes = nodes

    async def on_load(self) -> None:
        register_routes()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return self._nodes
