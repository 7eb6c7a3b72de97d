"""The doctor's report as text, for a person."""

from __future__ import annotations

from typing import Any


def as_text(report: dict[str, Any]) -> str:
    """Conclusions first, then what they rest on."""
    lines = [*report["verdict"], ""]
    for name, section in report.items():
        if name in ("verdict", "expected"):
            continue
        lines.append(name.replace("_", " "))
        for key, value in section.items():
            if key == "links":
                lines += _matrix(value)
                continue
            shown = value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]
            lines += [f"  {key.replace('_', ' '):<18}{_plain(entry)}" for entry in shown]
    return "\n".join(lines)


def _matrix(rates: list[list[float]]) -> list[str]:
    """GB/s between each two devices."""
    head = "  GB/s each way    " + "".join(f"{index:>8}" for index in range(len(rates)))
    rows = [
        f"  {index:>16} " + "".join(f"{'-' if index == other else f'{rate / 1e9:.2f}':>8}" for other, rate in enumerate(row))
        for index, row in enumerate(rates)
    ]
    return [head, *rows]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_plain(entry)}" for key, entry in value.items() if entry not in ("", None))
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value) or "-"
