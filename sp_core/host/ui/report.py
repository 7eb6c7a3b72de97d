"""SP Sampler's report: a few lines that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .remote_model import RemoteModel

#: share of a model's bytes that counts as all of them: ComfyUI leaves small tensors out of its count
ALL_THERE = 0.99


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
            *([run.compiled] if run.compiled else []),
            *run.foreign.values(),
            *([run.weights_line] if run.weights_line else []),
            *([] if run.gathered_bytes else weights_on_devices(run.weights, sp.weight_bytes)),
            f"to the workers: {size(run.sent_bytes)} sent, {size(run.reused_bytes)} of conditioning named instead of sent",
        )
    )


def weights_on_devices(held: Sequence[int], total: int) -> list[str]:
    """A line where the weights of a rank are not all on its device, which slows every rank; else none.

    It also tells who may get another last digit: a quantised weight with a LoRA is rounded only where it stays on the device.

    Args:
        held: bytes of each rank, 0 for one that had nothing to compute. They are of all its models, so a line may be missing
            where a rank holds another model too.
        total: bytes of this model.
    """
    short = [f"{size(count)} on rank {rank}" for rank, count in enumerate(held) if 0 < count < ALL_THERE * total]
    if not short:
        return []
    return [
        f"weights: not all {size(total)} are on the device ({', '.join(short)}): the rest comes from main memory in each forward. "
        "Quantised weights with a LoRA are then rounded on some ranks only"
    ]


def size(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
