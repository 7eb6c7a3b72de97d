"""What to expect of the devices that were measured, in sentences. Pure functions."""

from __future__ import annotations

from typing import Any

from ..planner.choose import choose
from ..planner.cost import MeasuredRates, ModelShape, predict
from ..planner.decode_cost import decode_speed_up
from ..planner.degrees import Degrees
from ..planner.typical import MODELS
from .weights_verdict import weight_sentences

#: the models of the planner's table that most people run
EXPECTED = ("Wan 2.1/2.2 14B", "LTX-2", "HunyuanVideo")
#: below this, more devices are not worth their price
WORTHWHILE = 1.1


def expectations(rates: MeasuredRates, devices: int, may_idle: bool = True) -> list[dict[str, Any]]:
    """For each model: seconds of a forward on one device and on the best use of all, as plain data.

    The forward has two conditionings (CFG), which may be split. Where ``speed_up`` is 1, one device is as fast as
    any number.
    """
    rows = []
    for shape, size, tokens in MODELS:
        if shape.name not in EXPECTED:
            continue
        choice = choose(devices, 2, shape=shape, tokens=tokens, rates=rates, may_idle=may_idle)
        assert choice.cost is not None and choice.one_device is not None
        rows.append(
            {
                "model": shape.name,
                "size": size,
                "one_device_s": choice.one_device.total_s,
                "all_devices_s": choice.cost.total_s,
                "devices_used": choice.degrees.ranks,
                "degrees": choice.degrees.describe(),
                "speed_up": choice.one_device.total_s / choice.cost.total_s,
                "exchange_share": _exchange_share(shape, tokens, rates, choice.degrees),
            }
        )
    return rows


def _exchange_share(shape: ModelShape, tokens: int, rates: MeasuredRates, degrees: Degrees) -> float:
    cost = predict(shape, tokens, 2, rates, degrees)
    return (cost.exchange_s + cost.latency_s) / cost.total_s


def sentences(row: dict[str, Any], devices: int) -> str:
    """One row of :func:`expectations` for a person."""
    what = f"{row['model']} {row['size']}"
    if devices < 2:
        return f"{what}: one device, so no speed-up."
    if row["devices_used"] < 2 or row["speed_up"] < WORTHWHILE:
        return f"{what}: one device is faster. The exchange would take longer than the work it saves."
    idle = devices - row["devices_used"]
    text = (
        f"{what}: about {row['speed_up']:.1f} times as fast on {row['devices_used']} devices "
        f"({row['degrees']}; {100 * row['exchange_share']:.0f} % of the time in exchange)"
    )
    return text + (f". {idle} would stay idle, since more would be slower." if idle else ".")


def verdict(report: dict[str, Any]) -> list[str]:
    """The report's conclusions: what works, what does not, and what to expect. Never empty."""
    found = report["devices"]
    lines = [found["problem"]] if found.get("problem") else []
    count = len(found["accelerators"])
    links = report["links"]
    if "error" in links:
        return [*lines, f"No workers can be started: {links['error']}"]
    lines.append(f"Exchange: {links['reason']}.")
    if count < 2:
        what = "one accelerator" if count else "no accelerator"
        lines.append(
            f"This machine shows {what}: one device is faster. CPU workers (cpu:2) share its cores and exist to try things out; "
            "they bring no speed."
        )
        return lines + [sentences(row, count) for row in report["expected"]]
    lines += _peer_access(found)
    rates = measured(links)
    lines += [sentences(row, count) for row in report["expected"]]
    lines.append(decode_sentence(rates, count))
    lines += weight_sentences(rates, count)
    lines.append(
        f"Predicted from {rates.flops / 1e12:.3g} TFLOP/s a device, {rates.bandwidth / 1e9:.3g} GB/s that every device can send "
        f"at once, {rates.latency_s * 1e6:.3g} us a collective, all measured now. The text encoder takes what it took before."
    )
    return lines


def measured(links: dict[str, Any]) -> MeasuredRates:
    """The rates that the doctor's workers told."""
    told = {name: links[name] for name in ("flops", "bandwidth", "latency_s", "beside", "memory", "main_memory") if name in links}
    return MeasuredRates("this machine", **told)


def decode_sentence(rates: MeasuredRates, devices: int) -> str:
    """What SP VAE Patch brings, for a person."""
    faster = decode_speed_up(rates, devices)
    what = "Decode of 81 frames at 1280x720 (Wan 2.1's VAE)"
    if faster < WORTHWHILE:
        return f"{what}: SP VAE Patch may bring nothing. The exchange could take longer than the work it saves; try it."
    return f"{what}: with SP VAE Patch at least {faster:.1f} times as fast on {devices} devices, without it as fast as before."


def _peer_access(found: dict[str, Any]) -> list[str]:
    matrix = found.get("peer_access")
    if matrix is None:
        return []
    missing = [f"{a}-{b}" for a, row in enumerate(matrix) for b, access in enumerate(row) if a < b and not access]
    if not missing:
        return ["Every GPU can reach every other's memory."]
    return [f"No peer access between GPUs {', '.join(missing)}: their exchange goes through main memory, which is slower."]
