"""Block-sparse attention by torch's flex_attention, compiled for this CPU: the kernel goes by the tables of our block mask.

It is the kernel of a CPU, in the place of a GPU's that this machine does not have; the tables are the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_core.attention import block_sparse, flex_tiles
from sp_core.attention.block_sparse import BlockSparse

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++, which is not here"),
]
GRIDS = {"whole tiles": ((8, 12, 8), (8, 12, 8)), "odd": ((6, 5, 7), (9, 10, 6)), "one frame": ((1, 9, 8), (5, 9, 8))}


def given(grids: tuple[Any, Any]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    setting = BlockSparse(0.5)
    sizes = [torch.tensor(grid).prod().item() for grid in (grids[0], grids[1], grids[1])]
    q, k, v = (torch.randn(1, 2, size, 32, generator=generator).cumsum(2) / 8 for size in sizes)
    (q, q_real), (k, k_real), (v, _) = (
        block_sparse.to_tiles(x, grid, (4, 4, 4)) for x, grid in zip((q, k, v), (grids[0], grids[1], grids[1]), strict=True)
    )
    index, counts = block_sparse.keep(block_sparse._means(q, q_real), block_sparse._means(k, k_real), setting)
    return q, k, v, index, counts, k_real


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_the_compiled_kernel_gives_the_gathered_result(grids: tuple[Any, Any]) -> None:
    arguments = given(grids)
    with torch.inference_mode():
        difference = (flex_tiles.attend_tiles(*arguments) - block_sparse._attend(*arguments)).abs().max().item()
    print(f"\nmax abs difference {difference:.1e}")
    assert difference <= 1e-5


def test_the_kernel_never_sees_a_tile_that_was_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask that allows everything, only the tables are left to say what was kept."""

    def allows_everything(kept: Tensor, real: Tensor | None, sizes: tuple[int, int]) -> Callable[..., Tensor]:
        return lambda b, h, query, key: query >= 0

    monkeypatch.setattr(flex_tiles, "_mask_of", allows_everything)
    arguments = given(GRIDS["whole tiles"])
    with torch.inference_mode():
        out = flex_tiles.attend_tiles(*arguments)
    assert (out - block_sparse._attend(*arguments)).abs().max() <= 1e-5
