"""The public functions are there, and importing the package stays free of side effects."""

from __future__ import annotations

import subprocess
import sys

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


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import sp_core; print([m for m in sys.modules if m not in before and 'torch' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
