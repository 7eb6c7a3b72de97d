"""ComfyUI's own weights of a model that the workers compute: the pages of the file, or of the copy, that the workers share.

The loader's MODEL stays complete, as another node may sample it without SP Model Patch. Only where its weights lie changes,
and only where they are the same byte for byte.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...mapped_file import FileRange, Mappings, give_back_freed, let_pages_go

log = logging.getLogger(__name__)


def share_memory(model: nn.Module, places: Sequence[Sequence[Any]]) -> int:
    """Give back the memory of weights that the workers have in a file. Returns its bytes.

    Args:
        places: [name, path, inode, offset, bytes] of weights in the workers.
    """
    weights, mappings = dict(model.named_parameters()), Mappings()
    freed, moved = 0, list[Tensor]()
    with torch.inference_mode():
        for name, *place in places:
            weight = weights.get(name)
            if weight is not None and _has_a_copy(weight, mappings) and (nbytes := _moved(weight, FileRange(*place))):
                freed += nbytes
                moved.append(weight)
    if freed:
        # they were read to be compared, and only the workers compute with them
        let_pages_go(moved)
        give_back_freed()
        log.info("%.4g MB of weights are in main memory once, for ComfyUI and its workers", freed / 1e6)
    return freed


def _has_a_copy(weight: Tensor, mappings: Mappings) -> bool:
    """These bytes are in memory of this process's own."""
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and not mappings.maps(weight)


def _moved(weight: Tensor, place: FileRange) -> int:
    """Bytes that were given back: 0 where the file has others, or is gone."""
    if weight.numel() * weight.element_size() != place.nbytes or place.offset % weight.element_size():
        return 0
    try:
        mapped = place.mapped()
    except OSError:
        return 0
    if not torch.equal(mapped, weight.detach().reshape(-1).view(torch.uint8)):
        return 0  # patched, say
    weight.data = mapped.view(weight.dtype).view(weight.shape)
    return place.nbytes
