"""What a browser is told while the workers start, load and compute."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from host.graphs import Branch, Link
from host.observe import video

from sp_core.demo.comfy_server import ComfyServer

#: types of binary messages: a line of text for a node; a picture, in a host's older and newer form
TEXT, PICTURE = 3, (1, 4)


@pytest.fixture(scope="module")
def own_flags() -> tuple[str, ...]:
    return ("--preview-method", "latent2rgb")


@dataclass
class Seen:
    #: under nodes
    lines: list[str] = field(default_factory=list)
    #: of the sampler's own bar
    steps: list[int] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)


async def watch(server: ComfyServer, prompt: dict[str, Any]) -> Seen:
    """What a browser is sent until the prompt ends."""
    seen = Seen()
    address = f"http://127.0.0.1:{server.port}"
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws?clientId=browser") as socket:
        async with session.post(f"{address}/prompt", json={"prompt": prompt, "client_id": "browser"}) as answer:
            assert answer.status == 200, await answer.text()
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                kind, length = struct.unpack(">II", message.data[:8])
                if kind == TEXT:
                    seen.lines.append(message.data[8 + length :].decode())
                elif kind in PICTURE:
                    seen.previews.append(message.data[8:])
                continue
            event = json.loads(message.data)
            if event["type"] == "progress":
                seen.steps.append(event["data"]["value"])
            if event["type"] in ("execution_success", "execution_error"):
                assert event["type"] == "execution_success", event
                return seen
    raise AssertionError("the server closed the connection")


def slow_step(branch: Branch, model: Link) -> Link:
    return branch.add("SPTestFault", model=model, rank=0, call=3, kind="slow")[0]


def slow_to_load(seconds: float) -> Callable[[Branch, Link], Link]:
    return lambda branch, model: branch.add("SPTestSlowInWorkers", model=model, seconds=seconds)[0]


@pytest.mark.campaign
def test_the_node_says_what_the_workers_do(own: ComfyServer) -> None:
    prompt, _ = video("cpu:2", change=slow_step, steps=3)
    seen = asyncio.run(asyncio.wait_for(watch(own, prompt), 200))
    lines, steps = seen.lines, seen.steps
    print("\n" + "\n".join(dict.fromkeys(lines)))
    joined = re.search(r"2 workers joined after ([0-9.]+) s", own.log())
    # what is over in two seconds needs no line
    assert joined and (float(joined[1]) < 3 or any(re.search(r"SP: starting workers [012]/2", line) for line in lines))
    assert any(re.search(r"SP: a forward of WanModel, block [123]/3", line) for line in lines)
    # the host may join two of its own bar's news that follow one another closely
    assert steps == sorted(steps) and steps[-1] == 3 and len(set(steps)) > 1, f"the sampler's own bar: {steps}"
    assert len(set(seen.previews)) > 1, "no previews, or always the same"


def test_the_node_says_how_much_of_the_weights_has_arrived(own: ComfyServer) -> None:
    """With workers that are there already: what they import at first would be more memory than a tiny model."""
    for seconds in (0.1, 5.0):
        prompt, _ = video("cpu:2", change=slow_to_load(seconds), steps=1)
        lines = asyncio.run(asyncio.wait_for(watch(own, prompt), 200)).lines
    said = list(dict.fromkeys(line for line in lines if line.startswith("SP: loading the model")))
    print("\n" + "\n".join(said))
    arrived = [int(match[1]) for line in said if (match := re.search(r"SP: loading the model, loading weights (\d+) %", line))]
    # how many of the ten parts are seen depends on how often a busy machine lets anybody look
    assert arrived == sorted(arrived) and len(arrived) >= 3 and 0 <= arrived[0] < 80 and arrived[0] < arrived[-1] <= 100, said
