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

from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout, TileLayout, choose_split

if TYPE_CHECKING:
    from .run import Run

#: (value of an argument, the forward's run) -> the part of it that belongs to this rank's tokens
Cut = Callable[[Any, "Run"], Any]
#: (model, block arguments by name and the forward's x as "input", tokens (B, T, C), world_size) -> layout
ChooseLayout = Callable[[nn.Module, Mapping[str, Any], Tensor, int], SequenceLayout]


def flat_layout(model: nn.Module, arguments: Mapping[str, Any], tokens: Tensor, world_size: int) -> SequenceLayout:
    return FlatLayout(tokens.size(1), world_size)


def input_tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: Tensor, world_size: int) -> SequenceLayout:
    """Tiles of a model whose tokens are the places of its latent input, one each.

    Raises:
        SPError: some places were dropped or others added, so the tokens are no grid.
    """
    x = arguments["input"]
    frames, height, width = (x[0] if isinstance(x, (list, tuple)) else x).shape[2:]
    if frames * height * width != tokens.size(1):
        raise SPError(
            f"The {tokens.size(1)} tokens are not the {frames} x {height} x {width} places of the latent, so they cannot be tiled; "
            "leave the layout of SP Model Patch at auto or flat"
        )
    return TileLayout((frames, height, width), choose_split(height, width, world_size))


@dataclass(frozen=True)
class Attention:
    """An attention module of a block that needs other ranks' tokens.

    ``self``: q, k and v are this rank's tokens. ``from_stream``: q is whole on every rank,
    k and v are this rank's tokens (video-to-audio). Attentions whose keys are replicated
    (text, audio) need nothing and are not named.
    """

    module: str
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
class Site:
    """A module or method behind the blocks: arguments to cut, and whether its output is gathered."""

    path: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    gather: bool = False


@dataclass(frozen=True)
class SequencePlan:
    """One architecture. Paths are dotted names below the diffusion model."""

    #: class name in the host
    architecture: str
    #: the list of blocks that all tokens pass
    blocks: str
    #: block parameter that holds the tokens, (B, T, C), and its place if that is a tuple
    stream: str
    attentions: tuple[Attention, ...]
    #: other block parameters that have something for each token
    cuts: Mapping[str, Cut]
    sites: tuple[Site, ...]
    stream_item: int | None = None
    choose_layout: ChooseLayout = flat_layout
    #: the tile layout, for users who ask for it
    tiles: ChooseLayout | None = None
    #: true when no block touches the stream in this forward, given its transformer options
    idle: Callable[[Mapping[str, Any]], bool] = lambda options: False
    #: method that computes on the workers
    forward: str = "_forward"
    #: methods that the host calls outside the forward and that need weights
    weight_methods: tuple[str, ...] = ()
    #: method that lets go of what the model kept during a sampling run
    after_run: str | None = None

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.blocks))  # type: ignore[call-overload]


class NoPlan(SPError):
    """The architecture cannot be run on several devices."""

    def __init__(self, found: str, known: list[str]) -> None:
        super().__init__(
            f"{found} has no sequence plan, so it cannot run on several devices. Architectures that can: {', '.join(known)}. "
            "Remove SP Model Patch to run it on one"
        )
