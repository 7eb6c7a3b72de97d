"""Block-sparse attention: the reference's outputs and selections, and sizes that do not divide against a dense formulation."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from safetensors import safe_open
from torch import Tensor

from sp_core.attention import block_sparse, flex_tiles
from sp_core.attention.block_sparse import BlockSparse, block_sparse_attention
from sp_core.errors import SPError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SHAPES = ("self", "cross", "chunks", "none", "cdf", "cdf_topk")
KEPT = json.loads((FIXTURES / "longcat_avatar_vectors.json").read_text())["bsa_kept_tiles"]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    with safe_open(str(FIXTURES / "longcat_bsa.safetensors"), "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("dit.")}  # noqa: SIM118
        return {**tensors, "shapes": json.loads(file.metadata()["shapes"])}


def setting_of(shape: dict[str, Any]) -> BlockSparse:
    return BlockSparse(shape["sparsity"], shape["cdf_threshold"], shape["query_chunk"], shape["key_chunk"])


def selected(q: Tensor, k: Tensor, grids: tuple[Any, Any], setting: BlockSparse) -> Tensor:
    """Which tiles of keys each tile of queries keeps, bool (B, H, Q, K)."""
    tiles = [
        block_sparse.to_tiles(x, grid, tile) for x, grid, tile in zip((q, k), grids, (setting.query_tile, setting.key_tile), strict=True)
    ]
    q_means, k_means = (block_sparse._means(*tiled) for tiled in tiles)
    index, counts = block_sparse.keep(q_means, k_means, setting)
    real = torch.arange(index.size(-1)) < (torch.full(index.shape[:3], index.size(-1)) if counts is None else counts)[..., None]
    return torch.zeros(*index.shape[:3], k_means.size(2), dtype=torch.bool).scatter(-1, index, real)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(data: dict[str, Any], name: str) -> None:
    shape = data["shapes"][name]
    q, k, v = (data[f"{name}.in.{x}"] for x in "qkv")
    grids = (shape["query_thw"], shape["key_thw"])
    assert torch.equal(selected(q, k, grids, setting_of(shape)), data[f"{name}.selected"])
    out = block_sparse_attention(q, k, v, *grids, setting_of(shape))
    difference = (out - data[f"{name}.out"]).abs().max().item()
    print(f"\n{name}: max abs difference {difference:.1e}")
    assert difference <= 1e-5


@pytest.mark.parametrize("vector", KEPT, ids=lambda vector: f"{vector['sparsity']} of {vector['tiles']}")
def test_how_many_tiles_are_kept(vector: dict[str, Any]) -> None:
    assert BlockSparse(vector["sparsity"]).kept((4 * vector["tiles"], 4, 4)) == vector["kept"]


def dense(q: Tensor, k: Tensor, v: Tensor, grids: tuple[Any, Any], setting: BlockSparse) -> Tensor:
    """Token by token, without tiles of tensors: which tile a token is in, means by tile, one mask for all tokens."""

    def tile_of(grid: Any, edges: Any) -> Tensor:
        t, y, x = torch.meshgrid(*[torch.arange(size) // edge for size, edge in zip(grid, edges, strict=True)], indexing="ij")
        _, rows, columns = [-(-size // edge) for size, edge in zip(grid, edges, strict=True)]
        return ((t * rows + y) * columns + x).flatten()

    q_tile, k_tile = tile_of(grids[0], setting.query_tile), tile_of(grids[1], setting.key_tile)
    q_means, k_means = (
        torch.stack([x[:, :, tile == i].mean(2) for i in range(int(tile.max()) + 1)], 2) for x, tile in ((q, q_tile), (k, k_tile))
    )
    count = int((1 - setting.sparsity) * k_means.size(2))  # type: ignore[operator]
    scores = torch.einsum("bhqd,bhkd->bhqk", q_means, k_means)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)
    assert torch.equal(kept, selected(q, k, grids, setting))
    return nnf.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, :, q_tile][..., k_tile])


@pytest.mark.parametrize(
    ("query_grid", "key_grid"),
    [((7, 10, 13), (7, 10, 13)), ((1, 9, 8), (5, 9, 8)), ((4, 8, 8), (9, 8, 8)), ((6, 5, 3), (6, 5, 3)), ((3, 3, 3), (8, 6, 6))],
    ids=str,
)
@pytest.mark.parametrize("sparsity", [0.75, 0.5])
def test_sizes_that_do_not_divide(query_grid: Any, key_grid: Any, sparsity: float) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [torch.tensor(grid).prod().item() for grid in (query_grid, key_grid, key_grid)]
    # a slow change over the video, so that tiles differ by more than rounding
    q, k, v = (torch.randn(2, 3, size, 16, generator=generator).cumsum(2) / 8 for size in sizes)
    setting = BlockSparse(sparsity)
    if not setting.kept(key_grid):
        assert not block_sparse_attention(q, k, v, query_grid, key_grid, setting).any()
        return
    out = block_sparse_attention(q, k, v, query_grid, key_grid, setting)
    assert (out - dense(q, k, v, (query_grid, key_grid), setting)).abs().max() <= 1e-5


def test_chunks_change_nothing(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = data["shapes"]["self"]
    arguments = (*(data[f"self.in.{x}"] for x in "qkv"), shape["query_thw"], shape["key_thw"], setting_of(shape))
    whole = block_sparse_attention(*arguments)
    monkeypatch.setattr(block_sparse, "_CHUNK_BYTES_OF_A_CPU", 5 * 2 * 2 * 64 * 16 * 4)
    torch.testing.assert_close(block_sparse_attention(*arguments), whole, atol=1e-6, rtol=0)


def test_keeping_everything_is_dense_attention() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 5 * 6 * 7, 16, generator=generator) for _ in range(3))
    out = block_sparse_attention(q, k, v, (5, 6, 7), (5, 6, 7), BlockSparse(0.0))
    torch.testing.assert_close(out, nnf.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=0)


# -- torch's flex_attention -----------------------------------------------------------------


def tiled(q: Tensor, k: Tensor, v: Tensor, grids: tuple[Any, Any], setting: BlockSparse) -> tuple[Any, ...]:
    """What both ways to compute are given."""
    (q, q_real), (k, k_real), (v, _) = (
        block_sparse.to_tiles(x, grid, tile)
        for x, grid, tile in ((q, grids[0], setting.query_tile), (k, grids[1], setting.key_tile), (v, grids[1], setting.key_tile))
    )
    index, counts = block_sparse.keep(block_sparse._means(q, q_real), block_sparse._means(k, k_real), setting)
    return q, k, v, index, counts, k_real


@pytest.fixture
def flex() -> Iterator[Any]:
    """torch's own function, uncompiled: it computes all scores and masks them by the block mask's function."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield flex_attention
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "none"])
def test_flex_attention_with_our_block_mask_is_the_gathered_result(data: dict[str, Any], name: str, flex: Any) -> None:
    shape = data["shapes"][name]
    given = tiled(*(data[f"{name}.in.{x}"] for x in "qkv"), (shape["query_thw"], shape["key_thw"]), setting_of(shape))
    out = flex_tiles.attend_tiles(*given, flex=flex)
    assert (out - block_sparse._attend(*given)).abs().max() <= 1e-5
    assert (block_sparse.from_tiles(out, shape["query_thw"], shape["query_chunk"]) - data[f"{name}.out"]).abs().max() <= 1e-5


def odd_tiles(sparsity: float = 0.5) -> tuple[Any, ...]:
    """Tiles that no token fills up, at the end of every direction."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 6 * 5 * 7, 16, generator=generator).cumsum(2) / 8 for _ in range(3))
    return tiled(q, k, v, ((6, 5, 7), (6, 5, 7)), BlockSparse(sparsity))


def test_flex_attention_where_sizes_do_not_divide(flex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = odd_tiles()
    expected = block_sparse._attend(*given)
    assert (flex_tiles.attend_tiles(*given, flex=flex) - expected).abs().max() <= 1e-5
    # one head at a time
    monkeypatch.setattr(flex_tiles, "_TABLE_BYTES", 1)
    assert (flex_tiles.attend_tiles(*given, flex=flex) - expected).abs().max() <= 1e-5


def test_tables_of_the_block_mask_are_the_selection() -> None:
    """What a kernel goes by: whole tiles and those with a mask, together those that were kept, each once."""
    q, k, _, index, counts, real = odd_tiles()
    mask = flex_tiles.block_mask(index, counts, real, (q.size(2), k.size(2)), (64, 64))
    whole = real.all(1)
    for b, h, row in itertools.product(range(2), range(3), range(q.size(2))):
        listed = [
            indices[b, h, row, : numbers[b, h, row]].tolist()
            for numbers, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        ]
        assert sorted(listed[0] + listed[1]) == sorted(index[b, h, row].tolist())
        assert not whole[listed[0]].any() and whole[listed[1]].all()
        assert all(tiles == sorted(tiles) for tiles in listed)
    assert mask.full_kv_num_blocks.any() and mask.kv_num_blocks.any()


@pytest.mark.parametrize(
    ("heads", "each", "at_once"), [(32, 2**20, 32), (32, 75 * 2**20, 2), (12, 60 * 2**20, 4), (5, 100 * 2**20, 1), (3, 2**30, 1)]
)
def test_heads_of_one_call(heads: int, each: int, at_once: int) -> None:
    assert flex_tiles._heads_at_once(heads, each) == at_once


def test_the_choice_is_for_cuda(monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]) -> None:
    """On a CPU the gathered form computes, whatever was chosen."""
    monkeypatch.setattr(flex_tiles, "_compiled", lambda: pytest.fail("compiled on a CPU"))
    shape = data["shapes"]["self"]
    arguments = (*(data[f"self.in.{x}"] for x in "qkv"), shape["query_thw"], shape["key_thw"])
    chosen = BlockSparse(shape["sparsity"], flex=True)
    assert torch.equal(block_sparse_attention(*arguments, chosen), block_sparse_attention(*arguments, BlockSparse(shape["sparsity"])))


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("no kernel here\nmore")

    monkeypatch.setattr(flex_tiles, "_compiled", lambda: fails)
    with pytest.raises(
        SPError, match=r"for cpu \(NotImplementedError: no kernel here\): set kernel of LongCat Block-Sparse Attention to gather"
    ):
        flex_tiles.attend_tiles(*odd_tiles())
