"""2-D context parallelism on tensors: split into tiles, gather them, both with gradients.

Every function takes the mesh that :func:`init_context_parallel` returned, so several meshes can be
in use. H and W must divide, as in the reference; :class:`sp_core.layout.TileLayout` takes any size.
Rank r of the mesh's sequence axis owns tile (r div split_w, r mod split_w). Gradients follow
the reference's convention for a loss that is averaged over all ranks: split's backward
divides by the degree, gather's backward multiplies by it.

Source: LongCat-Video, context-parallel package.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.transports.collective import CollectiveTransport
from ..layout.sequence import TileLayout
from ..parallel.mesh import Mesh, MeshAxis, Meshes


def split_tensor_in_cp_2d(tensor: Tensor, dims_hw: tuple[int, int], split_hw: tuple[int, int], mesh: Mesh) -> Tensor:
    """This rank's tile of ``tensor`` (any shape, rows on ``dims_hw[0]``, columns on ``dims_hw[1]``): a view.

    No communication.

    Raises:
        ValueError: ``split_hw`` does not multiply to the degree of the mesh; a dim does not
            divide by its split; both dims are the same.

    Source: LongCat-Video.
    """
    dims_hw = dims_hw[0] % tensor.dim(), dims_hw[1] % tensor.dim()
    _check(tensor.size(dims_hw[0]), tensor.size(dims_hw[1]), dims_hw, split_hw, mesh.cp)
    return _tile(tensor, dims_hw, split_hw, mesh.cp.rank)


def split_cp_2d(tensor: Tensor, dims_hw: tuple[int, int], split_hw: tuple[int, int], mesh: Mesh) -> Tensor:
    """:func:`split_tensor_in_cp_2d` with a gradient, contiguous.

    Backward: the gradient divided by the degree, all-gathered and put back in place: every
    rank gets the gradient of the full tensor.

    Raises:
        ValueError: as :func:`split_tensor_in_cp_2d`.

    Source: LongCat-Video.
    """
    return _Split.apply(tensor, dims_hw, split_hw, mesh)


def gather_cp_2d(tensor_BtC: Tensor, shape_thw: tuple[int, int, int], split_hw: tuple[int, int], mesh: Mesh) -> Tensor:
    """All tiles as one raster: (B, T * h * w, C) to (B, T * H * W, C), with a gradient.

    ``shape_thw`` is the full grid (T, H, W). Backward: the gradient multiplied by the degree,
    this rank's tile of it; no communication.

    Raises:
        ValueError: ``split_hw`` does not multiply to the degree of the mesh; H or W does not
            divide; dim 1 is not T * h * w.

    Source: LongCat-Video (which never checks W).
    """
    frames, height, width = shape_thw
    _check(height, width, (1, 2), split_hw, mesh.cp)
    due = frames * height * width // mesh.cp.size
    if tensor_BtC.dim() != 3 or tensor_BtC.size(1) != due:
        raise ValueError(
            f"dim 1 should hold {due} tokens (grid {frames} x {height} x {width} over {mesh.cp.size} ranks), "
            f"the shape is {tuple(tensor_BtC.shape)}"
        )
    return _Gather.apply(tensor_BtC, TileLayout(shape_thw, split_hw), mesh)


def cp_broadcast(tensor: Tensor, mesh: Mesh, cp_index: int = 0) -> Tensor:
    """Overwrite ``tensor`` in place with that of the ``cp_index``-th rank of the own cp group.

    Shape and dtype must be the same on all of them. Returns ``tensor``.

    Raises:
        ValueError: ``cp_index`` is outside the group.

    Source: LongCat-Video.
    """
    if not 0 <= cp_index < mesh.cp.size:
        raise ValueError(f"cp_index {cp_index} is outside a context-parallel group of {mesh.cp.size} ranks")
    dist.broadcast(tensor, mesh.cp.ranks[cp_index], group=mesh.cp.group)
    return tensor


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dims_hw: tuple[int, int], split_hw: tuple[int, int], mesh: Mesh) -> Tensor:
        ctx.place = tuple(dim % tensor.dim() for dim in dims_hw), split_hw, mesh, tensor.shape
        return split_tensor_in_cp_2d(tensor, dims_hw, split_hw, mesh).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        dims_hw, split_hw, mesh, shape = ctx.place
        mine = (grads[0] / mesh.cp.size).contiguous()
        tiles = [torch.empty_like(mine) for _ in range(mesh.cp.size)]
        dist.all_gather(tiles, mine, group=mesh.cp.group)
        full = mine.new_empty(shape)
        for rank, tile in enumerate(tiles):
            _tile(full, dims_hw, split_hw, rank).copy_(tile)
        return full, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor_BtC: Tensor, layout: TileLayout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.axis = layout, mesh.cp
        return layout.restore(CollectiveTransport(mesh.cp.group).all_gather_tokens(tensor_BtC, layout.counts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.shard(grads[0] * ctx.axis.size, ctx.axis.rank), None, None


def _tile(tensor: Tensor, dims_hw: tuple[int, int], split_hw: tuple[int, int], rank: int) -> Tensor:
    """View of one rank's rectangle; sizes divide."""
    for dim, parts, place in zip(dims_hw, split_hw, divmod(rank, split_hw[1]), strict=True):
        size = tensor.size(dim) // parts
        tensor = tensor.narrow(dim, place * size, size)
    return tensor


def _check(height: int, width: int, dims_hw: tuple[int, int], split_hw: tuple[int, int], axis: MeshAxis) -> None:
    if min(split_hw) < 1 or split_hw[0] * split_hw[1] != axis.size:
        raise ValueError(f"a split of {split_hw[0]} x {split_hw[1]} tiles is not the context-parallel degree {axis.size}")
    if dims_hw[0] == dims_hw[1]:
        raise ValueError(f"height and width cannot both be dim {dims_hw[0]}")
    for name, size, dim, parts in zip(("height", "width"), (height, width), dims_hw, split_hw, strict=True):
        if size % parts:
            raise ValueError(f"{name} (dim {dim}) is {size} tokens and does not divide by split {parts}; TileLayout takes uneven tiles")


def init_context_parallel(
    context_parallel_size: int,
    global_rank: int | None = None,
    world_size: int | None = None,
    *,
    meshes: Meshes | None = None,
) -> Mesh:
    """The 2-D mesh (dp, cp) over the world: rank g has dp = g div cp and cp = g mod cp; ``dp`` is ``cfg`` of :class:`Mesh`. Collective.

    The reference keeps one topology in module globals; here it is the returned object, and
    every function that needs it takes it.

    Args:
        context_parallel_size: ranks that share one sequence.
        global_rank, world_size: checked against the process group when given.
        meshes: what keeps its groups, for later meshes too; they are its own when not given.

    Raises:
        ValueError: ``world_size % context_parallel_size != 0``, or a given rank or size is not
            that of the process group.

    Source: LongCat-Video, context-parallel utilities (which raises RuntimeError).
    """
    meshes = Meshes() if meshes is None else meshes
    actual_rank, actual_size = dist.get_rank(), dist.get_world_size()
    for name, given, actual in (("global_rank", global_rank, actual_rank), ("world_size", world_size, actual_size)):
        if given is not None and given != actual:
            raise ValueError(f"{name} {given} was given, but the process group says {actual}")
    if context_parallel_size < 1 or actual_size % context_parallel_size:
        raise ValueError(f"a world of {actual_size} ranks cannot be divided by context_parallel_size {context_parallel_size}")
    mesh = meshes.build(cfg=actual_size // context_parallel_size, ulysses=context_parallel_size)
    assert mesh is not None  # every rank of the world is in it
    return mesh
