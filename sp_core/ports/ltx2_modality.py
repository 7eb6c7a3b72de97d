"""One modality's tokens, padded and split into equal shards as LTX-2 does it.

The extension itself splits into uneven shards and needs neither padding nor mask. These functions
are for callers that want equal shards, with the semantics of LTX-2's sequence parallelism.
They communicate nothing and change none of their arguments.

Shape legend: B batch, T tokens, C channels, A coordinates of a position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Modality:
    """What a token-wise diffusion transformer is given of one modality (video or audio)."""

    #: (B, T, C)
    latent: Tensor
    #: (B, T, ...), one entry a token
    timesteps: Tensor
    #: (B, A, T, 2) as [start, end) bounds, or (B, A, T); units are the model's (seconds, pixels)
    positions: Tensor
    #: self-attention, 1 may attend, 0 may not, between: strength. (B, T, T), or key-only (1, 1, T)
    mask: Tensor | None = None
    #: (B, T, 1), marks the tokens of keyframes
    keyframe_marker: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.latent.size(1)

    def __post_init__(self) -> None:
        per_token = {"timesteps": (self.timesteps, 1), "positions": (self.positions, 2), "keyframe_marker": (self.keyframe_marker, 1)}
        for name, (tensor, dim) in per_token.items():
            if tensor is not None and (tensor.dim() <= dim or tensor.size(dim) != self.tokens):
                raise ValueError(f"{name} needs {self.tokens} tokens on dim {dim}, its shape is {tuple(tensor.shape)}")


def compute_sequence_partition(total_tokens: int, world_size: int) -> tuple[int, ...]:
    """Equal token counts of all ranks.

    Raises:
        ValueError: ``total_tokens % world_size != 0``, or a world below one.

    Source: LTX-2. For uneven counts see :func:`sp_core.layout.shard_sizes`.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if total_tokens % world_size:
        raise ValueError(
            f"{total_tokens} tokens do not divide over {world_size} ranks: pad up front (pad_modality_for_uniform_sharding), "
            "or use uneven shards (shard_sizes)"
        )
    return (total_tokens // world_size,) * world_size


def pad_modality_for_uniform_sharding(modality: Modality, world_size: int) -> Modality:
    """Zero tokens at the end until ``world_size`` divides the count, hidden by a mask.

    * The count divides already: the modality itself comes back, so that unmasked kernels stay in use.
    * No mask was given, or a key-only one (1, 1, T): the mask is key-only (1, 1, T_padded),
      O(T) memory; fp32 where there was none.
    * A (B, T, T) mask is grown to (B, T_padded, T_padded): nobody sees a pad key, and a pad
      query sees every real key, so that no row is without keys.

    Raises:
        ValueError: world below one; a mask that does not fit the tokens.

    Source: LTX-2.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    pad = -modality.tokens % world_size
    if not pad:
        return modality
    marker = modality.keyframe_marker
    return Modality(
        latent=_zero_tail(modality.latent, 1, pad),
        timesteps=_zero_tail(modality.timesteps, 1, pad),
        positions=_zero_tail(modality.positions, 2, pad),
        mask=_grown_mask(modality, pad),
        keyframe_marker=None if marker is None else _zero_tail(marker, 1, pad),
    )


def tile_modality_for_rank(modality: Modality, rank: int, world_size: int) -> Modality:
    """The rank's contiguous equal slice of everything that has a token dim; the mask stays that of all tokens.

    After the head exchange a rank's queries are all tokens, so the mask has to be for all tokens.
    Slices own their storage.

    Raises:
        ValueError: the tokens do not divide (:func:`compute_sequence_partition`); no such rank.

    Source: LTX-2.
    """
    counts = compute_sequence_partition(modality.tokens, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    start, count = sum(counts[:rank]), counts[rank]

    def shard(tensor: Tensor, dim: int) -> Tensor:
        return tensor.narrow(dim, start, count).clone(memory_format=torch.contiguous_format)

    # in one step, because a modality that is sharded by half would not pass its own check
    return replace(
        modality,
        latent=shard(modality.latent, 1),
        timesteps=shard(modality.timesteps, 1),
        positions=shard(modality.positions, 2),
        keyframe_marker=None if modality.keyframe_marker is None else shard(modality.keyframe_marker, 1),
    )


def _zero_tail(tensor: Tensor, dim: int, pad: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = pad
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def _grown_mask(modality: Modality, pad: int) -> Tensor:
    T, mask = modality.tokens, modality.mask
    if mask is None:
        mask = torch.ones(1, 1, T, dtype=torch.float32, device=modality.latent.device)
    if mask.dim() != 3 or mask.size(2) != T or mask.size(1) not in (1, T):
        raise ValueError(f"a self-attention mask for {T} tokens is (B, {T}, {T}) or (1, 1, {T}), not {tuple(mask.shape)}")
    grown = _zero_tail(mask, 2, pad)
    if mask.size(1) == 1:
        return grown
    pad_queries = grown.new_zeros(grown.size(0), pad, T + pad)
    pad_queries[:, :, :T] = 1
    return torch.cat([grown, pad_queries], dim=1)
