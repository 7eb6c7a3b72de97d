"""``python -m sp_core demo | bench | doctor``: what can be done from a shell. Works without ComfyUI, but for those
measurements of ``bench`` that say they need it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

#: command -> (module below this package with ``main(argv) -> exit status``, what it does)
COMMANDS = {
    "demo": ("demo.run", "sample with and without sequence parallelism and compare"),
    "bench": ("bench.commands", "measure this machine: exchange, cross, overlap, step, decode, overhead, patches, memory, all"),
    "doctor": ("doctor", "say what this machine has and what would be used, as text or JSON"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    return dispatch("sp_core", COMMANDS, list(sys.argv[1:] if argv is None else argv))


def dispatch(program: str, commands: dict[str, tuple[str, str]], argv: list[str]) -> int:
    """Hand the rest of the line to the module that the first word names; only that module is imported."""
    if not argv or argv[0] not in commands:
        lines = [f"  {name:<10}{what}" for name, (_, what) in commands.items()]
        stream = sys.stdout if argv and argv[0] in ("-h", "--help") else sys.stderr
        print(f"usage: {program} COMMAND [OPTIONS]", *lines, f"{program} COMMAND --help tells its options.", sep="\n", file=stream)
        return 0 if stream is sys.stdout else 2
    run: Callable[[Sequence[str]], int] = import_module(f".{commands[argv[0]][0]}", __package__).main
    return run(argv[1:])
