"""Compiled blocks over ranks against one process: every family, how many graphs, and what may not be missed in one."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign import parameters
from distributed.ranks import RankPool
from host.compiled_ranks import Ranks, attention_of_a_pack, attention_that_looks_at_no_options
from host.families import FAMILIES
from host.graphs import TOLERANCE

EVERY = [(family, name) for family, description in FAMILIES.items() for name in description.forwards]


@pytest.fixture(scope="module")
def ranks(comfyui: Path) -> Iterator[RankPool]:
    with RankPool(3, functools.partial(Ranks, str(comfyui))) as pool:
        yield pool


def ask(ranks: RankPool, size: int, family: str, forwards: list[Any], *, failure: bool = False, **settings: Any) -> list[dict[str, Any]]:
    answers = [answer for answer in ranks.call(size, family, forwards, settings, timeout=600) if answer is not None]
    assert len(answers) == size
    if "missing" in answers[0]:
        pytest.skip(f"this ComfyUI has no {answers[0]['missing']}")
    print(f"\n{family} on {size}: { {name: value for name, value in answers[0].items() if name != 'texts'} }")
    if not failure:
        assert not [answer for answer in answers if "failure" in answer], answers[0].get("failure")
        for answer in answers:
            assert max(answer["errors"]) <= TOLERANCE
        if settings.get("dynamic") is not False:
            # so that they share a compile cache, however unequal their tokens are
            assert all(answer["texts"] == answers[0]["texts"] for answer in answers), difference(*(a["texts"] for a in answers[:2]))
    return answers


def difference(first: list[str], second: list[str]) -> str:
    return "\n".join(difflib.unified_diff("\n".join(first).splitlines(), "\n".join(second).splitlines(), lineterm="", n=0))


@pytest.mark.parametrize(
    ("family", "name", "size", "backend"),
    parameters(
        plain=[("VACE", "one control", 2, "eager"), ("HunyuanVideo", "text", 3, "eager")],
        campaign=[(family, name, size, "aot_eager") for family, name in EVERY for size in (2, 3)],
    ),
)
def test_same_as_one_process(ranks: RankPool, family: str, name: str, size: int, backend: str) -> None:
    for answer in ask(ranks, size, family, [name, name], backend=backend):
        before, behind = answer["graphs"]
        assert before == behind, "the second forward compiled again"
        assert not answer["breaks"] and not answer["uncompiled"] and not answer["refusals"]
        assert name == "three tokens" or before > 0


@pytest.mark.parametrize("dynamic", parameters(plain=[None], campaign=[True]))
def test_few_graphs(ranks: RankPool, dynamic: bool | None) -> None:
    """7 and 8 tokens are 3, 2, 2 and 3, 3, 2: equally many of rank 0's own."""
    sizes = [(3, 6, 10), (3, 6, 10), (4, 8, 6), (3, 6, 10), (7, 2, 2), (8, 2, 2), (7, 2, 2)]
    for answer in ask(ranks, 3, "Camera", sizes, dynamic=dynamic):
        assert answer["graphs"][0] == answer["graphs"][1]
        assert answer["graphs"][-1] <= 3, "one kind of blocks"
        assert not answer["breaks"] and not answer["uncompiled"]
        assert len({*answer["exchanges"]}) == 1


@pytest.mark.campaign
def test_only_one_rank_compiles(ranks: RankPool, tmp_path: Path) -> None:
    """53 and 52 tokens: the other rank finds the first one's graph in the cache."""
    first, *others = ask(ranks, 2, "Camera", [(3, 10, 14)], backend="inductor", cache=str(tmp_path))
    assert first["miss"] and not first["hit"] and not first["bypass"]
    for answer in others:
        assert answer["hit"] and not answer["miss"] and not answer["bypass"]


def test_an_attention_that_asks_nobody_is_noticed(ranks: RankPool) -> None:
    for answer in ask(ranks, 2, "Camera", ["none"], failure=True, around=attention_that_looks_at_no_options):
        assert answer.get("kind") == "Escaped", answer
        assert "self_attn of block 0" in answer["failure"]
    ask(ranks, 2, "Camera", ["none"])


@pytest.mark.parametrize("fullgraph", parameters(plain=[True], campaign=[False]))
def test_a_function_that_is_no_operator(ranks: RankPool, fullgraph: bool) -> None:
    """It breaks the graph, and where the user wants no break the block runs uncompiled."""
    for answer in ask(ranks, 2, "Camera", ["none", "none"], fullgraph=fullgraph, around=attention_of_a_pack):
        assert bool(answer["uncompiled"]) == fullgraph and bool(answer["breaks"]) != fullgraph, answer


#: families with a block that attends itself, then those where a module of the block does
FAILING = [("Flux", "text"), ("HunyuanVideo", "text"), ("CogVideoX", "text"), ("Stable Diffusion 3.5 medium", "text"), ("Camera", "none")]


@pytest.mark.parametrize(("family", "name"), parameters(plain=FAILING[:2], campaign=FAILING[2:]))
def test_where_one_rank_fails_to_compile_all_go_on_together(ranks: RankPool, family: str, name: str) -> None:
    """In that forward the rank that failed runs its next blocks uncompiled, while the other one runs the same blocks compiled."""
    answers = ask(ranks, 2, family, [name] * 3, fails_on=1)
    (begun, *later), (failed, *then) = (answer["calls_uncompiled"] for answer in answers)
    assert begun == 0 < failed
    # from the next forward on no rank runs a block compiled
    assert later == then == [max(then)] * 2 and max(then) > failed
    for answer in answers:
        assert answer["refusals"] and all("eager: a fault of the backend" in why for why in answer["refusals"].values())
    assert len({count for answer in answers for count in answer["exchanges"]}) == 1
