"""Small networks that mix rows in every way that the engine knows, in one process and on bands."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sp_core.comm import CollectiveTransport
from sp_core.comm.point_to_point import PointToPoint
from sp_core.layout.bands import cut_bands
from sp_core.vae import BandEngine, DecodePlan, RowExchange, why_not


class Attention(nn.Module):
    """Every place attends to every place; its group norm is of the whole frame as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(2, channels), nn.Conv2d(channels, 3 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class PaddedOutside(nn.Module):
    """As Hunyuan's causal convolutions: the frame is padded by a function, and the convolution has no padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"))


class Causal(nn.Module):
    """A convolution that keeps frames from call to call, as Wan's do: what it keeps is this rank's band."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept, out = x.new_zeros(*x.shape[:2], 2, *x.shape[3:]), []
        for frame in x.split(1, 2):
            joined = torch.cat([kept, frame], 2)
            out.append(self.conv(joined))
            kept = joined[:, :, -2:]
        return torch.cat(out, 2)


class OverTime(nn.Module):
    """Attention between the frames, at each place by itself."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.permute(0, 3, 4, 2, 1).flatten(0, 2)
        return x + F.scaled_dot_product_attention(q, q, q).view(x.size(0), *x.shape[3:], -1, x.size(1)).permute(0, 4, 3, 1, 2)


class Pooled(nn.Module):
    """As Cosmos': the convolution and the pooling beside it get a frame with a row below, of which the pooling makes nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, (1, 3, 3), stride=(1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        return self.conv(x) + F.avg_pool3d(x, (1, 2, 2), stride=(1, 2, 2))


class Functions(nn.Module):
    """Convolutions and a norm that are no modules: the host calls torch's functions with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 4, 3, 3)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(F.conv2d(x, self.weight, self.bias, padding=(1, 1)), 2, weight=self.bias)
        return F.conv2d(F.interpolate(x, scale_factor=2), self.weight, None, 2, 1)


def _square(kernel: int, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, kernel, **more)


#: name -> (network, rows in for each row of the smallest frame, dims of a frame batch)
NETS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "zeros": (lambda: _square(3, padding=1), 1, 4),
    "replicate": (lambda: _square(3, padding=1, padding_mode="replicate"), 1, 4),
    "reflect": (lambda: nn.Sequential(nn.Upsample(scale_factor=4), _square(5, padding=2, padding_mode="reflect")), 1, 4),
    "dilated, over small bands": (lambda: _square(3, padding=3, dilation=3), 1, 4),
    "seven rows": (lambda: _square(7, padding=3), 1, 4),
    "twice as large": (lambda: nn.Sequential(_square(3, padding=1), nn.Upsample(scale_factor=2), _square(3, padding=1)), 1, 4),
    "half, padded below": (lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), _square(3, stride=2), _square(3, padding=1)), 2, 4),
    "half, padded by itself": (lambda: nn.Sequential(_square(3, stride=2, padding=1), _square(1)), 2, 4),
    "a quarter": (lambda: nn.Sequential(*(m for _ in range(2) for m in (nn.ZeroPad2d((0, 1, 0, 1)), _square(3, stride=2)))), 4, 4),
    "group norm": (lambda: nn.Sequential(_square(3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), _square(3, padding=1)), 1, 4),
    "functions": (Functions, 1, 4),
    "attention": (lambda: nn.Sequential(_square(3, padding=1), Attention(4), _square(3, padding=1)), 1, 4),
    "padded outside": (lambda: nn.Sequential(PaddedOutside(4), PaddedOutside(4)), 1, 5),
    "frames kept": (lambda: nn.Sequential(Causal(4), nn.Conv3d(4, 4, 1), Causal(4)), 1, 5),
    "attention over time": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), OverTime(), nn.Conv3d(4, 4, 3, padding=1)), 1, 5),
    "pooled": (lambda: nn.Sequential(Pooled(4), nn.Conv3d(4, 4, 3, padding=1)), 2, 5),
}
PLAN = DecodePlan(
    "tests",
    "tests",
    lambda vae: 1,
    whole=("Attention",),
    apart=("OverTime",),
    apart_functions=("avg_pool3d",),
    padded={"PaddedOutside": (1, 1), "Pooled": lambda parent: (0, parent.conv.stride[-2] - 1)},
)


def weighted(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.5)
    return net.eval().requires_grad_(False)


Spoil = Callable[[], contextlib.AbstractContextManager[None]]


def on_bands(rank: int, world_size: int, name: str, height: int, spoil: Spoil = contextlib.nullcontext) -> tuple[float, int, int] | None:
    """(relative error of this rank's rows, messages, bytes sent), None on a rank without rows. Collective."""
    make, ratio, dims = NETS[name]
    net = weighted(nn.Sequential(make()))
    plan = _of_what_is_there(net)
    assert why_not(plan, net) is None
    frames = torch.randn((2, 4, *[3] * (dims - 4), height * ratio, 6), generator=torch.Generator().manual_seed(5))
    expected, bands = net(frames), cut_bands(height, world_size)
    group = dist.new_group(list(range(bands.ranks)))
    if rank >= bands.ranks:
        return None
    neighbours = PointToPoint(group)
    exchange = RowExchange(neighbours, CollectiveTransport(group))
    start, stop = bands.scaled(ratio).range(rank)
    with spoil(), BandEngine(plan, bands, exchange).installed(net):
        out = net(frames[..., start:stop, :].contiguous())
    begin, end = bands.scaled(expected.size(-2) // height).range(rank)
    wanted = expected[..., begin:end, :]
    assert out.shape == wanted.shape
    torch.testing.assert_close(net(frames), expected, rtol=0, atol=0)  # nothing was left in the network
    return float((out - wanted).norm() / wanted.norm()), neighbours.stats.exchanges, neighbours.stats.bytes_sent


def _of_what_is_there(net: nn.Module) -> DecodePlan:
    names = {type(module).__name__ for module in net.modules()}
    padded = {name: rows for name, rows in PLAN.padded.items() if name in names}
    return dataclasses.replace(PLAN, **{part: tuple(names & {*getattr(PLAN, part)}) for part in ("whole", "apart")}, padded=padded)


@contextlib.contextmanager
def one_row_short() -> Iterator[None]:
    """The row that lies farthest off the band does not come, and the others stand one row too high."""
    whole = RowExchange.halo

    def short(self: RowExchange, own: Tensor, *args: Any) -> Callable[[], tuple[Tensor, Tensor]]:
        arriving = whole(self, own, *args)

        def arrived() -> tuple[Tensor, Tensor]:
            above, below = arriving()
            return torch.cat([above, own[..., :1, :]], -2)[..., 1:, :] if above.size(-2) else above, below

        return arrived

    RowExchange.halo = short  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowExchange.halo = whole  # type: ignore[method-assign]


@contextlib.contextmanager
def own_statistics() -> Iterator[None]:
    whole = RowExchange.every_rank
    RowExchange.every_rank = lambda self, numbers: numbers[None]  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowExchange.every_rank = whole  # type: ignore[method-assign]


@contextlib.contextmanager
def padded_at_the_cuts() -> Iterator[None]:
    """Nothing comes from the neighbours, so a convolution pads its band as it pads the frame."""
    whole = RowExchange.halo

    def nothing(self: RowExchange, own: Tensor, *args: Any) -> Callable[[], tuple[Tensor, Tensor]]:
        arriving = whole(self, own, *args)
        return lambda: (arriving()[0][..., :0, :], own[..., :0, :])

    RowExchange.halo = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowExchange.halo = whole  # type: ignore[method-assign]
