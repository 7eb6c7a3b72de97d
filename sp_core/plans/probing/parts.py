"""Whether two results are the same but for rounding, also in their worst token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: relative L2 distance that rounding makes when the same tokens are computed in another number
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
#: the worst token may be this much further away, measured against the norm of a mean token
_WORST = 2.0


def agree(mine: Any, theirs: Any) -> bool:
    """Two results of one function, tensors or trees of them: of one structure, finite, and equal but for rounding."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return _tensors_agree(mine, theirs)
    if isinstance(mine, (tuple, list)):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(agree, mine, theirs))
    if isinstance(mine, dict):
        return isinstance(theirs, dict) and mine.keys() == theirs.keys() and all(agree(value, theirs[key]) for key, value in mine.items())
    return mine is theirs or (type(mine) is type(theirs) and isinstance(mine, (bool, int, float, str)) and mine == theirs)


def _tensors_agree(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.numel():
        return True
    tolerance = TOLERANCES.get(mine.dtype)
    if tolerance is None:
        return torch.equal(mine, theirs)
    # a token is a row of the last dim
    rows, difference = (x.reshape(-1, x.size(-1) if x.dim() else 1).float().norm(dim=1) for x in (theirs, mine - theirs))
    norm = rows.norm()
    mean_row = norm / len(rows) ** 0.5
    close = (difference.norm() <= tolerance * norm) & (difference.max() <= _WORST * tolerance * mean_row)
    return bool(close & norm.isfinite())
