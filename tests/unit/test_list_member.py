"""Which member of a list a worker takes for a MODEL."""

from __future__ import annotations

import pytest

from sp_core.errors import SPError
from sp_core.host.worker.replay import member_of


@pytest.mark.parametrize(
    ("values", "list_index", "member"),
    [("a", None, "a"), ("a", 0, "a"), ("a", 3, "a"), ("abc", 0, "a"), ("abc", 1, "b"), ("abc", 2, "c"), ("abc", 7, "c")],
)
def test_the_member_is_the_one_that_comfyui_takes(values: str, list_index: int | None, member: str) -> None:
    assert member_of(list(values), list_index, "Loader-1") == member


def test_a_list_without_an_index_is_refused() -> None:
    with pytest.raises(SPError, match="Loader-1 gave a list of 2 models"):
        member_of(["a", "b"], None, "Loader-1")
