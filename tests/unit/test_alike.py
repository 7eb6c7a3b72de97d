"""Ranks that would compute a model in different ways are refused by name."""

from __future__ import annotations

import pytest

from sp_core.errors import SPError
from sp_core.host.worker.alike import refuse_differences


def test_ranks_that_compute_alike_pass() -> None:
    refuse_differences(["weights in torch.float16", "weights in torch.float16"])


def test_a_rank_that_computes_otherwise_is_named_with_what_to_do() -> None:
    with pytest.raises(SPError, match=r"rank 0 computes this model with fp8, rank 2 with fp16, since .* Start ComfyUI with a flag"):
        refuse_differences(["fp8", "fp8", "fp16"])
