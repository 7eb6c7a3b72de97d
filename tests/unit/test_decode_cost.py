"""What a decode on bands is predicted to cost."""

from __future__ import annotations

import pytest

from sp_core.doctor.verdict import decode_sentence
from sp_core.planner.cost import MeasuredRates
from sp_core.planner.decode_cost import Video, WanDecoder, decode_flops, decode_speed_up, halo_bytes

FAST, SLOW = MeasuredRates("fast", 600e12, 450e9), MeasuredRates("slow", 600e12, 2e9)


def test_flops_of_the_release() -> None:
    """By hand, level by level, in units of 10^12: convolutions over time, and those behind each enlargement."""
    by_hand = 24.2 + 0.5 + 3.1 + 103.3 + 4.2 + 24.8 + 222.8 + 24.8 + 222.9 + 1.2
    assert decode_flops(WanDecoder(), Video()) == pytest.approx(by_hand * 1e12, rel=0.01)


def test_halo_of_one_frame() -> None:
    """Of one latent frame each convolution is called once: a row of what goes in, float32."""
    decoder, columns = WanDecoder(4, (1, 1), 0, 2, 0), 3
    inputs = [2, 4, 4, 4, 4, 4, 4]
    behind = [4, 2, 4, 4]  # of the level with twice the columns: the enlargement, a block, the last
    assert halo_bytes(decoder, Video(1, 5, columns), 4) == 4 * columns * (sum(inputs) + 2 * sum(behind))


def test_later_frames_have_two_of_the_last_call_in_front() -> None:
    decoder = WanDecoder(4, (1,), 0, 2, 0)
    one, three, six = (halo_bytes(decoder, Video(frames, 5, 3), 4) for frames in (1, 3, 6))
    assert (three, six) == (one * (3 + 2), one * (6 + 3 * 2))


def test_more_devices_and_faster_links_are_faster() -> None:
    fast = [decode_speed_up(FAST, count) for count in (1, 2, 4, 8)]
    assert fast == sorted(fast) and fast[0] == 1.0 and 1.8 < fast[1] < 2 and 5 < fast[3] < 8
    assert decode_speed_up(SLOW, 4) < decode_speed_up(FAST, 4)


def test_the_sentence_says_what_a_person_can_do() -> None:
    assert "with SP VAE Patch at least 3." in decode_sentence(FAST, 4) and "on 4 devices" in decode_sentence(FAST, 4)
    assert "may bring nothing" in decode_sentence(MeasuredRates("none", 600e12, 2e8), 2)
