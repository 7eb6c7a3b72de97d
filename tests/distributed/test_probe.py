"""Code of other packs is probed: what keeps its parts apart is shared out from its second call on, and no forward is ever wrong.

Every case is a sampling run of four forwards, compared forward by forward with the same run in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from campaign import parameters
from distributed.ranks import RankPools
from torch import Tensor

from sp_core.comm.transports.collective import CollectiveTransport
from sp_core.plans.engine import Engine
from sp_core.plans.override import OVERRIDE
from sp_core.plans.probing import Probing, Verdicts
from sp_core.plans.whole import Foreign
from sp_core.reference.model import AudioVideoDiT, ReferenceConfig
from sp_core.reference.plan import REFERENCE
from sp_core.reference.sample import Inputs, step_arguments

CONFIG = ReferenceConfig(layers=2)
SIGMAS = (1.0, 0.75, 0.5, 0.25)
#: (frames, rows, columns) of the latent: 120 tokens, and 105, which no rank count here divides
SIZES = {"even": (4, 10, 12), "uneven": (3, 10, 14)}

Forward = Callable[..., Any]
#: (the module's own forward, what tests change from step to step) -> the forward in its place
MakeForward = Callable[[Forward, SimpleNamespace], Forward]


@dataclass(frozen=True)
class Kind:
    """Code of another pack, and how it is computed from its second step on."""

    make: MakeForward | None = None
    paths: tuple[str, ...] = ("blocks.0.video_mlp", "blocks.1.video_mlp")
    override: Callable[[SimpleNamespace], Any] | None = None
    #: by step: "apart" or "whole"
    computed: tuple[str, str, str, str] = ("apart", "apart", "apart", "apart")
    beside: dict[str, MakeForward] = field(default_factory=dict)


WHOLE = ("whole",) * 4
#: apart in some places only: attention to text and sound has all heads on each rank, whatever is done with them
BOTH = ("both",) * 4
CHANGES = ("apart", "apart", "whole", "whole")


# -- what keeps tokens apart ----------------------------------------------------------------


def in_chunks(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: torch.cat([plain(part) for part in x.chunk(3, 1)], 1)


def into_empty(plain: Forward, world: SimpleNamespace) -> Forward:
    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for start in range(0, x.size(1), 16):
            out[:, start : start + 16] = plain(x[:, start : start + 16])
        return out

    return forward


def text_doubled(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x, text, **options: 2 * plain(x, 0.7 * text, **options)


def by_a_number(plain: Forward, world: SimpleNamespace) -> Forward:
    """Its strength changes with the steps, which changes nothing of how it treats tokens; but nobody can know that beforehand."""
    return lambda x: world.strength * plain(x)


# -- what does not --------------------------------------------------------------------------


def with_the_mean(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: plain(x) + 0.3 * x.mean(1, keepdim=True)


def one_token(plain: Forward, world: SimpleNamespace) -> Forward:
    """The first token comes through in the last one, fainter than any rounding."""

    def forward(x: Tensor) -> Tensor:
        out = plain(x)
        return torch.cat([out[:, :-1], out[:, -1:] + 1e-9 * x[:, :1]], 1)

    return forward


def weight_of_zero(plain: Forward, world: SimpleNamespace) -> Forward:
    weight = torch.zeros(())
    world.on_step.append(lambda step: weight.fill_(0.3 * (step > 1)))
    return lambda x: plain(x) + weight * x.mean(1, keepdim=True)


def first_tokens(plain: Forward, world: SimpleNamespace) -> Forward:
    """Each token by itself, and the first ones otherwise."""
    return lambda x: torch.cat([2 * plain(x[:, :8]), plain(x[:, 8:])], 1)


def second_block(plain: Forward, world: SimpleNamespace) -> Forward:
    world.blocks += 1
    number = world.blocks
    return lambda x: plain(x) + 0.3 * x.mean(1, keepdim=True) if number == 2 else plain(x)


def by_sigma(plain: Forward, world: SimpleNamespace) -> Forward:
    def forward(x: Tensor, text: Tensor, transformer_options: Any = None) -> Tensor:
        out = plain(x, text, transformer_options=transformer_options)
        return out + (1 - transformer_options["sigmas"]) * out.mean(1, keepdim=True)

    return forward


def asks_for_sigma(plain: Forward, world: SimpleNamespace) -> Forward:
    def forward(x: Tensor, text: Tensor, transformer_options: Any = None) -> Tensor:
        out = plain(x, text, transformer_options=transformer_options)
        return out + out.mean(1, keepdim=True) if transformer_options["sigmas"] < 0.6 else out

    return forward


def late(plain: Forward, world: SimpleNamespace) -> Forward:
    """From the third step on it looks at all tokens; a callback of the pack says so."""
    return lambda x: plain(x) + 0.3 * x.mean(1, keepdim=True) if world.late else plain(x)


def late_and_guarded(plain: Forward, world: SimpleNamespace) -> Forward:
    """As ``late``, if the tokens make up the whole video; a share of them would never show it."""
    tokens = world.tokens
    return lambda x: plain(x) + 0.3 * x.mean(1, keepdim=True) if world.late and x.size(1) == tokens else plain(x)


def late_and_fails(plain: Forward, world: SimpleNamespace) -> Forward:
    def forward(x: Tensor) -> Tensor:
        out = plain(x)
        return out + out.unflatten(1, (world.tokens // 15, 15)).mean(2).repeat_interleave(15, 1) if world.late else out

    return forward


def counting(plain: Forward, world: SimpleNamespace) -> Forward:
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return plain(x) * (1 + 0.1 * len(calls))

    return forward


class Averaging:
    """Keeps a mean over the steps, in a tensor of its own."""

    def __init__(self, plain: Forward) -> None:
        self.plain, self.seen = plain, torch.zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(x.abs().mean())
        return self.plain(x) * self.seen


def averaging(plain: Forward, world: SimpleNamespace) -> Forward:
    return Averaging(plain)


def random(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: plain(x) + 0.1 * torch.randn_like(x)


def reading(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: plain(x) * (2.0 if x[0, 0, 0].item() > 0 else 1.0)


def by_numpy(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: plain(x) + float(x.numpy().mean())


def in_place(plain: Forward, world: SimpleNamespace) -> Forward:
    return lambda x: plain(x.mul_(2.0))


def with_an_iterator(plain: Forward, world: SimpleNamespace) -> Forward:
    steps = itertools.count()
    return lambda x: plain(x) + 0.3 * (next(steps) > 2) * x.mean(1, keepdim=True)


# -- attention ------------------------------------------------------------------------------


def sharper(world: SimpleNamespace) -> Any:
    return lambda function, q, k, v, heads, **options: function(1.5 * q, k, v, heads, **options)


def mixed_heads(world: SimpleNamespace) -> Any:
    def override(function: Forward, q: Tensor, k: Tensor, v: Tensor, heads: int, **options: Any) -> Tensor:
        out = function(q, k, v, heads, **options).unflatten(2, (heads, -1))
        return (0.5 * out + 0.5 * out.mean(2, keepdim=True)).flatten(2)

    return override


def first_head(world: SimpleNamespace) -> Any:
    def override(function: Forward, q: Tensor, k: Tensor, v: Tensor, heads: int, **options: Any) -> Tensor:
        out = function(q, k, v, heads, **options).unflatten(2, (heads, -1))
        return torch.cat([2 * out[:, :, :1], out[:, :, 1:]], 2).flatten(2)

    return override


def late_heads(world: SimpleNamespace) -> Any:
    mixing = mixed_heads(world)

    def override(function: Forward, *args: Any, **options: Any) -> Tensor:
        return mixing(function, *args, **options) if world.late else function(*args, **options)

    return override


TEXT = ("blocks.0.video_text", "blocks.1.video_text")
KINDS = {
    "in chunks": Kind(in_chunks),
    "into empty memory": Kind(into_empty),
    "text attention": Kind(text_doubled, TEXT),
    "sharper attention": Kind(override=sharper),
    "attention and forwards": Kind(in_chunks, override=sharper),
    "a strength that changes": Kind(by_a_number, computed=CHANGES),
    "the mean": Kind(with_the_mean, computed=WHOLE),
    "one token": Kind(one_token, computed=WHOLE),
    "a weight of zero": Kind(weight_of_zero, computed=WHOLE),
    "the first tokens": Kind(first_tokens, computed=WHOLE),
    "in one block": Kind(second_block, computed=BOTH),
    "by sigma": Kind(by_sigma, TEXT, computed=WHOLE),
    "asks for sigma": Kind(asks_for_sigma, TEXT, computed=WHOLE),
    "late": Kind(late, computed=CHANGES),
    "late and guarded": Kind(late_and_guarded, computed=CHANGES),
    "late and fails on a part": Kind(late_and_fails, computed=CHANGES),
    "counts": Kind(counting, computed=WHOLE),
    "keeps a mean": Kind(averaging, computed=WHOLE),
    "random": Kind(random, computed=WHOLE),
    "reads values": Kind(reading, computed=WHOLE),
    "numpy": Kind(by_numpy, computed=WHOLE),
    "in place": Kind(in_place, computed=WHOLE),
    "an iterator": Kind(with_an_iterator, computed=WHOLE),
    "mixed heads": Kind(override=mixed_heads, computed=BOTH),
    "the first head": Kind(override=first_head, computed=BOTH),
    "late heads": Kind(override=late_heads, computed=CHANGES),
    "beside one that counts": Kind(
        in_chunks, computed=("both", "whole", "whole", "whole"), beside={"blocks.1.video_text": lambda p, w: counted(p)}
    ),
    "late, beside a random one": Kind(late, computed=CHANGES, beside={"blocks.0.video_text": lambda p, w: noisy(p)}),
}


def counted(plain: Forward) -> Forward:
    calls: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return plain(*args, **kwargs) * (1 + 0.1 * len(calls))

    return forward


def noisy(plain: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = plain(*args, **kwargs)
        return out + 0.1 * torch.randn_like(out)

    return forward


# -- a run ----------------------------------------------------------------------------------


@dataclass
class Step:
    video: Tensor
    audio: Tensor
    apart: list[str]
    whole: list[str]
    attempts: int = 1


def sampled(kind: Kind, sizes: str, rank: int, world_size: int) -> Iterator[Step]:
    torch.manual_seed(3)
    model, inputs = AudioVideoDiT.seeded(CONFIG, 0), Inputs.seeded(CONFIG, 1, *SIZES[sizes])
    world = SimpleNamespace(late=False, strength=1.0, blocks=0, tokens=inputs.tokens, on_step=[])
    made = {path: kind.make for path in kind.paths if kind.make is not None} | kind.beside
    functions = []
    for path, make in made.items():
        module = model.get_submodule(path)
        assert make is not None
        module.forward = make(module.forward, world)  # type: ignore[method-assign]
        functions.append((f"{path}.forward", module.forward))
    override = None if kind.override is None else kind.override(world)
    verdicts = Verdicts()
    for step, sigma in enumerate(SIGMAS):
        world.late, world.strength = step > 1, 1.0 + 0.1 * (step > 1)
        for change in world.on_step:
            change(step)
        options = {"sigmas": torch.tensor([sigma]), "block_index": 0} | ({} if override is None else {OVERRIDE: override})
        arguments = step_arguments(inputs, inputs.video, inputs.audio, sigma)
        if world_size == 1:
            yield Step(*model(**arguments, transformer_options=options), [], [])
            continue
        names = {path: "beside" if path in kind.beside else "code" for path in made}
        foreign = Foreign(names, lambda place, function: "code")
        yield shared(model, arguments, options, verdicts, foreign, [*functions, *([] if override is None else [(OVERRIDE, override)])])


def shared(model: Any, arguments: Any, options: Any, verdicts: Verdicts, foreign: Foreign, functions: list[Any]) -> Step:
    attempts = 0
    while True:
        attempts += 1
        engine = Engine(REFERENCE, CollectiveTransport(), foreign=foreign)
        probing = engine._probing = Probing(verdicts, engine.sequence, "one size", functions, torch.device("cpu"))
        with engine.installed(model) as state:
            video, audio = model(**arguments, transformer_options=engine.adapted(dict(options), state))
            state.check()
        if not probing.settle():
            return Step(video, audio, state.apart, list(state.got_whole), attempts)


def run(rank: int, world_size: int, name: str, sizes: str) -> list[Step]:
    with torch.inference_mode():
        return list(sampled(KINDS[name], sizes, rank, world_size))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    with RankPools() as pools:
        yield pools


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def how(step: Step) -> str:
    apart, whole = "code" in step.apart, "code" in step.whole
    return "both" if apart and whole else "apart" if apart else "whole" if whole else "neither"


@pytest.mark.parametrize(("world_size", "sizes"), parameters(plain=[(3, "uneven")], campaign=[(2, "even")]))
@pytest.mark.parametrize("name", KINDS)
def test_no_forward_is_wrong_and_what_is_apart_is_shared_out(ranks: RankPools, name: str, world_size: int, sizes: str) -> None:
    expected = run(0, 1, name, sizes)
    found = ranks.call(world_size, run, name, sizes)
    for steps in found:
        for mine, theirs in zip(steps, expected, strict=True):
            assert relative(mine.video, theirs.video) <= 2e-5
            assert relative(mine.audio, theirs.audio) <= 2e-5
        assert tuple(map(how, steps)) == KINDS[name].computed
        assert [step.attempts for step in steps] == [2 if KINDS[name].computed == CHANGES and i == 2 else 1 for i in range(4)]
