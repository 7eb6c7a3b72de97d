"""What this extension relies on in ComfyUI, tried one by one.

Each probe does the smallest real thing that would go wrong, and its message says what ComfyUI changed. ``../comfy_api_probes.py`` runs
them in a process of its own.
"""

from . import executor, memory, models, program
from .registry import PROBES

__all__ = ["PROBES", "executor", "memory", "models", "program"]
