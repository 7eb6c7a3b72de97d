"""What a sequence plan says: where one architecture's token sequence is cut, exchanged and gathered.

Plans are declarations. They name modules and parameters of the model's own class; the
engine hooks into these. No forward is copied, so a plan survives changes of the model's
code that keep the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..comm import Transport
from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout, TileLayout, choose_split

if TYPE_CHECKING:
    from .forward_state import ForwardState

#: (value of an argument, the forward's run) -> the part of it that belongs to this rank's tokens
ShardRule = Callable[[Any, "ForwardState"], Any]
#: (model, block arguments by name and the forward's x as "input", tokens, world_size) -> layout
ChooseLayout = Callable[[nn.Module, Mapping[str, Any], int, int], SequenceLayout]
#: (output of a site, the site's arguments as they were before the cut, run, transport of all ranks) -> whole output
Gather = Callable[[Any, Mapping[str, Any], "ForwardState", Transport], Any]


def flat_layout(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    return FlatLayout(tokens, world_size)


def input_tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles of a model whose tokens are the places of its latent input, one each.

    Raises:
        SPError: some places were dropped or others added, so the tokens are no grid.
    """
    x = arguments["input"]
    frames, height, width = (x[0] if isinstance(x, (list, tuple)) else x).shape[2:]
    if frames * height * width != tokens:
        raise SPError(
            f"The {tokens} tokens are not the {frames} x {height} x {width} places of the latent, so they cannot be tiled; "
            "leave the layout of SP Model Patch at auto or flat"
        )
    return TileLayout((frames, height, width), choose_split(height, width, world_size))


@dataclass(frozen=True)
class Attention:
    """An attention of a block that needs other ranks' tokens: a module, or "" for the block itself.

    ``self``: q, k and v are this rank's tokens. ``from_stream``: q is whole on every rank,
    k and v are this rank's tokens (video-to-audio). ``joint``: q, k and v begin with tokens that
    are whole on every rank (text), then come this rank's. Attentions whose keys are replicated
    (text, audio) need nothing and are not named.
    """

    module: str = ""
    kind: str = "self"
    #: true when the module will not attend at all in this call, given its transformer options
    skipped: Callable[[Mapping[str, Any]], bool] = lambda options: False
    #: parameter with a mask that is no tensor, and the attention that understands it:
    #: (q, k, v, heads, mask, attn_precision, transformer_options) -> out, on whole tokens
    mask_parameter: str = "mask"
    mask_attention: Callable[[nn.Module], Callable[..., Tensor]] | None = None
    #: that mask speaks of positions in the model's own order
    mask_in_raster: bool = False


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that tokens pass. A model may have several: double and single blocks, control blocks."""

    path: str
    #: block parameter that holds the tokens, (B, T, C), and its place if that is a tuple
    stream: str
    attentions: tuple[Attention, ...]
    #: other block parameters that have something for each token
    cuts: Mapping[str, ShardRule] = field(default_factory=dict)
    stream_item: int | None = None
    #: axis of the tokens in the stream
    dim: int = 1
    #: block parameter with tokens that stay whole (text), (B, N, C); in attention they stand before the stream's
    whole: str | None = None
    #: the stream begins with those whole tokens
    joined: bool = False
    #: the stream is one of its own, beside the main one: it comes in whole whenever it is new
    enters: bool = False

    def of(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.path))  # type: ignore[call-overload]


@dataclass(frozen=True)
class HookPoint:
    """A module or method outside the blocks: arguments to cut, and whether or how its output is gathered."""

    path: str
    cuts: Mapping[str, ShardRule] = field(default_factory=dict)
    gather: bool | Gather = False


def _never(options: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True)
class SequencePlan:
    """One architecture. Paths are dotted names below the diffusion model."""

    #: class name in the host
    architecture: str
    #: the first block that is called splits the sequence
    blocks: tuple[Blocks, ...]
    sites: tuple[HookPoint, ...]
    choose_layout: ChooseLayout = flat_layout
    #: the tile layout, for users who ask for it
    tiles: ChooseLayout | None = None
    #: every rank must hold equally much of every frame, so only tiles will do
    only_tiles: bool = False
    #: given the forward's arguments: gather behind the last block already, as what follows takes whole tokens
    gather_early: Callable[[Mapping[str, Any]], bool] = _never
    #: lists of ``transformer_options["patches"]`` that the model calls between blocks with the stream as "img"
    between: tuple[str, ...] = ()
    #: true when no block touches the stream in this forward, given its transformer options
    idle: Callable[[Mapping[str, Any]], bool] = _never
    #: arguments of the forward that hold lists of (B, T, C) tensors by name, which the model adds to the stream between blocks
    residuals: tuple[str, ...] = ()
    #: arguments that need another form to travel to the workers
    travels: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    #: method that computes on the workers
    forward: str = "_forward"
    #: methods that the host calls outside the forward and that need weights
    weight_methods: tuple[str, ...] = ()
    #: method that lets go of what the model kept during a sampling run
    after_run: str | None = None

    @property
    def keeps_state(self) -> bool:
        """The model keeps something between forwards, so every forward of a run has to be cut alike."""
        return self.after_run is not None

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """All blocks, list after list."""
        return [block for blocks in self.blocks for block in blocks.of(model)]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(attention for blocks in self.blocks for attention in blocks.attentions)


class NoPlan(SPError):
    """The architecture cannot be run on several devices."""

    def __init__(self, found: str, known: list[str]) -> None:
        super().__init__(
            f"{found} has no sequence plan, so it cannot run on several devices. Architectures that can: {', '.join(known)}. "
            "Remove SP Model Patch to run it on one"
        )
