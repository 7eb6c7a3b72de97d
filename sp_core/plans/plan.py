"""What a sequence plan says: where one architecture's token sequence is split, exchanged and gathered.

Plans are declarations. They name modules and parameters of the model's own class; the
engine hooks into these. No forward is copied, so a plan survives changes of the model's
code that keep the names. :mod:`.validation` checks the names against a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..errors import SPError
from ..layout import FlatLayout, SequenceLayout, TileLayout
from .forward_state import Gather, ShardRule
from .host_functions import HostFunctions

#: (model, block arguments by name and the forward's x as "input", tokens, world_size) -> layout
ChooseLayout = Callable[[nn.Module, Mapping[str, Any], int, int], SequenceLayout]
#: what each rank found out about its own tokens, (B, world_size, C) -> what holds for all tokens, (B, 1, C)
Join = Callable[[Tensor], Tensor]
#: where an attention's queries, keys and values lie, see :class:`Attention`
AttentionKind = Literal["self", "joint", "replicated_queries"]


def flat_layout(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Contiguous runs of tokens, whatever they stand for."""
    return FlatLayout(tokens, world_size)


def input_tiles(model: nn.Module, arguments: Mapping[str, Any], tokens: int, world_size: int) -> SequenceLayout:
    """Tiles of a model that has exactly one token for each place of its latent input.

    Raises:
        SPError: the model dropped or added tokens, so they do not lie on a grid.
    """
    x = arguments["input"]
    frames, height, width = (x[0] if isinstance(x, (list, tuple)) else x).shape[2:]
    if frames * height * width != tokens:
        raise SPError(
            f"The {tokens} tokens are not the {frames} x {height} x {width} places of the latent, so they cannot be tiled; "
            "leave the layout of SP Model Patch at auto or flat"
        )
    return TileLayout.over((frames, height, width), world_size)


def _never(options: Mapping[str, Any]) -> bool:
    return False


def _always_split(arguments: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class MaskRule:
    """A mask that is an object of the model's own instead of a tensor. LTX and LongCat-Video have one.

    The module would look into it and attend by itself, to its own tokens only. The engine
    carries it past the module and hands it to ``attention`` when all tokens are there.
    """

    #: parameter of the attention module that holds the mask
    parameter: str
    #: parameter of the block that holds it
    of_block: str
    #: (attention module, ComfyUI's functions) -> the attention that understands the mask:
    #: (q, k, v, heads, mask, attn_precision, transformer_options) -> out, all with all T tokens
    attention: Callable[[nn.Module, HostFunctions], Callable[..., Tensor]]
    #: the mask counts tokens in raster order (LTX), so tokens in tiles are put back into it around the attention
    in_raster: bool = False
    #: the module is given None in its place and attends as it does without it: it would compute with the mask by itself, on its own
    #: tokens. ``attention`` is called once, with all of the rank's heads (CausalWan's keys and values of earlier frames)
    withheld: bool = False
    #: parameters that are withheld with it; the mask is a dictionary of all of them then (WanAnimate2)
    together_with: tuple[str, ...] = ()
    #: dim of heads in the tensors of that dictionary, of which each rank has all; ``attention`` gets the rank's own
    heads_dim: int | None = None


@dataclass(frozen=True)
class OwnHeads:
    """Modules below an attention between which it attends by itself, with all tokens of this rank's heads. SeedVR2 has one.

    Both take and give tokens and replicated tokens, (t, C) and (N, C); see :mod:`.own_heads`.
    """

    #: path of that which gives queries, keys and values, all heads of each behind one another
    into: str
    #: path of that which takes what attention gave
    out: str
    #: attribute of the attention that says how many heads there are
    heads: str


@dataclass(frozen=True)
class Attention:
    """An attention of a block that needs other ranks' tokens.

    ``module`` is its path below the block, or "" where the block itself calls the attention
    function (HunyuanVideo). Attentions whose keys every rank holds in full (text, audio) need
    nothing and are not named.

    Kinds:
        ``self``: queries, keys and values are this rank's tokens (Wan).
        ``joint``: they are tokens that every rank holds in full, text, and then this rank's tokens
        (HunyuanVideo); or this rank's first, where the blocks' :class:`Replicated` says so. A call
        of the same module without the replicated ones is self-attention (SD3.5 medium).
        ``replicated_queries``: every rank holds all queries, keys and values are this rank's
        tokens (LTX-2's video-to-audio attention).
    """

    module: str = ""
    kind: AttentionKind = "self"
    #: true when the module will not attend at all in this call, given its transformer options (LTX under spatio-temporal guidance)
    skipped: Callable[[Mapping[str, Any]], bool] = _never
    #: LTX (guide frames), LongCat-Video (conditioning frames)
    mask: MaskRule | None = None
    #: path below the module of what knows the number of heads, where the module does not (SD3)
    heads_of: str = ""
    #: name by which the module's code calls ComfyUI's attention, where it hands no ``transformer_options`` on (PixArt). While the
    #: module runs, that name leads to the exchange. Such blocks are not compiled
    function: str = ""
    #: the module's own code attends, to windows for example, and the exchange takes place around that. Such blocks are not compiled
    own_heads: OwnHeads | None = None
    #: the module's method that the block calls (WanAnimate2)
    method: str = "forward"

    def __post_init__(self) -> None:
        if self.kind not in get_args(AttentionKind):
            raise ValueError(f"'{self.kind}' is no kind of attention; there are {', '.join(get_args(AttentionKind))}")


@dataclass(frozen=True)
class Replicated:
    """Tokens that every rank holds in full (text) and that attend jointly with the stream's: HunyuanVideo.

    In the joint attention they stand before the stream's tokens, or ``behind`` them.
    """

    #: block parameter that holds them, (B, N, C); None where the blocks before have told how many there are
    argument: str | None = None
    #: the stream itself begins with them (HunyuanVideo's single blocks)
    in_stream: bool = False
    #: of the two that a block returns they are the first (Qwen-Image)
    returned_first: bool = False
    #: they stand behind the stream's tokens, wherever both are in one tensor (Mochi)
    behind: bool = False


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that tokens pass. A model may have several: double and single blocks, control blocks."""

    #: path of the list
    path: str
    #: block parameter that holds the tokens, (B, T, C); the plan's first list of blocks gets all T of them
    stream: str
    attentions: tuple[Attention, ...]
    #: other block parameters that have something for each token, and the rule that takes this rank's part of each
    shard: Mapping[str, ShardRule] = field(default_factory=dict)
    #: place of the tokens in the stream where that is a tuple (LTX-2: video first, audio second)
    stream_item: int | None = None
    #: dim of the tokens in the stream (MiniMax H3: 0, it has no batch)
    dim: int = 1
    #: over how many dims the tokens lie, from that one on (Cosmos: 3, frames, height and width). A rank's t tokens are t x 1 x 1 there
    dims: int = 1
    #: HunyuanVideo's text
    replicated: Replicated | None = None
    #: these blocks have a stream of their own beside the main one, and each new one arrives with all T tokens (VACE's control videos)
    own_stream: bool = False
    #: behind the last of these the tokens are gathered, and the next list of blocks splits another sequence (Lumina 2: first the
    #: picture's tokens, then those of text and picture)
    gathers: bool = False
    #: the block's method that the model calls (WanAnimate2). Where it is not ``forward``, weights are not shared and nothing is compiled
    method: str = "forward"
    #: names of the block's parameters, where its forward takes what comes (``*args``, SD3)
    parameters: tuple[str, ...] = ()
    #: modules below a block, by path, that tell something about all tokens, such as the largest of a value: (B, 1, C).
    #: Each rank tells it of its own tokens, and the function joins that (LongCat-Video-Avatar)
    joined: Mapping[str, Join] = field(default_factory=dict)

    @property
    def item_of_output(self) -> int | None:
        """Which item of a block's output has the tokens, where it is a tuple of these and of replicated ones."""
        if self.stream_item is None and self.replicated is not None and self.replicated.argument is not None:
            return int(self.replicated.returned_first)
        return self.stream_item

    def of(self, model: nn.Module) -> list[nn.Module]:
        found: Any = model.get_submodule(self.path)
        return list(found.values() if isinstance(found, nn.ModuleDict) else found)


@dataclass(frozen=True)
class SplitBehind:
    """A method of the model that gives a dictionary, behind which the sequence is split already: what it adds between blocks is in it too.

    Cosmos has one, ``forward_before_blocks``. Without this the first block splits the sequence.
    """

    method: str
    #: entry that holds the tokens, as the first list of blocks gets them
    stream: str
    #: other entries that have something for each token, and the rule that takes this rank's part of each
    shard: Mapping[str, ShardRule] = field(default_factory=dict)


@dataclass(frozen=True)
class HookPoint:
    """A module or method outside the blocks: which of its arguments are sharded, and whether or how its output is gathered."""

    path: str
    shard: Mapping[str, ShardRule] = field(default_factory=dict)
    #: True: the output is (B, t, C) and all ranks' are put together. A function: it puts them together (MiniMax H3)
    gather: bool | Gather = False


@dataclass(frozen=True)
class SequencePlan:
    """One architecture. Paths are dotted names below the diffusion model."""

    #: name of the class in ComfyUI
    architecture: str
    #: the model's name for people, the same in every language; tooltips, help pages and README are made from it
    title: str
    #: the first block that is called splits the sequence
    blocks: tuple[Blocks, ...]
    #: empty for Kandinsky 5, which gathers behind its last block
    hook_points: tuple[HookPoint, ...]
    #: what of the model works, in English, for README's table of models
    covers: str = ""
    split_behind: SplitBehind | None = None
    choose_layout: ChooseLayout = flat_layout
    #: the tile layout, for users who ask for it
    tiles: ChooseLayout | None = None
    #: every rank must hold equally much of every frame, so only tiles will do (HuMo)
    only_tiles: bool = False
    #: given the forward's arguments: gather behind the last block already, as the code that follows needs all tokens (Kandinsky 5)
    gather_early: Callable[[Mapping[str, Any]], bool] = _never
    #: lists of ``transformer_options["patches"]`` that the model calls between blocks with the stream as "img" (Wan)
    between: tuple[str, ...] = ()
    #: true when no block touches the stream in this forward, given its transformer options (LTX-2 without video)
    skips_stream: Callable[[Mapping[str, Any]], bool] = _never
    #: arguments of the forward that hold lists of (B, T, C) tensors by name, which the model adds to the stream between blocks:
    #: a ControlNet's output (HunyuanVideo); of less than T tokens they are those of the first ones (Flux with reference latents)
    residuals: tuple[str, ...] = ()
    #: given the forward's arguments, ``transformer_options`` among them: why tokens are not split in this forward, in words that follow
    #: "tokens are not split "; "" where they are. Then whole batch rows are shared out, as of a model without a plan (Lumina 2)
    rows_where: Callable[[Mapping[str, Any]], str] = _always_split
    #: what cannot be split is an error that says what to do. Without this it is computed as of a model without a plan, with a sentence
    #: in the report: a model that gets a plan then never fails where it did not before
    strict: bool = False
    #: arguments of the forward that hold objects, and the function that makes plain data of each, which can be sent (MiniMax H3)
    to_plain: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    #: method that computes on the workers
    forward: str = "_forward"
    #: other methods that do, which the model's own ``forward`` calls for some inputs (CausalWan's ``forward_block``)
    further_forwards: tuple[str, ...] = ()
    #: arguments of these that are lists of dictionaries, which the model fills during a sampling run and a sampler keeps (CausalWan's
    #: keys and values), and the method of the model that makes each. Tensors in them lie in the workers only (:mod:`.kept_cache`)
    caches: Mapping[str, str] = field(default_factory=dict)
    #: methods that ComfyUI calls outside the forward and that need weights (LTX-2's text connectors)
    weight_methods: tuple[str, ...] = ()
    #: method that lets go of what the model kept during a sampling run (LongCat-Video's cache of conditioning frames)
    after_run: str | None = None

    def __post_init__(self) -> None:
        if self.blocks and self.blocks[-1].gathers:
            raise ValueError(f"{self.architecture}: a list of blocks gathers for the next one, and behind the last there is none")

    @property
    def splits_tokens(self) -> bool:
        """False for a model without a plan (:mod:`.unplanned`), of which only whole batch rows can be shared out."""
        return bool(self.blocks)

    @property
    def keeps_state(self) -> bool:
        """The model keeps something between forwards, so every forward of a sampling run has to be split alike."""
        return self.after_run is not None or bool(self.caches)

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """All blocks, list after list."""
        return [block for blocks in self.blocks for block in blocks.of(model)]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(attention for blocks in self.blocks for attention in blocks.attentions)


class NoPlan(SPError):
    """There is no plan by that name.

    Args:
        found: class name of the model.
        known: titles of the models with a plan.
    """

    def __init__(self, found: str, known: list[str]) -> None:
        super().__init__(f"{found} has no sequence plan. Models that have one: {', '.join(known)}")
