"""When two results count as the same: equal but for rounding, in every token."""

from __future__ import annotations

import pytest
import torch

from sp_core.plans.probing.options import WatchedOptions
from sp_core.plans.probing.parts import TOLERANCES, agree
from sp_core.plans.probing.probe import Probe

X = torch.randn(1, 4096, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    rounded = (x.float() * (1 + 0.2 * TOLERANCES[dtype])).to(dtype)
    assert agree(rounded, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_token_of_many_is_a_difference(dtype: torch.dtype) -> None:
    """Over all tokens it would drown: its share of the norm is far below the tolerance."""
    x = X.to(dtype)
    other = x.clone()
    other[0, 17] += 4 * TOLERANCES[dtype] * x[0, 17].float().norm().to(dtype)
    assert ((other.float() - x.float()).norm() / x.float().norm()).item() < TOLERANCES[dtype]
    assert not agree(other, x)


DIFFERENT = {
    "another shape": (X, X[:, 1:]),
    "another dtype": (X, X.double()),
    "NaN on one side": (X * torch.nan, X),
    "NaN on both sides": (X * torch.nan, X * torch.nan),
    "a tuple and a list": ((X,), [X]),
    "another key": ({"x": X}, {"y": X}),
    "another number": ((X, 1), (X, 2)),
    "nothing": (None, X),
    "another mask": (X > 0, X > 1),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_is_different(name: str) -> None:
    mine, theirs = DIFFERENT[name]
    assert not agree(mine, theirs)


def test_trees_are_compared_part_by_part() -> None:
    assert agree({"x": (X, None), "n": 3}, {"x": (X.clone(), None), "n": 3})
    assert not agree({"x": (X, X + 1)}, {"x": (X, X)})


OPTIONS = {"sigmas": torch.ones(1), "block_index": 3, "sample_sigmas": torch.ones(4)}


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda o: o["block_index"], None),
        (lambda o: o.get("another"), None),
        (lambda o: o.copy()["block_index"], None),
        (lambda o: o["sigmas"], "sigmas"),
        (lambda o: "sigmas" in o, "sigmas"),
        (lambda o: {**o}, "sample_sigmas"),
        (lambda o: dict(o), "sample_sigmas"),
        (lambda o: o | {"block_index": 1}, "sample_sigmas"),
        (lambda o: list(o.items()), "sample_sigmas"),
        (lambda o: o.update(block_index=4), "keeps state"),
        (lambda o: o.setdefault("cache", []), "keeps state"),
    ],
)
def test_what_is_read_of_the_options_is_noticed(read: object, why: str | None) -> None:
    probe = Probe("code", read, [], [OPTIONS], torch.device("cpu"))
    options = probe.watched(OPTIONS)
    assert isinstance(options, WatchedOptions)
    probe.whole(lambda: read(options))  # type: ignore[operator]
    assert probe.why is None if why is None else why in (probe.why or ""), probe.why
