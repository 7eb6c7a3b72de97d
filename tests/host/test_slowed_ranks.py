"""A worker that is slow on purpose: without a word of the user it gets less of the work, with the stock picture."""

from __future__ import annotations

import re

import pytest
from host.graphs import compare
from host.test_degrees import wan

from sp_core import settings
from sp_core.demo.comfy_server import ComfyServer


@pytest.fixture(scope="module")
def own_environment() -> dict[str, str]:
    return {settings.SLOWED: "1:4"}


@pytest.mark.campaign
def test_a_slow_rank_gets_less_of_the_work(own: ComfyServer) -> None:
    decision = compare(own, wan, "cpu:2", cfg_split=1).decision
    found = re.search(r"shares 100:(\d+)", decision)
    assert found, decision
    assert int(found[1]) < 50
    assert "shares" not in compare(own, wan, "cpu:2", cfg_split=1, shares="equal").decision
