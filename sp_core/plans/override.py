"""The attention that a marked call site gets: exchange, the user's own attention, exchange back.

It is installed as ComfyUI's ``optimized_attention_override`` for that one call, so it
sees whatever head count and mask the call has. An override that was there before (a
user's Sage or Flash patch) stays in charge of the local attention.

Shape legend: B batch, N replicated tokens, t this rank's tokens, T all tokens, H the call's heads,
h this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..attention.joint import joint_attention
from ..attention.masks import to_rank_order
from ..attention.partial import exchanged_cross_attention, partial_cross_attention
from ..attention.sequence_group import SequenceGroup
from ..attention.ulysses import Attend
from ..errors import SPError
from ..layout import shard_sizes
from .forward_state import ForwardState, OtherKeys
from .host_functions import HostFunctions
from .plan import AttentionKind
from .probed_heads import probed_heads, shared_heads

OVERRIDE = "optimized_attention_override"


@dataclass(frozen=True)
class HeldMask:
    """A mask that is no tensor, carried past the module to the override, with the attention that understands it."""

    mask: Any
    attention: Callable[..., Tensor]
    #: the mask counts tokens in raster order, so they have to be brought into it
    in_raster: bool = False
    #: the mask is a dictionary of tensors that have all heads on this dim
    heads_dim: int | None = None

    def of_heads(self, first: int, count: int) -> HeldMask:
        """The same for some of the heads."""
        dim = self.heads_dim
        return self if dim is None else replace(self, mask={name: x.narrow(dim, first, count) for name, x in self.mask.items()})


@dataclass(frozen=True)
class WholeOverride:
    """Another node's override that nobody knows to keep heads and tokens apart, see :mod:`.whole`."""

    users: Callable[..., Tensor]
    name: str
    #: where the call site does not exchange
    call: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(*args, **kwargs)


class ExchangedAttention:
    """``override(function, q, k, v, heads, ...)`` of one call site in one forward.

    Shapes are ComfyUI's: (B, t, H * D), or (B, H, t, D) with ``skip_reshape``.
    """

    def __init__(
        self,
        state: ForwardState,
        sequence: SequenceGroup,
        kind: AttentionKind,
        options: Mapping[str, Any],
        host: HostFunctions,
        where: str = "attention",
        withheld: HeldMask | None = None,
    ) -> None:
        self.where, self.withheld = where, withheld
        if withheld is not None:
            # what it keeps of a call it keeps of all the rank's heads
            sequence = sequence.in_groups(1)
        self.state, self.sequence, self.kind, self.host = state, sequence, kind, host
        # the call's options as they were: what runs inside must not exchange again
        self.options = dict(options)
        #: the override of another node, which computes the local attention
        self.users = self.options.get(OVERRIDE)
        #: its name where it has to get all heads
        self.whole_name: str | None = None
        #: of the tokens of this call, the first so many are replicated ones that attend jointly
        self.replicated = 0
        if isinstance(found := self.users, WholeOverride):
            self.users, self.whole_name = found.users, found.name
            self.options[OVERRIDE] = found.users
            if sequence.overlap is not None:
                # it is probed, and then watched, by the call: a call for each group of heads would be another thing
                self.sequence = sequence.in_groups(1)
                state.note_alone(f"{found.name}, whose calls are probed")

    def __call__(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any
    ) -> Tensor:
        self.state.attended += 1
        self.state.self_attended += self.kind != "replicated_queries"
        heads_first = kwargs.pop("skip_reshape", False)
        keep_heads_first = kwargs.pop("skip_output_reshape", False)
        if heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, t, D) -> (B, t, H, D)
        else:
            # SD3 hands over values that have their heads apart already
            q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
        if self.kind != "replicated_queries" and k.size(1) != q.size(1):
            raise OtherKeys(self.where, q.size(1), k.size(1))
        if kwargs.pop("enable_gqa", False) or k.size(2) != q.size(2):
            # grouped heads need not fall together with head shards
            k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))

        def local(*tensors: Any, options: dict[str, Any] | None = None, trusted: Callable[..., Any] = lambda x: x) -> Tensor:
            return self._local(trusted(function), {**kwargs, "transformer_options": self.options if options is None else options}, *tensors)

        self.replicated = self._replicated_in(q)
        mask = self._of_all_keys(mask, k.size(1)) if self.withheld is None else self.withheld
        out_BtHD = self._way(mask)(q, k, v, mask, kwargs.get("scale"), local)
        return out_BtHD.transpose(1, 2) if keep_heads_first else out_BtHD.flatten(2)

    def container_function(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Tensor:
        """ComfyUI since 0.33 may hand over tensors in single-owner containers; it then calls this name and names no function."""
        function = kwargs.pop("function", None) or self.host.optimized_attention
        return self(function, q.take(), k.take(), v.take(), *args, **kwargs)

    def _way(self, mask: Any) -> Callable[..., Tensor]:
        """How this call is computed."""
        if self.whole_name is None or self.sequence.ring is not None:
            return self.exchanged
        probing = self.state.probing
        if probing is None or isinstance(mask, HeldMask):
            return self._on_all_heads
        site = probing.site(self.where, self.whole_name)
        if site.apart:
            return partial(shared_heads, self, site)
        return partial(probed_heads, self, site) if site.unprobed else partial(self._on_all_heads, why=site.why_whole)

    def exchanged(self, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend) -> Tensor:
        if self.replicated:
            return self._joint(q_BtHD, k_BtHD, v_BtHD, mask, local)
        if self.kind == "replicated_queries":
            return self._replicated_queries(q_BtHD, k_BtHD, v_BtHD, mask, scale, local)
        held = mask if isinstance(mask, HeldMask) else None
        if self.sequence.ring is not None and (self.users is not None or held is not None):
            what = (
                "a guide mask, conditioning frames, earlier frames or block-sparse attention"
                if held is not None
                else "an attention function that another node installed"
            )
            raise SPError(f"Ring attention cannot use {what}. Leave ring at 0 (automatic) or 1 in SP Model Patch")
        counts = self.state.layout.counts
        if held is not None:
            return self.sequence.attention(q_BtHD, k_BtHD, v_BtHD, counts, self._with_held_mask(held, local))
        return self.sequence.attention(q_BtHD, k_BtHD, v_BtHD, counts, local, mask=self._in_rank_order(mask), scale=scale)

    def _on_all_heads(
        self, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend, why: str = ""
    ) -> Tensor:
        """All heads of all tokens on every rank, in the model's order, so that the mask fits as it came."""
        assert self.whole_name is not None
        self.state.note_whole(self.whole_name, why)
        return self.own_tokens(local(*self.all_heads(q_BtHD, k_BtHD, v_BtHD, mask)))

    def all_heads(self, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any) -> tuple[Any, ...]:
        """q, k, v and the mask, if there is one, of all tokens: (B, T, H, D) each. Collective."""
        state, layout = self.state, self.state.layout
        n = self.replicated

        def all_tokens(x_BtHD: Tensor) -> Tensor:
            replicated, own = state.parted(x_BtHD, 1, n)
            gathered = layout.restore(self.sequence.all_ranks.all_gather_tokens(own.contiguous(), layout.counts), 1)
            return state.together(replicated, gathered, 1)

        q = q_BtHD if self.kind == "replicated_queries" else all_tokens(q_BtHD)
        if isinstance(mask, HeldMask):
            mask = replace(mask, mask=state.original(mask.mask))  # a dictionary holds no sharded values
        return (q, all_tokens(k_BtHD), all_tokens(v_BtHD), *(() if mask is None else (mask,)))

    def own_tokens(self, out: Tensor) -> Tensor:
        """Of a result for all tokens, this rank's."""
        state, n = self.state, self.replicated
        if self.kind == "replicated_queries":
            return out
        replicated, all_tokens = state.parted(out, 1, n)
        return state.together(replicated, state.shard(all_tokens), 1)

    def _with_held_mask(self, held: HeldMask, local: Attend) -> Attend:
        """Local attention by a mask object, on tokens in the order that the object counts them in."""
        layout, row = self.state.layout, self.sequence.ulysses
        if held.heads_dim is not None:
            heads = next(iter(held.mask.values())).size(held.heads_dim)
            counts = shard_sizes(heads, row.world_size, self.sequence.head_weights)
            held = held.of_heads(sum(counts[: row.rank]), counts[row.rank])

        def attend(q_BThD: Tensor, k_BThD: Tensor, v_BThD: Tensor) -> Tensor:
            order = layout.order() if held.in_raster else None
            if order is None:
                return local(q_BThD, k_BThD, v_BThD, held)
            in_raster = [layout.restore(x, 1) for x in (q_BThD, k_BThD, v_BThD)]
            return local(*in_raster, held).index_select(1, order.to(q_BThD.device))

        return attend

    def _replicated_queries(self, q_BAHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend) -> Tensor:
        """A queries that every rank holds, over the keys of all ranks: (B, A, H, D) on every rank."""
        if self.sequence.overlap is not None:
            self.state.note_alone("attention of replicated queries, which are few")
        everyone, counts, mask = self.sequence.all_ranks, self.state.layout.counts, self._in_rank_order(mask)
        if self.users is None:
            return partial_cross_attention(q_BAHD, k_BtHD, v_BtHD, everyone, counts, mask=mask, scale=scale)

        def users(
            q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None, scale: float | None = None
        ) -> tuple[Tensor, Tensor]:
            return (local(q_BTHD, k_BTHD, v_BTHD, mask) if q_BTHD.size(2) else q_BTHD), q_BTHD

        # a user's attention returns no log-sum-exp, so the keys have to come to it
        return exchanged_cross_attention(q_BAHD, k_BtHD, v_BtHD, everyone, counts, attend=users, mask=mask)

    def _joint(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, local: Attend) -> Tensor:
        """q, k and v are replicated tokens and this rank's: (B, N + t, H, D) each, and the result too."""
        if self.sequence.ring is not None:
            raise SPError(
                "Ring attention cannot serve this model: its text takes part in the attention and would come out different on each rank "
                "of the ring. Leave ring at 0 (automatic) or 1 in SP Model Patch"
            )
        n, counts = self.replicated, self.state.layout.counts
        (q_text, q_own), (k_text, k_own), (v_text, v_own) = (self.state.parted(x, 1, n) for x in (q, k, v))
        replicated, own = (q_text, k_text, v_text), (q_own, k_own, v_own)
        if self.state.replicated_behind and isinstance(mask, Tensor):
            # below the replicated tokens stand first
            dims = [dim for dim in (-1, -2) if mask.size(dim) == n + self.state.layout.tokens]
            mask = mask.roll([n] * len(dims), dims)
        mask = self._in_rank_order(mask)
        out_BtHD, out_BNHD = joint_attention(
            own,
            replicated,
            self.sequence.all_ranks,
            counts,
            local,
            mask=mask,
            overlap=self.sequence.overlap,
            weights=self.sequence.head_weights,
        )
        return self.state.together(out_BNHD, out_BtHD, 1)

    def _local(
        self,
        function: Callable[..., Tensor],
        kwargs: dict[str, Any],
        q_BThD: Tensor,
        k_BThD: Tensor,
        v_BThD: Tensor,
        mask: Tensor | HeldMask | None = None,
    ) -> Tensor:
        """Attention of this rank's heads over all tokens, by whoever is in charge of attention: (B, T, h, D)."""
        heads = q_BThD.size(2)
        flat = [x.flatten(2) for x in (q_BThD, k_BThD, v_BThD)]
        if isinstance(mask, HeldMask):
            out = mask.attention(*flat, heads, mask.mask, kwargs.get("attn_precision"), kwargs["transformer_options"])
        else:
            call = {**kwargs, "mask": mask}
            out = function(*flat, heads, **call) if self.users is None else self.users(function, *flat, heads, **call)
        return out.unflatten(2, (heads, -1))  # (B, T, h D) -> (B, T, h, D)

    def _replicated_in(self, q_BtHD: Tensor) -> int:
        """How many of a call's tokens are replicated ones: none where a joint call site attends to the stream alone (SD3.5 medium)."""
        own = self.state.layout.counts[self.state.rank]
        if self.kind != "joint" or q_BtHD.size(1) == own:
            return 0
        # Mochi attends to a part of the text
        return q_BtHD.size(1) - own if self.state.replicated_behind else self.state.replicated_tokens

    def _of_all_keys(self, mask: Any, keys: int) -> Any:
        """The mask, of which one that a module made for the keys that it has, (..., 1, N + t), is (..., 1, N + T). Collective."""
        own = not isinstance(mask, Tensor) or mask.dim() < 3 or mask.size(-2) != 1 or mask.size(-1) != keys
        layout, n = self.state.layout, self.replicated
        if own or self.kind == "replicated_queries" or keys == n + layout.tokens:
            return mask
        replicated, mine = self.state.parted(mask, -1, n)
        gathered = self.sequence.all_ranks.all_gather_tokens(mine.movedim(-1, 0)[None].contiguous(), layout.counts)
        return self.state.together(replicated, layout.restore(gathered, 1)[0].movedim(0, -1), -1)

    def _in_rank_order(self, mask: Tensor | None) -> Tensor | None:
        """The mask as attention needs it: tiles bring the tokens in another order than the model's."""
        if mask is None:
            return None
        return to_rank_order(mask, self.state.layout, replicated=self.replicated, queries=self.kind != "replicated_queries")


def mark(
    options: Mapping[str, Any],
    state: ForwardState,
    sequence: SequenceGroup,
    kind: AttentionKind,
    host: HostFunctions,
    where: str,
    withheld: HeldMask | None = None,
) -> dict[str, Any]:
    """Transformer options for one attention call that shall exchange; ``where`` it is, in words."""
    return {**options, OVERRIDE: ExchangedAttention(state, sequence, kind, options, host, where, withheld)}
