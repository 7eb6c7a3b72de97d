"""Every family's forwards over ranks against one process: each conditioning variant, heads and tokens that do not divide."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import campaign
import pytest
from campaign import parameters
from distributed.ranks import RankPool
from host.families import FAMILIES
from host.family_ranks import serve
from host.foreign_attention import forwards_that_see_all_tokens, function_without_options
from host.graphs import TOLERANCE

#: (family, sizes of the group beside 2, 3 and 4)
UNEVEN_HEADS = {
    "MiniMax-H3, 56 heads": (3, 5),
    "MiniMax-H3, 56 heads in groups": (3, 5),
    "HunyuanVideo, 24 heads": (5,),
    "HunyuanVideo 1.5, 16 heads": (3, 5),
}
ALL = [
    (family, name, size)
    for family, description in FAMILIES.items()
    for name in description.forwards
    for size in UNEVEN_HEADS.get(family, (2, 3, 4))
]
_PLAIN = [case for case in ALL if (chosen := FAMILIES[case[0]].plain) is None or case[1:] in chosen]
CASES = campaign.parameters(plain=_PLAIN, campaign=[case for case in ALL if case not in _PLAIN])
TILED = [
    ("VACE", "one control"),
    ("HunyuanVideo", "text"),
    ("HunyuanVideo", "token replace"),
    ("HunyuanVideo", "reference"),
    ("HuMo", "sound"),
]


@pytest.fixture(scope="module")
def ranks(comfyui: Path) -> Iterator[RankPool]:
    with RankPool(5, functools.partial(serve, str(comfyui))) as pool:
        yield pool


def check(ranks: RankPool, family: str, name: str, size: int, layout: str = "auto", weights: tuple[int, ...] = ()) -> str:
    answers = [answer for answer in ranks.call(family, name, size, layout, weights, timeout=300) if answer is not None]
    assert len(answers) == size
    if "missing" in answers[0]:
        pytest.skip(f"this ComfyUI has no {answers[0]['missing']}")
    assert not [answer for answer in answers if "failure" in answer], answers[0].get("failure")
    assert answers[0]["alive"] > 1e-2, "the stock output is empty: the case compares nothing"
    on = f"{size}{f' by {weights}' if weights else ''}"
    print(f"\n{family}, {name} on {on}: relative L2 {', '.join(f'{e:.1e}' for e in answers[0]['errors'])}; {answers[0]['layout']}")
    assert max(answers[0]["errors"]) <= TOLERANCE
    assert len({answer["bits"] for answer in answers}) == 1, "the ranks' outputs differ"
    assert answers[0]["width"] == FAMILIES[family].width, "the planner does not know this model's shape"
    return answers[0]["layout"]


@pytest.mark.parametrize(("family", "name", "size"), CASES)
def test_same_as_one_process(ranks: RankPool, family: str, name: str, size: int) -> None:
    layout = check(ranks, family, name, size)
    assert layout != "not split" or name == "three tokens"


@pytest.mark.parametrize(("family", "name"), TILED)
def test_in_tiles(ranks: RankPool, family: str, name: str) -> None:
    assert "tiles" in check(ranks, family, name, 4, "tiles")


#: weights of ranks that are not equally fast; the plain run has one forward of each family with the first two
WEIGHTS = ((3, 1), (2, 1, 1), (5, 3))
FIRST = [(family, next(iter(description.forwards)), weights) for family, description in FAMILIES.items() for weights in WEIGHTS[:2]]
EVERY = [(family, name, weights) for family, description in FAMILIES.items() for name in description.forwards for weights in WEIGHTS]


@pytest.mark.parametrize(("family", "name", "weights"), parameters(plain=FIRST, campaign=[case for case in EVERY if case not in FIRST]))
def test_with_unequal_shares(ranks: RankPool, family: str, name: str, weights: tuple[int, ...]) -> None:
    check(ranks, family, name, len(weights), weights=weights)


#: families whose attention hands no transformer options on
WITHOUT_OPTIONS = parameters(plain=["PixArt", "Hunyuan DiT"], campaign=["ErnieImage"])


@pytest.mark.parametrize("family", WITHOUT_OPTIONS)
def test_a_forward_of_a_pack_on_an_attention_without_options(ranks: RankPool, family: str) -> None:
    for answer in ranks.call(family, "text", 3, "auto", (), forwards_that_see_all_tokens)[:3]:
        assert "failure" not in answer, answer["failure"]
        assert max(answer["errors"]) <= TOLERANCE
        assert answer["whole"] == ["foreign"] and answer["layout"] != "not split"


@pytest.mark.parametrize("family", WITHOUT_OPTIONS)
def test_a_function_of_a_pack_that_takes_no_options(ranks: RankPool, family: str) -> None:
    """Nobody can have it exchange, so the forward is computed again on each device, whole."""
    for answer in ranks.call(family, "text", 2, "auto", (), function_without_options)[:2]:
        assert answer.get("kind") == "Escaped", answer
        assert "another node replaced the attention function" in answer["failure"]


def test_fewer_heads_than_ranks_where_the_attention_computes_on_its_own_heads(ranks: RankPool) -> None:
    """By its share the second rank gets a token and no head."""
    for answer in ranks.call("SeedVR2", "picture", 2, "auto", (30, 1))[:2]:
        assert answer.get("kind") == "TooFewHeads", answer
        assert "attn of block 0 has 5 heads for 2 devices, and one would get none" in answer["failure"]
    check(ranks, "SeedVR2", "picture", 3)
