"""What this machine has, what would be used, why not what is faster, and what to expect: for people and for scripts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from .. import settings
from .facts import gather
from .heatmap import heat_map
from .measuring_pool import chosen_devices, measure_links
from .text import as_text
from .verdict import expectations, measured, verdict

__all__ = ["as_text", "examine", "heat_map", "main"]


def examine() -> dict[str, Any]:
    """The whole report as plain data: the sections of :mod:`.facts`, ``links``, ``expected`` and ``verdict``.

    Starts a small pool for some seconds. Works without accelerators.
    """
    report: dict[str, Any] = gather()
    links = report["links"] = measure_links(chosen_devices())
    count = len(report["devices"]["accelerators"])
    report["expected"] = []
    if "error" not in links:
        report["expected"] = expectations(measured(links), max(1, count))
    report["verdict"] = verdict(report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns 1 if no pool could be started, else 0."""
    parser = argparse.ArgumentParser(prog="doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    if options.json:
        # the workers' news would stand between what a script reads
        os.environ[settings.LOG_LEVEL] = "WARNING"
    report = examine()
    print(json.dumps(report) if options.json else as_text(report))
    return 1 if "error" in report["links"] else 0
