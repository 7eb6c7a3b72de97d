"""Meshes, 2-D split and gather, and the exchange functions, against the reference's vectors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import RankPools

import sp_core
from sp_core.parallel.mesh import Meshes

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "longcat_vectors.json").read_text())


def split_and_gather(rank: int, world_size: int) -> None:
    vector = VECTORS["split_T2_H4_W8"][str(world_size)]
    mesh = sp_core.init_context_parallel(world_size, rank, world_size)
    split = sp_core.get_optimal_split(world_size)
    assert split == tuple(vector["split_hw"])
    raster_BTHWC = torch.arange(64.0).view(1, 2, 4, 8, 1)
    for tile in (sp_core.split_tensor_in_cp_2d(raster_BTHWC, (2, -2), split, mesh), sp_core.split_cp_2d(raster_BTHWC, (2, 3), split, mesh)):
        assert tile.flatten().tolist() == vector["local_raster_ids"][rank]
    whole = sp_core.gather_cp_2d(tile.flatten(1, 3), (2, 4, 8), split, mesh)
    assert whole.flatten().tolist() == list(range(64))

    # 8 heads, as in the reference's run: value = 1000 * head + raster id
    ids = torch.tensor(vector["local_raster_ids"][rank])
    x_BtHD = (ids[:, None] + 1000 * torch.arange(8)).view(1, -1, 8, 1)
    counts = (len(ids),) * world_size
    y_BThD, z_BThD = sp_core.send_recv_heads(x_BtHD, x_BtHD + 1, token_counts=counts, group=mesh.cp.group)
    mine = range(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    assert (y_BThD[0, :, 0, 0] - 1000 * mine[0]).tolist() == vector["sequence_order_after_all_to_all"]
    assert torch.equal(y_BThD[0, 0, :, 0] - vector["sequence_order_after_all_to_all"][0], 1000 * torch.tensor(mine))
    assert torch.equal(z_BThD, y_BThD + 1)
    back = sp_core.gather_heads(y_BThD, num_heads=8, token_counts=counts, group=mesh.cp.group)
    assert torch.equal(back, x_BtHD)


def gradients(rank: int, world_size: int) -> None:
    # a 2 x 4 frame on [1, 2] or [2, 2] tiles; loss_r = (r + 1) * sum of the tile
    vector = VECTORS["backward"][f"split_cp{world_size}"][rank]
    mesh = sp_core.init_context_parallel(world_size)
    split = sp_core.get_optimal_split(world_size)
    frame = torch.arange(8.0).view(1, 1, 2, 4, 1).requires_grad_()
    ((rank + 1) * sp_core.split_cp_2d(frame, (2, 3), split, mesh).sum()).backward()
    assert frame.grad is not None
    assert frame.grad.flatten().tolist() == vector["split_bwd"]

    # loss = sum of k * g_k over the gathered tokens
    local = torch.ones(1, 8 // world_size, 1, requires_grad=True)
    gathered = sp_core.gather_cp_2d(local, (1, 2, 4), split, mesh)
    (torch.arange(8.0) * gathered.flatten()).sum().backward()
    assert local.grad is not None
    assert local.grad.flatten().tolist() == vector["gather_bwd"]

    # split then gather is the identity, in the gradient too
    frame.grad = None
    tile = sp_core.split_cp_2d(frame, (2, 3), split, mesh).flatten(1, 3)
    (torch.arange(8.0) * sp_core.gather_cp_2d(tile, (1, 2, 4), split, mesh).flatten()).sum().backward()
    assert frame.grad.flatten().tolist() == list(range(8))


def frame_wise_gather(rank: int, world_size: int) -> None:
    # the reference's 1-D gather joins inside each frame: one row of tiles 1 x cp
    mesh = sp_core.init_context_parallel(world_size)
    local = (100 * rank + torch.arange(6)).view(1, 6, 1)
    whole = sp_core.gather_cp_2d(local, (2, 1, 3 * world_size), (1, world_size), mesh)
    assert whole.flatten().tolist() == VECTORS["gather_cp_1d_frames2_S3_cp2_input_rank_r=100r+arange(6)"]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_split_exchange_and_gather_are_the_references(ranks: RankPools, world_size: int) -> None:
    ranks.call(world_size, split_and_gather)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_the_references(ranks: RankPools, world_size: int) -> None:
    ranks.call(world_size, gradients)


def test_gather_inside_each_frame_is_the_references(ranks: RankPools) -> None:
    ranks.call(2, frame_wise_gather)


@functools.cache
def meshes() -> Meshes:
    """Those of this rank: their groups stay from test to test."""
    return Meshes()


def check_meshes_in_turns(rank: int, world_size: int) -> None:
    for cp in (2, 4, 2, 1):
        mesh = sp_core.init_context_parallel(cp, meshes=meshes())
        assert (mesh.dp.rank, mesh.cp.rank) == divmod(rank, cp)
        for vector in VECTORS["mesh"].get(f"world4_cp{cp}", []):
            if vector["rank"] == rank:
                assert (mesh.cp.ranks, mesh.dp.ranks) == (tuple(vector["cp_ranks"]), tuple(vector["dp_ranks"]))
        value = torch.tensor([float(rank)])
        assert sp_core.cp_broadcast(value, mesh) is value
        assert value.item() == rank // cp * cp
        dist.all_reduce(value, group=mesh.dp.group)
        assert value.item() == sum(other // cp * cp for other in mesh.dp.ranks)
    mesh = meshes().build(cfg=2, ulysses=2)
    assert mesh.cp.group is meshes().build(cfg=2, ulysses=2).cp.group
    assert sp_core.cp_broadcast(torch.tensor([rank]), mesh, 1).item() == rank // 2 * 2 + 1


def test_meshes_are_used_in_turns(ranks: RankPools) -> None:
    ranks.call(4, check_meshes_in_turns)


def refused(name: str) -> Any:
    """One wrong call on the mesh of four ranks."""
    mesh, x = meshes().build(ulysses=4), torch.zeros(1, 2, 3, 8, 1)
    match name:
        case "cp does not divide the world":
            return sp_core.init_context_parallel(3)
        case "another rank":
            return sp_core.init_context_parallel(2, dist.get_rank() + 1)
        case "a mesh larger than the world":
            return meshes().build(cfg=2, ring=3)
        case "height":
            return sp_core.split_tensor_in_cp_2d(x, (2, 3), (2, 2), mesh)
        case "width":
            return sp_core.split_tensor_in_cp_2d(x.transpose(2, 3), (2, 3), (2, 2), mesh)
        case "tiles that are not the degree":
            return sp_core.split_tensor_in_cp_2d(x, (2, 3), (1, 2), mesh)
        case "one dim twice":
            return sp_core.split_cp_2d(x, (3, 3), (2, 2), mesh)
        case "gathered shape":
            return sp_core.gather_cp_2d(torch.zeros(1, 7, 1), (2, 4, 4), (2, 2), mesh)
        case "gathered width":
            return sp_core.gather_cp_2d(torch.zeros(1, 6, 1), (2, 4, 3), (2, 2), mesh)
        case "source of a broadcast":
            return sp_core.cp_broadcast(x, mesh, 4)
        case "tokens":
            return sp_core.send_recv_heads(torch.zeros(1, 3, 8, 1), token_counts=[2] * 4)
        case "token counts":
            return sp_core.send_recv_heads(torch.zeros(1, 2, 8, 1), token_counts=[2] * 3)
        case "two shapes":
            return sp_core.send_recv_heads(torch.zeros(1, 2, 8, 1), torch.zeros(1, 2, 7, 1), token_counts=[2] * 4)
        case "heads":
            return sp_core.gather_heads(torch.zeros(1, 8, 3, 1), num_heads=8, token_counts=[2] * 4)
        case "unpadded to more":
            return sp_core.gather_output_tokens(torch.zeros(1, 2, 1), [2] * 4, 9)
    raise KeyError(name)


REFUSALS = {
    "cp does not divide the world": "world of 4 ranks cannot be divided by context_parallel_size 3",
    "another rank": "global_rank NEXT was given",
    "a mesh larger than the world": "CFG 2 x ring 3 x Ulysses 1 does not fit a world of 4 ranks",
    # those that the reference refuses too: h, w, mismatch, same, gshape, gW
    "height": r"height \(dim 2\) is 3 tokens .* split 2",
    "width": r"width \(dim 3\) is 3 tokens .* split 2",
    "tiles that are not the degree": "1 x 2 tiles is not the context-parallel degree 4",
    "one dim twice": "cannot both be dim 3",
    "gathered shape": "dim 1 should hold 8 tokens",
    "gathered width": r"width \(dim 2\) is 3 tokens",
    "source of a broadcast": "cp_index 4 is outside",
    "tokens": "was to bring 2",
    "token counts": "3 token counts .* 4 ranks",
    "two shapes": "one shape and dtype",
    "heads": "owns 2 of 8 heads, but dim 2 has 3",
    "unpadded to more": "cannot unpad 8 gathered tokens to 9",
}


def check_refusal(rank: int, world_size: int, name: str) -> None:
    with pytest.raises(ValueError, match=REFUSALS[name].replace("NEXT", str(rank + 1))):
        refused(name)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(ranks: RankPools, name: str) -> None:
    ranks.call(4, check_refusal, name)


def check_uneven(rank: int, world_size: int) -> None:
    counts = (3, 1, 2, 0)
    whole = torch.randint(0, 256, (2, 6, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    start = sum(counts[:rank])
    mine = whole[:, start : start + counts[rank]]
    [shard] = sp_core.send_recv_heads(mine, token_counts=counts)
    assert torch.equal(shard, whole[:, :, 2 * rank : 2 * rank + 2])
    assert torch.equal(sp_core.gather_heads(shard, num_heads=7, token_counts=counts), mine)
    assert torch.equal(sp_core.gather_output_tokens(mine, counts, 5), whole[:, :5])


def test_uneven_shards_which_the_reference_cannot(ranks: RankPools) -> None:
    """7 heads on 4 ranks, one of them without tokens; the output is trimmed."""
    ranks.call(4, check_uneven)
