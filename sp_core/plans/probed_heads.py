"""An attention function of another pack that nobody knows to keep heads apart: probed at its first call, and then shared out by heads.

Shape legend: B batch, t this rank's tokens, T all tokens, H all heads, h this rank's heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..attention.sequence_group import SequenceGroup
from ..attention.ulysses import Attend
from ..layout import shard_range
from .forward_state import ForwardState
from .probing import Site


class Attention(Protocol):
    """What is used of :class:`.override.ExchangedAttention`."""

    state: ForwardState
    sequence: SequenceGroup
    options: dict[str, Any]
    users: Callable[..., Tensor] | None

    def exchanged(self, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend) -> Tensor: ...
    def all_heads(self, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any) -> tuple[Any, ...]: ...
    def own_tokens(self, out: Tensor) -> Tensor: ...


def shared_heads(
    attention: Attention, site: Site, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend
) -> Tensor:
    """By exchange, as the host's attention is: the function gets this rank's heads of all tokens."""
    attention.state.note_apart(site.name)

    def on_own_heads(q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> Tensor:
        return site.shared(  # type: ignore[no-any-return]
            attention.users, [attention.options], lambda: _of_shape(local(q, k, v, *masks), q, v), lambda: _filled(q, v)
        )

    site.probing.note_shared(site.name, as_probed=True)  # also on a rank that has no heads
    return attention.exchanged(q_BtHD, k_BtHD, v_BtHD, mask, scale, on_own_heads)


def probed_heads(
    attention: Attention, site: Site, q_BtHD: Tensor, k_BtHD: Tensor, v_BtHD: Tensor, mask: Any, scale: float | None, local: Attend
) -> Tensor:
    """The first call: on all heads, then with NaN for other ranks' heads, then by exchange on this rank's."""
    probe = site.probing.probe(site, attention.users, [attention.options])

    def called(*tensors: Any) -> Callable[[], Tensor]:
        return lambda: local(*tensors, options=probe.watched(attention.options), trusted=probe.trusted)

    q, k, v, *masks = attention.all_heads(q_BtHD, k_BtHD, v_BtHD, mask)
    whole_BTHD = probe.whole(called(q, k, v, *masks))
    start, stop = shard_range(q.size(2), attention.state.world_size, attention.state.rank, attention.sequence.head_weights)
    if probe.open and stop > start:
        poisoned = probe.again(called(*(_poisoned(x, start, stop) for x in (q, k, v)), *masks))
        probe.compare(poisoned if poisoned is None else poisoned[:, :, start:stop], whole_BTHD[:, :, start:stop], "it mixes heads")

    def on_own_heads(q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> Tensor:
        found = probe.again(lambda: _of_shape(called(q, k, v, *masks)(), q, v))
        return _filled(q, v) if found is None else found

    exchanged = attention.exchanged(q_BtHD, k_BtHD, v_BtHD, mask, scale, on_own_heads)
    out_BtHD = attention.own_tokens(whole_BTHD)
    probe.compare(exchanged, out_BtHD, "it treats some heads otherwise than all of them")
    attention.state.note_verdict(site.probing.conclude(site, probe))
    return out_BtHD


def _poisoned(x_BTHD: Tensor, start: int, stop: int) -> Tensor:
    """NaN in the place of all other heads."""
    poisoned = torch.full_like(x_BTHD, torch.nan)
    poisoned[:, :, start:stop] = x_BTHD[:, :, start:stop]
    return poisoned


def _of_shape(out: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """``out``, which goes into an exchange next: an error there would reach this rank only."""
    if out.shape != (*q.shape[:3], v.size(3)):
        raise ValueError(f"an attention gave {tuple(out.shape)} for {tuple(q.shape)}")
    return out


def _filled(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros((*q.shape[:3], v.size(3)))
