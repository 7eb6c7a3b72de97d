"""The comparisons of the other modules would notice: plans are spoiled in the workers, and the picture differs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from host.graphs import Branch, Case, Link, compare, latent, load, run_sp, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"

Spoil = Callable[[str, str], Case]


def spoiled(checkpoint: str, how: str, turn: int) -> Case:
    def case(branch: Branch) -> Link:
        wire = branch.add("SPTestSabotage", model=load(branch, checkpoint), how=how, turn=turn)[0]
        if checkpoint == "tiny_ltxav":
            words, start = text(branch, 48, 16, frame_rate=25.0), latent(branch, "1,128,3,5,7;1,8,13,16")
        elif checkpoint == "tiny_ltxv":
            plain = text(branch, 48, 16, frame_rate=25.0)
            words = tuple(branch.add("SPTestTextMask", conditioning=c, hidden=5)[0] for c in plain)  # type: ignore[assignment]
            start = latent(branch, "1,128,3,5,7")
        else:
            words, start = text(branch, 4096), latent(branch, "1,48,4,10,14", scale=1.0, mask="ramp")
        return sample(branch, branch.patch(wire), words, start)

    return case


@pytest.fixture(scope="module")
def spoil() -> Spoil:
    turns = count(1)
    return lambda checkpoint, how: spoiled(checkpoint, how, next(turns))


def errors(server: ComfyServer, case: Case) -> list[float]:
    return compare(server, case, DEVICES, check=False, cfg_split=1).errors


def test_frames_of_their_own_time(server: ComfyServer, spoil: Spoil) -> None:
    """A flat split that leaves Wan's per-frame modulation alone gives tokens another frame's: no error, another picture."""
    assert max(errors(server, spoil("tiny_wan22_5b", "frames forgotten"))) > 1e-2
    assert max(errors(server, spoil("tiny_wan22_5b", "nothing"))) <= 2e-5


@pytest.mark.parametrize("checkpoint", ["tiny_wan22_5b", "tiny_ltxv"])
def test_self_attention(server: ComfyServer, spoil: Spoil, checkpoint: str) -> None:
    assert max(errors(server, spoil(checkpoint, "no exchange"))) > 1e-2
    assert max(errors(server, spoil(checkpoint, "nothing"))) <= 2e-5


@pytest.mark.parametrize("how", ["no exchange", "video to audio forgotten"])
def test_audio_that_heard_a_part_of_the_video(server: ComfyServer, spoil: Spoil, how: str) -> None:
    with pytest.raises(PromptFailed, match="SP_VERIFY_RANKS: the output of rank 1 differs from that of rank 0"):
        errors(server, spoil("tiny_ltxav", how))
    assert max(errors(server, spoil("tiny_ltxav", "nothing"))) <= 2e-5


def test_ranks_that_differ_in_a_bit(server: ComfyServer, spoil: Spoil) -> None:
    with pytest.raises(PromptFailed, match="SP_VERIFY_RANKS: the output of rank 1 differs from that of rank 0"):
        run_sp(server, spoil("tiny_ltxav", "ranks differ"), DEVICES, cfg_split=1)
    assert max(errors(server, spoil("tiny_ltxav", "nothing"))) <= 2e-5


def test_a_plan_that_does_not_fit_this_host(server: ComfyServer, spoil: Spoil) -> None:
    """Refused when the workers have loaded the model, before anything is installed in it."""
    sentence = r"Wan 2\.1 / 2\.2 cannot run on several devices with ComfyUI [0-9.]+: WanAttentionBlock has no attention_of_tomorrow"
    with pytest.raises(PromptFailed, match=sentence):
        run_sp(server, spoil("tiny_wan22_5b", "renamed"), DEVICES)
    assert max(errors(server, spoil("tiny_wan22_5b", "nothing"))) <= 2e-5
