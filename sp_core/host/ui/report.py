"""SP Sampler's report: a few lines that a person reads."""

from __future__ import annotations

from statistics import median
from typing import Any

from .remote_model import RemoteModel


def report(patched: Any) -> str:
    """How the last sampling run of a patched MODEL was split and what it cost."""
    sp: RemoteModel | None = getattr(patched, "sp", None)
    if sp is None:
        return "One device: sampled without sequence parallelism."
    run = sp.stats
    if not run.forward_s:
        return "No forward was computed."
    total, forwards = sum(run.forward_s), len(run.forward_s)
    # on accelerators it is worked out from the measured link: calls only start an exchange there
    about = "" if sp.devices[0].kind == "cpu" else "about "
    return "\n".join(
        (
            f"{sp.plan.architecture} on {len(sp.devices)} devices ({', '.join(map(str, sp.devices))})",
            run.decision,
            f"exchange by {run.transport}",
            f"forwards: {forwards}, median {median(run.forward_s):.3f} s, all {total:.2f} s",
            f"exchange: {run.exchanges // forwards} a forward, {about}{100 * run.exchange_s / total:.0f} % of the time, "
            f"{size(run.exchange_bytes / forwards)} sent a rank and forward",
            *run.foreign.values(),
            f"to the workers: {size(run.sent_bytes)} sent, {size(run.reused_bytes)} of conditioning named instead of sent",
        )
    )


def size(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
