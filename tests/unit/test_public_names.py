"""The public functions are there, and each says what it raises and where it comes from."""

from __future__ import annotations

import pytest

import sp_core

NAMES = [
    "pad_modality_for_uniform_sharding",
    "compute_sequence_partition",
    "tile_modality_for_rank",
    "send_recv_heads",
    "gather_heads",
    "gather_output_tokens",
    "init_context_parallel",
    "get_optimal_split",
    "split_tensor_in_cp_2d",
    "split_cp_2d",
    "gather_cp_2d",
    "cp_broadcast",
]


@pytest.mark.parametrize("name", NAMES)
def test_public_function(name: str) -> None:
    function = getattr(sp_core, name)
    assert name in sp_core.__all__
    assert "Raises:" in function.__doc__
    assert "Source: " in function.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        sp_core.nothing_here  # noqa: B018
