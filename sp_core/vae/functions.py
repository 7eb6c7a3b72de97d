"""Functions of torch that mix rows, called by the host's code outside of modules that the engine has hooked.

What is known of them is computed on bands; what is not is refused, as its result would have seams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import SPError

#: (convolution of an input, its weight, stride, padding and dilation by their names) -> this rank's rows of the result
Convolve = Callable[[Callable[[Tensor], Tensor], Tensor, dict[str, Any]], Tensor]

_CONVOLUTIONS = (torch.conv2d, torch.conv3d)
_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
#: they mix rows in a way that is not known here
_REFUSED = {
    *(torch.conv_transpose2d, torch.conv_transpose3d, torch.cudnn_convolution),
    *(F.avg_pool2d, F.avg_pool3d, F.max_pool2d, F.max_pool3d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.instance_norm, F.unfold, F.fold, F.grid_sample, F.scaled_dot_product_attention, F.pixel_unshuffle),
}


class RowFunctions(TorchFunctionMode):
    """Inside, functions that mix rows do so over the whole frame.

    Args:
        is_free: the code that runs now may call anything: it has the whole frame, or the engine called it.
        group_norm: torch's, for this rank's rows.
        convolve: a convolution, for this rank's rows.
        apart: names of functions that keep rows apart as they are called here.
    """

    def __init__(
        self,
        is_free: Callable[[], bool],
        group_norm: Callable[..., Tensor],
        convolve: Convolve,
        apart: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._is_free, self._group_norm, self._convolve, self._apart = is_free, group_norm, convolve, apart

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_free() or getattr(func, "__name__", None) in self._apart:
            return func(*args, **kwargs)
        if func is F.group_norm:
            return self._group_norm(*args, **kwargs)
        if func in _CONVOLUTIONS:
            named = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
            x = named.pop("input")
            return self._convolve(lambda y: func(y, **named), x, named)
        smooth = func is F.interpolate and "nearest" not in _argument(args, kwargs, 3, "mode", "nearest")
        if smooth or func in _REFUSED:
            raise SPError(
                f"The VAE calls {getattr(func, '__name__', func)}, which mixes rows of the frame in a way that is not known here. "
                "Update this extension, or remove SP VAE Patch to run the VAE on one device"
            )
        return func(*args, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)
