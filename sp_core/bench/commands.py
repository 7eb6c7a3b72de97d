"""``python -m sp_core bench``: one word a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from ..cli import dispatch

COMMANDS = {
    "exchange": ("bench.exchange", "our all-to-all against the stock collective and a memory copy"),
    "cross": ("bench.cross", "video-to-audio attention: keys exchanged, or partial results merged"),
    "overlap": ("bench.overlap", "what of an exchange stays exposed when heads go in groups, on a link that is slow on purpose"),
    "shares": ("bench.shares", "equal shares and shares by speed on ranks of which one is slower on purpose"),
    "weights": ("bench.weights", "shared weights against whole ones, and what of a slow gather the computing hides"),
    "sparse": ("bench.sparse", "block-sparse attention of a refining pass against dense attention, by how much it leaves out"),
    "step": ("bench.step", "N workers against one process with as many threads"),
    "decode": ("bench.decode", "a VAE on N workers against one process with as many threads (needs ComfyUI)"),
    "overhead": ("bench.overhead", "what SP adds to a prompt and to a step"),
    "patches": ("bench.patches", "what the probe of unknown code costs the first step and the later ones (needs ComfyUI)"),
    "compile": ("bench.compiling", "torch.compile on N workers: a step, and the first one (needs ComfyUI)"),
    "memory": ("bench.memory", "private memory of four workers with a 2 GB checkpoint (needs ComfyUI)"),
    "all": ("bench.commands", "all of these"),
}


def main(argv: Sequence[str]) -> int:
    """Runs one measurement, or all when called as ``all``; the highest exit status."""
    if list(argv) == ["all"]:
        status = 0
        for name, (module, what) in COMMANDS.items():
            if name != "all":
                print(f"\n== {name}: {what}", flush=True)
                status = max(status, import_module(f"..{module}", __package__).main([]))
        return status
    return dispatch("sp_core bench", COMMANDS, list(argv))
