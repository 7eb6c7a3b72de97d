"""Whether all ranks compute a model in the same way: ComfyUI chooses dtypes and attention by the device."""

from __future__ import annotations

import weakref
from typing import Any

from ...comm.small_collectives import all_gather_bytes
from ...errors import SPError


class ComputesAlike:
    """Asks once for each model."""

    def __init__(self) -> None:
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self, patcher: Any) -> None:
        """Collective over all ranks in the first call with a model.

        Raises:
            SPError: on every rank, where two would compute in different ways.
        """
        if patcher in self._asked:
            return
        refuse_differences([text.decode() for text in all_gather_bytes(None, how_it_computes(patcher).encode())])
        self._asked.add(patcher)


def how_it_computes(patcher: Any) -> str:
    """The dtypes of a model and the attention of this process, in words."""
    import comfy.ldm.modules.attention as attention

    model = patcher.model
    weights = getattr(model.diffusion_model, "dtype", None)
    cast = getattr(model, "manual_cast_dtype", None)
    return f"weights in {weights}, computing in {cast or weights}, {attention.optimized_attention.__name__}"


def refuse_differences(by_rank: list[str]) -> None:
    """
    Raises:
        SPError: two ranks compute in different ways.
    """
    for rank, how in enumerate(by_rank):
        if how != by_rank[0]:
            raise SPError(
                f"SP Model Patch: rank 0 computes this model with {by_rank[0]}, rank {rank} with {how}, since ComfyUI chooses by the "
                "device. The picture would be neither's. Start ComfyUI with a flag that fits all of them, such as --fp16-unet or "
                "--use-pytorch-cross-attention, or take the device out of devices"
            )
