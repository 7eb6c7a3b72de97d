"""ComfyUI extension: runs a video model on all of a machine's GPUs at once.

Importing it never fails and starts no worker. ComfyUI finds ``comfy_entrypoint`` here or, when a
requirement is missing, stand-in nodes that say which. The nodes are listed in ``nodes/__init__.py``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

WEB_DIRECTORY = "./web"

# pytest imports this folder as a plain package, outside ComfyUI: nothing is declared then
if "folder_paths" in sys.modules:
    try:
        # workers load ``sp_core`` by the same function, and the file may not be imported before ``sp_core`` is
        runpy.run_path(str(Path(__file__).parent / "sp_core" / "pool" / "bootstrap.py"))["load_package"]()
        from .nodes.extension import SequenceParallelExtension, load_nodes

        _nodes = load_nodes()

        async def comfy_entrypoint() -> SequenceParallelExtension:
            return SequenceParallelExtension(_nodes)
    except Exception as error:
        from .nodes.missing import stand_ins

        NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS = stand_ins(error)
