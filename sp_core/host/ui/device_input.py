"""The nodes' input ``devices``: which devices the text names, and whether these can work together."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import SPError
from ...pool.devices import WorkerDevice, accelerators, maker, parse_devices, platform_problem
from .recipe import OUR_NODES, VAE_NODE

log = logging.getLogger(__name__)


def check_devices(devices: str) -> bool | str:
    """True, or the sentence that says why the text names no devices that exist and can work together."""
    try:
        chosen = named_devices(devices)
    except ValueError as error:
        return str(error)
    return why_not_together(chosen) or True


def named_devices(devices: str) -> tuple[WorkerDevice, ...]:
    """The devices that the text names, in its order; none where ``auto`` finds no accelerator.

    Raises:
        ValueError: it names none that exist.
    """
    if not isinstance(devices, str):  # over a wire of any type
        raise ValueError(f"'{devices}' is no device list: it is no text. Write auto, indices such as 0,1,3, or cpu:4")
    return parse_devices(devices, *accelerators())


def several_devices(devices: str, what: str) -> tuple[WorkerDevice, ...] | None:
    """The devices that ``what`` (the model, the VAE) is shared out over; None, with a line in the log, where it stays as it is.

    Raises:
        SPError: they cannot work together on this system.
        ValueError: ``devices`` names none that exist.
    """
    chosen = named_devices(devices)
    if len(chosen) < 2:
        why = f"one device ({chosen[0]}) is nothing to share" if chosen else "no accelerator is visible"
        log.info("SP: %s; the %s stays as it is", why, what)
        return None
    if problem := why_not_together(chosen):
        raise SPError(problem)
    return chosen


def named_lists(nodes: Iterable[Mapping[str, Any]]) -> set[tuple[WorkerDevice, ...]] | None:
    """The device lists of a prompt's SP nodes; None where one comes over a wire and is not known."""
    found = set()
    for node in nodes:
        text = node["inputs"].get("devices") if node["class_type"] in (*OUR_NODES, VAE_NODE) else None
        if isinstance(text, list):
            return None
        with contextlib.suppress(ValueError):
            found |= {named_devices(text)} if text is not None else set()
    return found


def why_not_together(devices: tuple[WorkerDevice, ...]) -> str | None:
    """Why these devices cannot work together on this system. A single device is never a problem, because it is not used."""
    return platform_problem(platform.system(), maker(devices[0].kind)) if len(devices) > 1 else None
