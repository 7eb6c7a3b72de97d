"""What a decode of Wan 2.1's VAE costs on bands over devices: FLOP, bytes of halos, and how much faster it gets at least.

The rate of matrix products is all that is measured of a device, and no convolution is faster. So the time of computing is a
lower bound, and with it the share that devices save of the whole.

Host's calls: the first frame of the latent by itself, then two frames a call at every level; each call of a convolution over
time has two frames of the last one in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..layout.bands import cut_bands
from .cost import MeasuredRates

#: a convolution over rows and columns, the same over time as well, over time alone
_FRAME, _VIDEO, _TIME = 9, 27, 3


@dataclass(frozen=True)
class WanDecoder:
    """The decoder of Wan 2.1's VAE. A level has twice the rows and columns of the one before it; its first two double the frames."""

    width: int = 96
    multiples: tuple[int, ...] = (1, 2, 4, 4)
    #: in each level there is one more
    blocks: int = 2
    latent_channels: int = 16
    time_levels: int = 2

    @property
    def middle(self) -> int:
        """Channels of the attention."""
        return self.width * self.multiples[-1]


@dataclass(frozen=True)
class Video:
    """A latent video: frames, rows, columns. 81 frames of 720p are 21 x 90 x 160."""

    frames: int = 21
    rows: int = 90
    columns: int = 160


@dataclass(frozen=True)
class _Conv:
    inputs: int
    outputs: int
    taps: int
    level: int


def _convolutions(decoder: WanDecoder) -> Iterator[_Conv]:
    """Those that matter: 1 x 1 convolutions are left out."""
    widths = [decoder.width * multiple for multiple in (decoder.multiples[-1], *reversed(decoder.multiples))]
    yield _Conv(decoder.latent_channels, widths[0], _VIDEO, 0)
    for _ in range(4):
        yield _Conv(widths[0], widths[0], _VIDEO, 0)
    for level, (before, width) in enumerate(pairwise(widths)):
        inputs = before // 2 if level else before
        for _ in range(decoder.blocks + 1):
            yield _Conv(inputs, width, _VIDEO, level)
            yield _Conv(width, width, _VIDEO, level)
            inputs = width
        if level < len(decoder.multiples) - 1:
            if level < decoder.time_levels:
                yield _Conv(width, 2 * width, _TIME, level)
            yield _Conv(width, width // 2, _FRAME, level + 1)
    yield _Conv(widths[-1], 3, _VIDEO, len(decoder.multiples) - 1)


def _frames(decoder: WanDecoder, video: Video, level: int) -> int:
    return 2 ** min(level, decoder.time_levels) * (video.frames - 1) + 1


def _calls(decoder: WanDecoder, video: Video, level: int) -> int:
    """Calls of a convolution in a level, after that of the first frame."""
    later = video.frames - 1
    return -(-later // 2) if level == 0 else 2 ** (min(level, decoder.time_levels) - 1) * later


def decode_flops(decoder: WanDecoder, video: Video) -> float:
    """FLOP of all convolutions, 2 for each weight and place; the first frame counts as the others."""
    return float(
        sum(
            2 * conv.inputs * conv.outputs * conv.taps * video.rows * video.columns * 4**conv.level * _frames(decoder, video, conv.level)
            for conv in _convolutions(decoder)
        )
    )


def halo_bytes(decoder: WanDecoder, video: Video, itemsize: int) -> int:
    """Bytes that a rank sends to one neighbour in a decode: a row of what goes into each convolution over rows."""
    total = 0
    for conv in _convolutions(decoder):
        if conv.taps == _TIME:
            continue
        frames = _frames(decoder, video, conv.level)
        joined = frames + 2 * _calls(decoder, video, conv.level) if conv.taps == _VIDEO else frames
        total += conv.inputs * joined * video.columns * 2**conv.level * itemsize
    return total


def decode_speed_up(rates: MeasuredRates, devices: int, decoder: WanDecoder | None = None, video: Video | None = None) -> float:
    """How many times as fast ``devices`` decode in bfloat16, at least. Every device computes the attention of all rows."""
    decoder, video = decoder or WanDecoder(), video or Video()
    places, width = video.rows * video.columns, decoder.middle
    attention_s = 4.0 * places**2 * width * video.frames / rates.flops
    alone_s = decode_flops(decoder, video) / rates.flops
    bands = cut_bands(video.rows, devices)
    if bands.ranks == 1:
        return 1.0
    sides = min(2, bands.ranks - 1)
    gathered = places * width * video.frames * 2 * (bands.ranks - 1) / bands.ranks
    exchange_s = (sides * halo_bytes(decoder, video, 2) + gathered) / rates.bandwidth + rates.latency_s * _exchanges(decoder, video)
    shared_s = alone_s * max(bands.counts) / bands.height + attention_s + exchange_s
    return (alone_s + attention_s) / shared_s


def _exchanges(decoder: WanDecoder, video: Video) -> int:
    return sum(1 + _calls(decoder, video, conv.level) for conv in _convolutions(decoder) if conv.taps != _TIME)
