"""Code of other packs that looks at all tokens or mixes heads gets whole data: the result is the one of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.ranks import RankPools, run_ranks
from torch import Tensor, nn

from sp_core.comm.transports.collective import CollectiveTransport
from sp_core.plans.engine import Engine
from sp_core.plans.forward_state import Escaped
from sp_core.plans.override import OVERRIDE
from sp_core.plans.whole import Foreign
from sp_core.reference.model import AudioVideoDiT, ReferenceConfig
from sp_core.reference.plan import REFERENCE
from sp_core.reference.sample import Inputs, step_arguments

CONFIG = ReferenceConfig(layers=2)


def with_the_mean(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Every token also gets a part of the mean of all tokens."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        streams = out if isinstance(out, tuple) else (out,)
        mixed = tuple(x + 0.3 * x.mean(1, keepdim=True) for x in streams)
        return mixed if isinstance(out, tuple) else mixed[0]

    return forward


def without_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A self-attention that calls no attention that anybody could override."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2) / x.size(2), -1) @ x

    return forward


def mix_heads(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
    """Attention whose heads see one another, and whose queries do."""
    out = function(q, k, v, heads, *args, **kwargs).unflatten(2, (heads, -1))
    return (0.5 * out + 0.3 * out.mean(2, keepdim=True) + 0.2 * out.mean(1, keepdim=True)).flatten(2)


#: paths of replaced forwards, what replaces them, and the override
KINDS: dict[str, tuple[list[str], Callable[..., Any] | None, Any]] = {
    "blocks": (["blocks.0", "blocks.1"], with_the_mean, None),
    "self-attention": (["blocks.0.video_self", "blocks.1.video_self"], with_the_mean, None),
    "own attention": (["blocks.1.video_self"], without_attention, None),
    "text attention": (["blocks.0.video_text"], with_the_mean, None),
    "video to audio": (["blocks.0.video_to_audio"], with_the_mean, None),
    "audio to video": (["blocks.0.audio_to_video"], with_the_mean, None),
    "audio only": (["blocks.0.audio_mlp", "blocks.1.audio_self"], with_the_mean, None),
    "feed-forward": (["blocks.0.video_mlp", "blocks.1.video_mlp.0"], with_the_mean, None),
    "head": (["video_head"], with_the_mean, None),
    "block and what is in it": (["blocks.0", "blocks.0.video_self", "blocks.0.video_self.to_q"], with_the_mean, None),
    "override": ([], None, mix_heads),
    "override and forward": (["blocks.0.video_self", "blocks.1.video_mlp"], with_the_mean, mix_heads),
}
#: (frames, rows, columns, audio tokens): tokens that divide and that do not, as many audio tokens as a rank has of the video
SIZES = {"even": (4, 10, 12, 26), "uneven": (3, 10, 14, 26), "even, audio alike": (4, 10, 12, 60), "uneven, audio alike": (3, 10, 14, 53)}


def replaced(model: nn.Module, paths: list[str], replace: Callable[..., Any] | None) -> None:
    for path in paths:
        assert replace is not None
        module = model.get_submodule(path)
        module.forward = replace(module.forward)  # type: ignore[method-assign]


def computed(kind: str, sizes: str, rank: int, world_size: int, trusted: bool) -> tuple[Tensor, Tensor, list[str]]:
    paths, replace, override = KINDS[kind]
    model = AudioVideoDiT.seeded(CONFIG, 0)
    *latent, audio = SIZES[sizes]
    inputs = Inputs.seeded(CONFIG, 1, *latent, audio_tokens=audio)
    arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
    replaced(model, paths, replace)
    options = {} if override is None else {OVERRIDE: override}
    with torch.inference_mode():
        if world_size == 1:
            return *model(**arguments, transformer_options=options), []
        foreign = Foreign() if trusted else Foreign(dict.fromkeys(paths, "code"), lambda place, function: "code")
        engine = Engine(REFERENCE, CollectiveTransport(), foreign=foreign)
        with engine.installed(model) as state:
            video, audio_out = model(**arguments, transformer_options=engine.adapted(options, state))
            state.check()
        return video, audio_out, list(state.got_whole)


def all_kinds(rank: int, world_size: int, sizes: str) -> dict[str, tuple[Tensor, Tensor, list[str]]]:
    return {kind: computed(kind, sizes, rank, world_size, trusted=False) for kind in KINDS}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


#: as many audio tokens as a rank has of the video, that is where there are two
PLAIN = [(2, "even, audio alike"), (2, "uneven, audio alike"), (3, "even")]
EVERY = [(world_size, sizes) for world_size in (2, 3) for sizes in SIZES]


@pytest.mark.parametrize(("world_size", "sizes"), parameters(plain=PLAIN, campaign=[case for case in EVERY if case not in PLAIN]))
def test_whole_data_gives_what_one_process_gives(ranks: RankPools, world_size: int, sizes: str) -> None:
    for found in ranks.call(world_size, all_kinds, sizes):
        for kind, (video, audio, got_whole) in found.items():
            expected_video, expected_audio, _ = computed(kind, sizes, 0, 1, trusted=False)
            assert relative(video, expected_video) <= 2e-5, kind
            assert relative(audio, expected_audio) <= 2e-5, kind
            assert got_whole == ([] if kind == "audio only" else ["code"]), kind


def trusted(rank: int, world_size: int, kind: str) -> float:
    video, audio, _ = computed(kind, "even", rank, world_size, trusted=True)
    expected_video, expected_audio, _ = computed(kind, "even", 0, 1, trusted=True)
    return max(relative(video, expected_video), relative(audio, expected_audio))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("audio only", "own attention", "video to audio")])
def test_without_whole_data_it_would_be_wrong(ranks: RankPools, kind: str) -> None:
    assert min(ranks.call(2, trusted, kind)) > 1e-4


def escapes(rank: int, world_size: int) -> str:
    with pytest.raises(Escaped) as caught:
        computed("own attention", "even", rank, world_size, trusted=True)
    return str(caught.value)


def test_an_attention_that_nobody_named_is_an_error() -> None:
    for sentence in run_ranks(2, escapes):
        assert "video_self of block 1" in sentence
