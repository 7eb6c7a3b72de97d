"""Padding and cutting a modality for equal shards."""

from __future__ import annotations

import pytest
import torch

from sp_core.attention.local import attention_with_lse
from sp_core.ports.ltx2_modality import Modality, compute_sequence_partition, pad_modality_for_uniform_sharding, tile_modality_for_rank

B, C = 2, 4


def make(T: int, mask: torch.Tensor | None = None, marker: bool = True) -> Modality:
    return Modality(
        latent=torch.randn(B, T, C),
        timesteps=torch.rand(B, T, 1, dtype=torch.float64),
        positions=torch.rand(B, 3, T, 2),
        mask=mask,
        keyframe_marker=torch.ones(B, T, 1) if marker else None,
    )


@pytest.mark.parametrize(("total", "world_size", "counts"), [(8, 2, (4, 4)), (6144, 8, (768,) * 8), (0, 3, (0, 0, 0)), (5, 1, (5,))])
def test_partition(total: int, world_size: int, counts: tuple[int, ...]) -> None:
    assert compute_sequence_partition(total, world_size) == counts


@pytest.mark.parametrize(("total", "world_size"), [(7, 2), (8160, 7), (6630, 4)])
def test_partition_refuses_what_does_not_divide(total: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{total} tokens do not divide over {world_size} ranks"):
        compute_sequence_partition(total, world_size)


# the pad column of LTX-2's clips at 2, 4 and 8 ranks
@pytest.mark.parametrize(("tokens", "pads"), [(6144, (0, 0, 0)), (6630, (0, 2, 2)), (4290, (0, 2, 6)), (13376, (0, 0, 0))])
def test_pad_counts(tokens: int, pads: tuple[int, ...]) -> None:
    modality = make(tokens)
    for world_size, pad in zip((2, 4, 8), pads, strict=True):
        assert pad_modality_for_uniform_sharding(modality, world_size).tokens == tokens + pad


def test_nothing_to_pad_keeps_the_modality_and_makes_no_mask() -> None:
    modality = make(8)
    assert pad_modality_for_uniform_sharding(modality, 4) is modality


def test_the_tail_is_zero_and_dtypes_stay() -> None:
    modality = make(7)
    padded = pad_modality_for_uniform_sharding(modality, 4)
    assert torch.equal(padded.latent[:, :7], modality.latent)
    assert torch.equal(padded.positions[:, :, :7], modality.positions)
    assert not padded.latent[:, 7:].any()
    assert not padded.timesteps[:, 7:].any()
    assert not padded.positions[:, :, 7:].any()
    assert padded.keyframe_marker is not None
    assert not padded.keyframe_marker[:, 7:].any()
    assert padded.timesteps.dtype == torch.float64


def test_without_a_mask_a_key_only_one_is_made() -> None:
    mask = pad_modality_for_uniform_sharding(make(7), 4).mask
    assert mask is not None
    assert mask.dtype == torch.float32
    assert mask.tolist() == [[[1.0] * 7 + [0.0]]]


def test_a_key_only_mask_stays_key_only() -> None:
    mask = pad_modality_for_uniform_sharding(make(7, mask=torch.tensor([[[1, 0.5, 1, 0, 1, 1, 1]]])), 4).mask
    assert mask is not None
    assert mask.tolist() == [[[1, 0.5, 1, 0, 1, 1, 1, 0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_dense_mask_grows_without_a_row_that_sees_nothing(dtype: torch.dtype) -> None:
    mask = (torch.rand(B, 7, 7) > 0.5).to(dtype)
    grown = pad_modality_for_uniform_sharding(make(7, mask=mask), 5).mask
    assert grown is not None
    assert grown.dtype == dtype
    assert torch.equal(grown[:, :7, :7], mask)
    assert not grown[:, :, 7:].any()
    assert grown[:, 7:, :7].all()


@pytest.mark.parametrize("dense", [False, True])
def test_real_tokens_attend_as_if_nothing_had_been_padded(dense: bool) -> None:
    mask = torch.rand(B, 7, 7) > 0.4 if dense else None
    modality = make(7, mask=mask)
    padded = pad_modality_for_uniform_sharding(modality, 4)
    heads = [x.latent[:, :, None] + 1 for x in (modality, padded)]  # pad rows are not zero in K and V: biases
    assert padded.mask is not None
    out, _ = attention_with_lse(heads[1], heads[1], heads[1], padded.mask > 0)
    expected, _ = attention_with_lse(heads[0], heads[0], heads[0], mask)
    torch.testing.assert_close(out[:, :7], expected)
    assert not out.isnan().any()


def test_tiles_are_slices_that_own_their_storage_and_the_mask_stays_whole() -> None:
    modality = make(8, mask=torch.rand(B, 8, 8))
    tiles = [tile_modality_for_rank(modality, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([tile.latent for tile in tiles], 1), modality.latent)
    assert torch.equal(torch.cat([tile.timesteps for tile in tiles], 1), modality.timesteps)
    assert torch.equal(torch.cat([tile.positions for tile in tiles], 2), modality.positions)
    for tile in tiles:
        assert tile.mask is modality.mask
        assert tile.latent.is_contiguous()
        assert tile.latent.untyped_storage().nbytes() == tile.latent.nbytes
    assert tile_modality_for_rank(make(8, marker=False), 1, 4).keyframe_marker is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="7 tokens do not divide over 4 ranks"):
        tile_modality_for_rank(make(7), 0, 4)
    with pytest.raises(ValueError, match="rank 4 is outside"):
        tile_modality_for_rank(make(8), 4, 4)
    with pytest.raises(ValueError, match=r"mask for 7 tokens .* not \(2, 7, 6\)"):
        pad_modality_for_uniform_sharding(make(7, mask=torch.ones(B, 7, 6)), 4)
    # a broadcast timestep would come out empty on every rank but the first
    with pytest.raises(ValueError, match=r"timesteps needs 8 tokens on dim 1, its shape is \(2, 1\)"):
        Modality(torch.zeros(B, 8, C), torch.zeros(B, 1), torch.zeros(B, 3, 8, 2))
