"""What stands in for the nodes when they cannot be loaded: every one of them says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import NODES

#: made from the nodes by ``tools/make_texts.py``; the nodes themselves cannot be asked here
_TEXTS = Path(__file__).resolve().parents[1] / "locales" / "en" / "nodeDefs.json"


def stand_ins(error: Exception) -> tuple[dict[str, type], dict[str, str]]:
    """``NODE_CLASS_MAPPINGS`` and ``NODE_DISPLAY_NAME_MAPPINGS`` for nodes that ``error`` keeps from loading."""
    names, why = _display_names(), _sentence(error)
    return {key: _stand_in(key, name, why) for key, name in names.items()}, {key: f"{name} (unavailable)" for key, name in names.items()}


def _display_names() -> dict[str, str]:
    try:
        texts = json.loads(_TEXTS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        texts = {}
    return {row.node_id: texts.get(row.node_id, {}).get("display_name", row.node_id) for row in NODES}


def _sentence(error: Exception) -> str:
    """Why the nodes cannot be loaded, and what to do."""
    if not isinstance(error, ImportError):
        # a ComfyUI that is so different that the nodes cannot even be declared
        return f"{type(error).__name__}: {error}"
    missing = f"The Python package '{error.name}' is missing" if isinstance(error, ModuleNotFoundError) else str(error)
    return f"{missing}. Install this extension's requirements.txt into ComfyUI's Python environment and restart."


def _stand_in(node_id: str, display_name: str, reason: str) -> type:
    """A node that takes anything, does nothing and shows the reason.

    It is written for ComfyUI's oldest node interface, since the newest may be what is missing.
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
