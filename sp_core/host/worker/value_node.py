"""Values that ComfyUI's process computed, where a replayed graph names them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_map_only

from ..recipe_values import VALUE_NODE


class Values:
    """The values of the graph that is replayed now, by their digests."""

    def __init__(self) -> None:
        self._members: dict[str, list[Any]] = {}

    @contextlib.contextmanager
    def given(self, members: dict[str, list[Any]]) -> Iterator[None]:
        """While the block runs, nodes find these. The executor's cache has those of nodes that ran before."""
        self._members = members
        try:
            yield
        finally:
            self._members = {}

    def install(self) -> None:
        """Make the node known that gives a value to a graph."""
        import nodes

        nodes.NODE_CLASS_MAPPINGS[VALUE_NODE] = self._node_class()

    def _node_class(self) -> type:
        values = self

        class SPValue:
            """Gives what a wire carried in ComfyUI's process: a whole list, so that nodes behind it run for each member."""

            RETURN_TYPES = ("*",)
            OUTPUT_IS_LIST = (True,)
            FUNCTION = "give"
            CATEGORY = "advanced/multi-gpu"

            @classmethod
            def INPUT_TYPES(cls) -> dict[str, Any]:
                return {"required": {"digest": ("STRING", {})}}

            def give(self, digest: str) -> tuple[list[Any]]:
                return (_where_nodes_expect_it(values._members[digest]),)

        return SPValue


def _where_nodes_expect_it(members: list[Any]) -> list[Any]:
    """Tensors come to the worker's device, and the host's nodes hand theirs to each other elsewhere."""
    import comfy.model_management
    import torch

    device = comfy.model_management.intermediate_device()
    moved: list[Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), members)
    return moved
