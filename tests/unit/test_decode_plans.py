"""What the engine can share out of a VAE and what it refuses, and the numbers behind halos and statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sp_core.errors import SPError
from sp_core.vae import PLANS, DecodePlan, architecture_of, plan_for, why_not
from sp_core.vae.conv_rows import Extended, conv_rows, edges, unpadded_rows
from sp_core.vae.functions import RowFunctions
from sp_core.vae.group_norm import combined

#: (convolution, rows that the host adds, rows that it reaches over and under its band)
REACHES: list[tuple[dict[str, Any], tuple[int, int], int, int]] = [
    ({"kernel_size": 3, "padding": 1}, (0, 0), 1, 1),
    ({"kernel_size": 1}, (0, 0), 0, 0),
    ({"kernel_size": 7, "padding": 3}, (0, 0), 3, 3),
    ({"kernel_size": 3, "padding": 2, "dilation": 2}, (0, 0), 2, 2),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (0, 0), 2, 0),
    ({"kernel_size": 3, "stride": 2}, (0, 1), 0, 1),
    ({"kernel_size": 3}, (1, 1), 1, 1),
    ({"kernel_size": 4, "stride": 2, "padding": 1}, (0, 0), 2, 1),
    ({"kernel_size": 2, "stride": 2}, (0, 0), 0, 0),
]

PLAN = DecodePlan("tests", "Tests", lambda vae: 1)


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.ConvTranspose2d(1, 1, 2), "0 (ConvTranspose2d) mixes rows in a way that is not known here"),
        (nn.AvgPool2d(2), "0 (AvgPool2d) mixes rows"),
        (nn.InstanceNorm2d(2), "0 (InstanceNorm2d) mixes rows"),
        (nn.CircularPad2d(1), "0 (CircularPad2d) mixes rows"),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), "pads the frame in the mode 'circular'"),
        (nn.Conv2d(1, 1, 3, padding="same"), "has the padding 'same'"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), "enlarges the frame in the mode 'bilinear'"),
    ],
)
def test_what_mixes_rows_in_another_way_is_refused_by_name(module: nn.Module, problem: str) -> None:
    found = why_not(PLAN, nn.Sequential(module))
    assert found is not None and problem in found
    # below a module that gets the whole frame it does no harm
    assert why_not(DecodePlan("tests", "Tests", lambda vae: 1, whole=("Whole",)), nn.Sequential(Whole(module))) is None


def test_what_another_node_has_put_into_it_is_not_shared_out() -> None:
    replaced, patched = nn.Sequential(nn.SiLU()), nn.Sequential(nn.SiLU())
    replaced.decode = lambda z: z
    patched[0].forward = lambda x: x
    compiled = nn.Sequential(torch.compile(nn.SiLU()))
    assert why_not(PLAN, replaced) == "another node has replaced its decode"
    assert why_not(PLAN, patched) == "0 (SiLU) has a forward of another node"
    assert why_not(PLAN, compiled) == "0 (OptimizedModule) is compiled"


def test_a_class_that_the_plan_names_and_the_vae_lacks_is_named() -> None:
    assert why_not(DecodePlan("tests", "Tests", lambda vae: 1, whole=("Attention",)), nn.Sequential(nn.SiLU())) == (
        "it has no Attention, which its decode plan names"
    )


def test_a_class_without_a_plan_has_none() -> None:
    assert plan_for(nn.SiLU()) is None and plan_for(None) is None
    assert architecture_of(nn.SiLU()) == "torch.nn.modules.activation.SiLU"
    assert all(key == plan.architecture for key, plan in PLANS.items())


@pytest.mark.parametrize(("arguments", "added", "above", "below"), REACHES)
def test_rows_that_a_convolution_reaches(arguments: dict[str, Any], added: tuple[int, int], above: int, below: int) -> None:
    rows = conv_rows(nn.Conv2d(1, 1, **arguments), added)
    assert (rows.above, rows.below) == (above, below)


@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect"])
@pytest.mark.parametrize(("arguments", "added"), [(arguments, added) for arguments, added, *_ in REACHES])
def test_rows_of_a_result_are_those_of_the_whole_frame(arguments: dict[str, Any], added: tuple[int, int], mode: str) -> None:
    """Any rows of a band's result, with the halo that the convolution asks for, at the borders of the frame and inside."""
    conv = nn.Conv2d(2, 3, padding_mode=mode, **arguments)
    frame, rows, (over, under) = torch.randn(1, 2, 24, 9), conv_rows(conv, added), added
    padded = F.pad(frame, (0, 0, over, under), mode="replicate")
    expected, before = conv(padded), (conv.padding, conv._reversed_padding_repeated_twice)
    given: list[int] = []

    def unpadded(some: torch.Tensor) -> torch.Tensor:
        given.append(some.size(-2))
        with unpadded_rows(conv):
            return conv(some)

    for start, stop in ((0, 8), (8, 16), (16, 24)):
        above = frame[..., max(0, start - rows.above) : start, :] if start else padded[..., :over, :]
        below = frame[..., stop : stop + rows.below, :] if stop < 24 else padded[..., over + 24 :, :]
        extended, results = Extended(above, frame[..., start:stop, :], below, rows), 8 // rows.stride
        for first, last in ((0, results), (0, 1), (1, 3), (results - 1, results)):
            at = start // rows.stride
            wanted = expected[..., at + first : at + last, :]
            torch.testing.assert_close(extended.results(conv, first, last), wanted)
            torch.testing.assert_close(extended.results(conv, first, last, unpadded), wanted)
    # one row of a result in the band between the others is made of the rows that it needs
    assert rows.reach + 1 in given
    assert (conv.padding, conv._reversed_padding_repeated_twice) == before


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    whole = torch.randn(2, 3, 50) * 3 + 100
    parts = whole.split([7, 30, 13], -1)
    numbers = []
    for part in parts:
        variance, mean = torch.var_mean(part, -1, correction=0)
        count = torch.full_like(mean, part.size(-1))
        numbers.append(torch.stack([count, mean, variance * count]))
    mean, variance = combined(torch.stack(numbers))
    torch.testing.assert_close(mean, whole.mean(-1))
    torch.testing.assert_close(variance, whole.var(-1, correction=0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("arguments", [arguments for arguments, *_ in REACHES if arguments["kernel_size"] > 1])
@pytest.mark.parametrize("height", [16, 32])
def test_edges_are_exactly_the_rows_of_the_result_that_others_change(arguments: dict[str, Any], height: int) -> None:
    """A change of the rows outside the band is seen at the edges, and nowhere else."""
    conv = nn.Conv2d(1, 1, **arguments)
    nn.init.constant_(conv.weight, 0.1)
    rows = conv_rows(conv)
    found = edges(rows, height)
    assert found is not None
    upper, lower = found
    changed = []
    for value in (0.0, 1.0):
        frame = torch.full((1, 1, 3 * height, 9), value)
        frame[..., height : 2 * height, :] = 0.5
        changed.append(conv(frame)[..., height // rows.stride : 2 * height // rows.stride, :])
    seen = [bool(row.any()) for row in (changed[1] - changed[0]).abs()[0, 0] > 1e-4]
    assert seen == [True] * upper + [False] * (len(seen) - upper - lower) + [True] * lower


def test_a_band_that_is_all_edge_has_no_edges() -> None:
    assert edges(conv_rows(nn.Conv2d(1, 1, 7, padding=3)), 4) is None


def refusing() -> RowFunctions:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("not asked for")

    return RowFunctions(lambda: False, never, never)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.instance_norm(x),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, None, 2, "bicubic"),
        lambda x: F.conv_transpose2d(x, torch.ones(2, 2, 2, 2)),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_a_function_that_mixes_rows_in_another_way_is_refused(call: Any) -> None:
    x = torch.randn(1, 2, 4, 4)
    with refusing(), pytest.raises(SPError, match=r"The VAE calls \w+, which mixes rows .* remove SP VAE Patch"):
        call(x)
    call(x)


def test_functions_that_keep_rows_apart_are_torchs_own() -> None:
    x = torch.randn(1, 2, 4, 4)
    with refusing():
        enlarged = F.interpolate(F.pad(x, (1, 1)), scale_factor=2) + F.silu(x).mean()
    assert enlarged.shape == (1, 2, 8, 12)
