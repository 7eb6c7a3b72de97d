"""Starts a small pool on this machine's devices, whose workers measure themselves and the links between them."""

from __future__ import annotations

from typing import Any

from ..errors import SPError
from ..pool.coordinator import Pool
from ..pool.devices import WorkerDevice, accelerators, parse_devices
from ..pool.launcher import ServiceSpec


def chosen_devices() -> tuple[WorkerDevice, ...]:
    """All accelerators; two CPU workers where there are fewer than two."""
    kind, count = accelerators()
    return parse_devices("auto" if count > 1 else "cpu:2", kind, count)


def measure_links(devices: tuple[WorkerDevice, ...]) -> dict[str, Any]:
    """What :class:`.measuring_service.MeasuringService` answers: transport, rates, and bytes/s between each two devices.

    Returns ``error``, a sentence, instead where no pool can be started.
    """
    named: dict[str, Any] = {"devices": [str(device) for device in devices]}
    try:
        pool = Pool(devices, ServiceSpec("sp_core.doctor.measuring_service:MeasuringService"))
        try:
            pool.start()
            return named | pool.call("measure", None, doing="measuring the links")
        finally:
            pool.shutdown()
    except SPError as error:
        return named | {"error": str(error)}
