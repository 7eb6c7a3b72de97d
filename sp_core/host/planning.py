"""What the planner needs to know of a running model and of the devices under it."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from ..comm import Transport
from ..comm.agree import all_gather_ints
from ..cost import Machine, ModelShape
from ..plans import SequencePlan
from ..plans.plan import Blocks


def model_shape(plan: SequencePlan, model: nn.Module) -> ModelShape | None:
    """Shape of a model from its own modules; None where they do not tell.

    Weights of a block's whole stream (``txt_...`` of a double block) are left out: what passes them
    is short. Any other weight counts as met by every token, which is a few per cent too many where
    a block also has weights for text or audio.
    """
    blocks = plan.blocks_of(model)
    attention = blocks[0].get_submodule(plan.attentions[0].module)
    heads = _first(attention, "num_heads", "heads")
    if not heads:
        return None
    head_dim = _first(attention, "head_dim", "dim_head") or _first(attention, "hidden_size", "dim") // heads
    if not head_dim:
        return None
    weights = sum(_stream_weights(kind, block) for kind in plan.blocks for block in kind.of(model))
    itemsize = (getattr(model, "dtype", None) or torch.float32).itemsize
    return ModelShape(type(model).__name__, len(blocks), heads, head_dim, 2.0 * weights / len(blocks), itemsize=max(2, itemsize))


def _stream_weights(kind: Blocks, block: nn.Module) -> int:
    aside = f"{kind.whole}_" if kind.whole else None
    return sum(weight.numel() for name, weight in block.named_parameters() if aside is None or not name.startswith(aside))


def _first(module: Any, *names: str) -> int:
    return next((int(getattr(module, name)) for name in names if isinstance(getattr(module, name, None), int)), 0)


def token_count(model: nn.Module, x: Any) -> int:
    """About how many video tokens an input has: its places, over those in a patch."""
    x = x[0] if isinstance(x, (list, tuple)) else x
    patch = getattr(model, "patch_size", 1)
    sizes = x.shape[2:]
    patch = (patch,) * len(sizes) if isinstance(patch, int) else tuple(patch)[-len(sizes) :]
    return math.prod(-(-size // step) for size, step in zip(sizes, patch, strict=False))


def measure(transport: Transport, device: torch.device, dtype: torch.dtype, seconds: float = 0.15) -> Machine:
    """Rates of the slowest device and the slowest link, equal on all ranks. Collective; takes about twice ``seconds``.

    Compute is a square matrix product in ``dtype``; the link is an exchange of q, k and v.
    """
    size = 4096 if device.type != "cpu" else 384
    a = torch.randn(size, size, device=device).to(dtype)
    flops = 2.0 * size**3 / _timed(lambda: a @ a, device, seconds)
    t, H, D = (4096, 32, 128) if device.type != "cpu" else (512, 16, 64)
    shards = [torch.randn(1, t, H, D, device=device).to(dtype) for _ in range(3)]
    counts = [t] * transport.world_size
    # a fixed number of rounds: ranks must agree on it
    times = [_once(lambda: transport.scatter_heads(shards, counts), device) for _ in range(6)]
    moved = 3 * t * H * D * shards[0].element_size() * (transport.world_size - 1) / transport.world_size
    tiny = [shard[:, :1, :, :1].contiguous() for shard in shards]
    waits = [_once(lambda: transport.scatter_heads(tiny, [1] * transport.world_size), device) for _ in range(6)]
    latency = median(waits[2:])
    bandwidth = moved / max(median(times[2:]) - latency, 1e-6)
    mine = [int(flops / 1e6), int(bandwidth / 1e3), int(latency * 1e9)]
    ranks = all_gather_ints(None, mine)
    return Machine(str(device.type), min(r[0] for r in ranks) * 1e6, min(r[1] for r in ranks) * 1e3, max(r[2] for r in ranks) / 1e9)


def _once(function: Any, device: torch.device) -> float:
    started = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def _timed(function: Any, device: torch.device, seconds: float) -> float:
    _once(function, device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not times:
        times.append(_once(function, device))
    return median(times)
