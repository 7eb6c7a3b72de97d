"""LongCat-Video's noise schedules and its form of CFG-zero. Plain torch.

A schedule's sigmas are shift * u / (1 + (shift - 1) * u) of a uniform u. Source:
LongCat-Video's pipelines; vectors in tests/fixtures/longcat_vectors.json.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: the step grid of the distilled model's training: 50 steps of 20 in 1000
_DISTILL_GRID, _DISTILL_STRIDE = 50, 20
#: and of the Avatar's
_AVATAR_STEPS = 8


def _shifted(u: Tensor, shift: float) -> Tensor:
    return shift * u / (1 + (shift - 1) * u)


def _closed(sigmas: Tensor) -> Tensor:
    """fp32 with the final zero, as samplers want it."""
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def base(steps: int = 50, shift: float = 12.0) -> Tensor:
    """fp32 (steps + 1,). Ends far above zero, unlike the host's "simple" schedule."""
    return _closed(_shifted(torch.linspace(1, 0.001, steps, dtype=torch.float64), shift))


def distill(steps: int = 16, shift: float = 12.0) -> Tensor:
    """fp32 (steps + 1,) for the distillation LoRA, at CFG 1.

    Raises:
        ValueError: more steps than the distilled model knows.
    """
    if steps > _DISTILL_GRID:
        raise ValueError(f"the distilled schedule has at most {_DISTILL_GRID} steps, {steps} were asked for")
    index = torch.arange(steps, dtype=torch.float64)
    return _closed(_shifted((1000 - _DISTILL_STRIDE * (_DISTILL_GRID * index / steps).floor()) / 1000, shift))


def avatar_distill(steps: int = 8, shift: float = 7.0) -> Tensor:
    """fp32 (9,) for Avatar 1.5 with its distillation LoRA, without guidance.

    Raises:
        ValueError: another number of steps than the LoRA was trained with.
    """
    if steps != _AVATAR_STEPS:
        raise ValueError(f"the Avatar's distilled schedule has {_AVATAR_STEPS} steps, {steps} were asked for")
    grid = torch.linspace(1, 0, 1000, dtype=torch.float64)
    return _closed(_shifted(grid[:: 1000 // _AVATAR_STEPS], shift))


def enhance_hf(steps: int = 50, shift: float = 12.0) -> Tensor:
    """fp32, for continuation: the base schedule down to 0.5, then even steps of 0.05 for fine detail."""
    high = base(steps, shift)
    return torch.cat([high[high > 0.5], torch.arange(10, -1, -1) / 20])


def refine(steps: int = 50, shift: float = 12.0, start: float = 0.5) -> Tensor:
    """fp32, for the upscaled second pass: from ``start``, then the base schedule's sigmas below it."""
    low = base(steps, shift)
    return torch.cat([torch.tensor([start]), low[low < start]])


SCHEDULES = {"base": base, "distill": distill, "avatar_distill": avatar_distill, "enhance_hf": enhance_hf, "refine": refine}


def cfg_zero(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """s * uncond + scale * (cond - s * uncond) with s = <cond, uncond> / |uncond|^2 of each batch item.

    The arguments are velocities (or velocities times sigma: the formula is homogeneous),
    not denoised predictions, which is what the host's CFGZeroStar node scales.

    Args:
        cond, uncond: (B, ...), same shape and dtype; the result too.
    """
    axes = tuple(range(1, cond.ndim))
    dot, square = ((x * uncond).sum(axes, keepdim=True) for x in (cond, uncond))
    s = dot / (square + 1e-8)
    return s * uncond + scale * (cond - s * uncond)
