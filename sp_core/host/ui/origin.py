"""Which node pack's code a call came through, for messages."""

from __future__ import annotations

import sys
from pathlib import Path

from ...host_path import EXTENSION
from .. import comfy_api

_OWN = (EXTENSION / "nodes", EXTENSION / "sp_core")


def pack_in_call() -> str:
    """Function and module of the innermost caller in this thread that belongs to another node pack; "" where there is none."""
    folders = comfy_api.custom_node_folders()
    frame = sys._getframe(1)
    while frame is not None:
        if _is_of_a_pack(Path(frame.f_code.co_filename), folders):
            function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            return f"{function} of {str(frame.f_globals.get('__name__', '')).rsplit('/', 1)[-1]}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _is_of_a_pack(file: Path, folders: list[Path]) -> bool:
    if not any(folder in file.parents for folder in folders):
        return False
    return not any(own in file.resolve().parents for own in _OWN)
