"""What stands in for the nodes when a requirement is missing: it says which."""

from __future__ import annotations

from typing import Any


def stand_in(node_id: str, display_name: str, reason: str) -> type:
    """A node that takes anything, does nothing and shows why.

    Written for the oldest node interface, since the newest may be what is missing.
    """

    def run(self: Any, **kwargs: Any) -> tuple:
        raise RuntimeError(reason)

    return type(
        node_id,
        (),
        {
            "INPUT_TYPES": classmethod(lambda cls: {"required": {"reason": ("STRING", {"default": reason, "multiline": True})}}),
            "RETURN_TYPES": (),
            "FUNCTION": "run",
            "OUTPUT_NODE": True,
            "CATEGORY": "advanced/multi-gpu",
            "DESCRIPTION": f"{display_name} is not available. {reason}",
            "run": run,
        },
    )
