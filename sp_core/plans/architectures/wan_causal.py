"""CausalWan: Wan that computes some frames after the others. Keys and values of the earlier ones lie with the ranks, by heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from ..forward_state import ForwardState
from ..host_functions import HostFunctions
from ..kept_cache import KeptCache
from ..plan import Attention, Blocks, MaskRule, flat_layout
from ..shard_rules import by_frame, by_token
from .wan import WAN


def _room(cache: KeptCache, state: ForwardState) -> KeptCache:
    cache.make_room(state.layout.tokens, "end")
    return cache


def _attend_to_earlier(module: nn.Module, host: HostFunctions) -> Callable[..., Tensor]:
    def attend(q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, heads: int, cache: KeptCache, precision: object, options: object) -> Tensor:
        k, v = (cache.extended(name, x.unflatten(2, (heads, -1))).flatten(2) for name, x in (("k", k_BTC), ("v", v_BTC)))
        return host.optimized_attention(q_BTC, k, v, heads, transformer_options=options)

    return attend


CAUSAL = replace(
    WAN,
    architecture="CausalWanModel",
    title="Causal Wan",
    covers="text and image to video, frame by frame; its cache of keys and values is shared out",
    blocks=(
        Blocks(
            "blocks",
            "x",
            (Attention("self_attn", mask=MaskRule("kv_cache", "kv_cache", _attend_to_earlier, withheld=True)),),
            {"e": by_frame(1), "freqs": by_token(1), "kv_cache": _room},
        ),
    ),
    choose_layout=flat_layout,
    tiles=None,
    further_forwards=("forward_block",),
    caches={"kv_caches": "init_kv_caches", "crossattn_caches": "init_crossattn_caches"},
)
