"""A call that is computed again finds its dicts and lists as they were, and they stay the same objects."""

from __future__ import annotations

from typing import Any

from sp_core.plans.probing import Contents


def test_what_was_put_in_or_taken_out_is_undone() -> None:
    inner: list[Any] = [1, {"kept": 2}]
    options: dict[str, Any] = {"steps": inner, "pair": ([3], 4)}
    deepest, in_tuple = inner[1], options["pair"][0]
    contents = Contents(options)
    deepest["kept"] = 5
    in_tuple.append(6)
    inner.clear()
    options["new"] = 7
    del options["pair"]
    assert contents.changed()
    contents.put_back()
    assert not contents.changed()
    assert options == {"steps": [1, {"kept": 2}], "pair": ([3], 4)}
    assert options["steps"] is inner and inner[1] is deepest and options["pair"][0] is in_tuple


def test_a_circle_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    contents = Contents(loop)
    loop[0] = 2
    contents.put_back()
    assert loop[0] == 1 and loop[1] is loop
