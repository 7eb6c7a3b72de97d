"""Pools of real worker processes with the service of these tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from campaign import within

from sp_core.pool.coordinator import Pool
from sp_core.pool.devices import parse_devices
from sp_core.pool.launcher import ServiceSpec

HERE = Path(__file__).parent
#: the workers find it by the fixture ``echo_service``
ECHO = ServiceSpec("echo_service:EchoService")


def make_pool(devices: str = "cpu:3") -> Pool:
    pool = Pool(parse_devices(devices, "cpu", 0), ECHO)
    pool.start()
    return pool


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + within(seconds)
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def in_a_block(pool: Pool) -> bool:
    """The ranks of the newest request have entered a block: a cancel now cannot stop them before the next one."""
    return pool.shared_state.header.leader_entered >> 20 == pool._request
