"""WanDancer: Wan with music, of which each token gets the row that its place in the video stands for."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...errors import SPError
from ..forward_state import ForwardState
from ..plan import HookPoint, flat_layout
from ..shard_rules import by_frame, first_tokens, frame_rows
from .wan import WAN


def _music(music: Tensor, state: ForwardState) -> Tensor:
    """WanDancer's music, some rows a frame that stand for equally many tokens each: a row for each of this rank's tokens.

    Raises:
        SPError: the tokens cannot be shared out over the rows; ComfyUI fails then as well.
    """
    tokens, rows = state.layout.tokens, music.size(1)
    if tokens % rows:
        raise SPError(f"The {tokens} tokens of the video cannot be shared out over {rows} rows of music; choose another size of the frame")
    own = state.shard(frame_rows(tokens, rows), 0)
    return music.index_select(1, own.to(music.device))


DANCER = replace(
    WAN,
    architecture="WanDancerModel",
    title="WanDancer",
    strict=False,
    covers="music, first frame, reference picture",
    # each token gets a row of the music; videos of another frame rate have a head of their own
    hook_points=(
        HookPoint("music_injector", {"audio_emb": _music, "seq_len": first_tokens}),
        HookPoint("head", {"e": by_frame(1)}, gather=True),
        HookPoint("head_global", {"e": by_frame(1)}, gather=True),
    ),
    choose_layout=flat_layout,
    tiles=None,
    rows_where=lambda inputs: "with a reference latent" if inputs.get("reference_latent") is not None else "",
)
