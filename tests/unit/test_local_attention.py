"""Local attention with log-sum-exp against torch's own, and exact merging of parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_core.attention import local
from sp_core.attention.local import attention_with_lse, merge
from sp_core.attention.masks import as_BHqk, level_rows, to_additive

B, Tq, Tk, H, D = 2, 17, 23, 3, 8


def make(dtype: torch.dtype = torch.float32, value_dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, dim, generator=generator, dtype=torch.float64) for T, dim in ((Tq, D), (Tk, D), (Tk, value_dim)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_mask(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Row 3 of every mask with a query axis has no key."""
    keep = torch.rand(B, Tq, Tk, generator=torch.Generator().manual_seed(1)) > 0.4
    keep[:, 3] = False
    if kind == "bool":
        return keep
    if kind == "key-only bool":
        return keep[:1, 5:6]
    if kind == "key-only":
        return to_additive(keep[:1, 5:6], dtype)
    if kind == "per head":
        return torch.stack([keep, ~keep, keep], dim=1)
    if kind == "-inf":
        return to_additive(keep, dtype)
    if kind == "finite minimum":
        return torch.zeros(B, Tq, Tk, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
    if kind == "strengths":
        return torch.linspace(0.1, 1.5, Tk, dtype=dtype).log().expand(Tq, Tk)
    raise AssertionError(kind)


MASKS = ["bool", "key-only bool", "key-only", "per head", "-inf", "finite minimum", "strengths"]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else as_BHqk(mask)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("mask_kind", [None, *MASKS])
@pytest.mark.parametrize("value_dim", [D, 5], ids=["kernel", "plain softmax"])  # no kernel takes values of another width
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, mask_kind: str | None, value_dim: int) -> None:
    q, k, v = make(value_dim=value_dim)
    mask = None if mask_kind is None else make_mask(mask_kind)
    monkeypatch.setattr(local, "_SCORES_AT_ONCE", B * H * Tk * 5)  # slices of 5, 5, 5 and 2 queries
    out, lse = attention_with_lse(q, k, v, mask)
    torch.testing.assert_close(out, sdpa(q, k, v, mask), atol=1e-6, rtol=1e-6)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    if mask is not None:
        scores = scores + to_additive(as_BHqk(mask), torch.float32)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-6)
    if mask_kind in ("bool", "-inf"):
        assert not out[:, 3].any()
        assert (lse[:, :, 3] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = make(dtype)
    out, lse = attention_with_lse(q, k, v, scale=0.3)
    reference, reference_lse = attention_with_lse(*make(torch.float64), scale=0.3)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = max(8 * torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), reference_lse, atol=tolerance, rtol=tolerance)


def test_value_dim_may_differ() -> None:
    q, k, v = make(value_dim=5)
    torch.testing.assert_close(attention_with_lse(q, k, v)[0], sdpa(q, k, v), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cut", [(Tq, 0, H), (0, Tk, H), (Tq, Tk, 0)], ids=["no keys", "no queries", "no heads"])
def test_nothing_to_attend_to(cut: tuple[int, int, int]) -> None:
    q, k, v = make()
    q, k, v = q[:, : cut[0], : cut[2]], k[:, : cut[1], : cut[2]], v[:, : cut[1], : cut[2]]
    out, lse = attention_with_lse(q, k, v)
    assert out.shape == (B, cut[0], cut[2], D)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("mask_kind", [None, *MASKS])
def test_merged_parts_equal_the_whole(mask_kind: str | None) -> None:
    q, k, v = make()
    mask = None if mask_kind is None else make_mask(mask_kind)
    whole = attention_with_lse(q, k, v, mask)
    shift = torch.zeros(1, 1, 1, 1)
    if mask is not None:
        mask = as_BHqk(mask)
        if mask.dtype != torch.bool:
            q, shift = level_rows(q, mask)
            mask = mask - shift
    cuts = ((0, 4), (4, 4), (4, 17), (17, Tk))
    parts = [attention_with_lse(q, k[:, a:b], v[:, a:b], None if mask is None else mask[..., a:b]) for a, b in cuts]
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse + shift.squeeze(-1), whole[1], atol=1e-5, rtol=1e-6)


def test_without_levelling_a_finite_minimum_would_weigh_parts_wrongly() -> None:
    q, k, v = make()
    mask = as_BHqk(make_mask("finite minimum"))
    whole, _ = attention_with_lse(q, k, v, mask)
    parts = [attention_with_lse(q, k[:, a:b], v[:, a:b], mask[..., a:b]) for a, b in ((0, 4), (4, Tk))]
    assert (merge(parts)[0] - whole)[:, 3].abs().max() > 0.01


def test_a_finite_minimum_of_a_wider_type_stays_finite() -> None:
    mask = torch.tensor([torch.finfo(torch.float32).min, -torch.inf, 0.0])
    narrow = to_additive(mask, torch.bfloat16)
    assert narrow.tolist() == [torch.finfo(torch.bfloat16).min, -torch.inf, 0.0]


def test_refusals_name_the_axis() -> None:
    q, k, v = make()
    with pytest.raises(ValueError, match="9 entries for 23 key tokens"):
        attention_with_lse(q, k, v, torch.zeros(Tq, 9))
    with pytest.raises(ValueError, match="2, 3 or 4 dims, this one has 1"):
        attention_with_lse(q, k, v, torch.zeros(Tk))
    with pytest.raises(ValueError, match="do not agree"):
        attention_with_lse(q, k[:, :4], v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a CUDA device")
@pytest.mark.parametrize("mask_kind", [None, *MASKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_kernels_equal_the_cpu(dtype: torch.dtype, mask_kind: str | None) -> None:
    inputs, mask = make(dtype), None if mask_kind is None else make_mask(mask_kind, dtype)
    out, lse = attention_with_lse(*(x.cuda() for x in inputs), None if mask is None else mask.cuda())
    expected, expected_lse = attention_with_lse(*(x.double() for x in inputs), mask)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=tolerance, rtol=tolerance)
