"""Group norm of a frame that lies on several ranks: its statistics are those of all rows.

Shape legend: B batch, G groups, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: this rank's (count, mean, squared deviation) of each group, (3, B, G), to every rank's, (N, 3, B, G)
EveryRank = Callable[[Tensor], Tensor]


def group_norm(
    every_rank: EveryRank, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As ``torch.nn.functional.group_norm``, for this rank's rows of (B, C, ..., h, W). Statistics are float32."""
    batch, channels = input.shape[:2]
    groups_BG = input.reshape(batch, num_groups, -1)
    variance_BG, mean_BG = torch.var_mean(groups_BG.float(), dim=-1, correction=0)
    count_BG = torch.full_like(mean_BG, groups_BG.size(-1))
    mean_BG, variance_BG = combined(every_rank(torch.stack([count_BG, mean_BG, variance_BG * count_BG])))
    scale_BC = torch.rsqrt(variance_BG + eps).repeat_interleave(channels // num_groups, 1)
    mean_BC = mean_BG.repeat_interleave(channels // num_groups, 1)
    if weight is not None:
        scale_BC = scale_BC * weight.float()
    shift_BC = -mean_BC * scale_BC
    if bias is not None:
        shift_BC = shift_BC + bias.float()
    shape = (batch, channels, *[1] * (input.dim() - 2))
    return torch.addcmul(shift_BC.view(shape), input.float(), scale_BC.view(shape)).to(input.dtype)


def combined(parts_N3BG: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, variance) of everything from (count, mean, squared deviation) of its parts.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    count, mean, deviation = parts_N3BG.double().unbind(1)
    total = count.sum(0)
    all_mean = (count * mean).sum(0) / total
    all_deviation = (deviation + count * (mean - all_mean) ** 2).sum(0)
    return all_mean.to(parts_N3BG.dtype), (all_deviation / total).to(parts_N3BG.dtype)
