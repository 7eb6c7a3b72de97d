"""Which operations of a function are seen through: their results are NaN wherever something that they were worked out of is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.plans.probing.trace import Trace

LAYERS = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8)).requires_grad_(False)


def filled_in_parts(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :2], out[:, 2:] = x[:, :2] * 2, x[:, 2:]
    return out


def own_memory(x: Tensor) -> Tensor:
    return torch.zeros_like(x).add_(x).mul_(2)


SEEN_THROUGH: dict[str, Callable[[Tensor], object]] = {
    "layers": LAYERS,
    "chunks": lambda x: torch.cat([LAYERS(part) for part in x.chunk(3, 1)], 1),
    "memory that is filled in parts": filled_in_parts,
    "its own memory, in place": own_memory,
    "norms": lambda x: F.rms_norm(F.layer_norm(x, (8,)), (8,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "products into empty memory": lambda x: torch.baddbmm(torch.empty(2, 6, 6), x, x.transpose(1, 2), beta=0) @ x,
    "softmax of products": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "a mean": lambda x: x - x.mean(1, keepdim=True),
    "shapes": lambda x: x.unflatten(2, (2, 4)).permute(0, 2, 1, 3).reshape(2, -1),
    "another dtype": lambda x: x.to(torch.bfloat16).float(),
}


class Kernel:
    """What computes past torch, as kernels of packs do."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a value": (lambda x: x.mean().item(), "reads values"),
    "a truth": (lambda x: bool(x.sum() > 0), "it uses|reads values"),
    "a list": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: torch.from_numpy(np.tanh(x.numpy())), "numpy"),
    "a comparison": (lambda x: (x > 0).to(x), "it uses gt"),
    "a choice": (lambda x: torch.where(torch.ones(8, dtype=torch.bool), x, x.mean()), "it uses where"),
    "NaN taken out": (lambda x: x.nan_to_num(), "it uses nan_to_num"),
    "the largest": (lambda x: x.topk(2).values, "it uses topk"),
    "chance": (lambda x: x + torch.randn_like(x), "it uses randn_like"),
    "its input, in place": (lambda x: x.mul_(2), "writes into"),
    "a view of its input, in place": (lambda x: x[:, 1:].add_(1), "writes into"),
    "a weight, in place": (lambda x: LAYERS[0].bias.add_(1) + x.sum(), "writes into"),
    "a kernel": (Kernel(), "not torch's"),
    "a kernel, and a product": (lambda x: torch.baddbmm(Kernel()(x), x, torch.ones(2, 8, 8)), "not torch's"),
    "a kernel, and then torch": (lambda x: Kernel()(x) + 1, "not torch's"),
    "a kernel's result, copied": (lambda x: Kernel()(x).transpose(1, 2).reshape(-1), "not torch's"),
    "any number to the power of zero": (lambda x: x ** torch.zeros(()), "it uses pow"),
    "whole numbers": (lambda x: x.long().float(), "whole numbers"),
}


def traced(function: Callable[[Tensor], object]) -> str | None:
    with torch.inference_mode():
        x = torch.rand(2, 6, 8)
        trace = Trace()
        with trace.running():
            output = function(x)
        trace.check_output(output)
    return trace.reason


@pytest.mark.parametrize("name", SEEN_THROUGH)
def test_is_seen_through(name: str) -> None:
    assert traced(SEEN_THROUGH[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_is_not_seen_through(name: str) -> None:
    function, why = REFUSED[name]
    reason = traced(function)
    assert reason is not None
    assert any(part in reason for part in why.split("|")), reason


@pytest.mark.parametrize("name", [name for name in SEEN_THROUGH if name != "attention"])
def test_a_nan_goes_on(name: str) -> None:
    """Into its own token at least, whatever the function."""
    with torch.inference_mode():
        x = torch.rand(2, 6, 8)
        x[:, 3] = torch.nan
        out = SEEN_THROUGH[name](x)
    assert isinstance(out, Tensor)
    assert out.isnan().any()


def test_a_function_of_the_host_need_not_be_seen_through() -> None:
    trace, x = Trace(), torch.rand(3)
    with trace.running():
        trace.trusted(lambda x: x.nan_to_num())(x).mul_(2)
    assert trace.reason is None
