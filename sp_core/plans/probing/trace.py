"""What a function does with tensors while it runs: which operations, and whether it does anything that cannot be seen through.

The operations that are let through have one thing in common: a result that was worked out of a NaN is a NaN. So a call with
NaN in the place of what it must not depend on shows whether it does, whatever the numbers are: a weight of zero hides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VIEWS = (
    "view _unsafe_view reshape _reshape_alias view_as transpose t permute movedim moveaxis swapaxes swapdims numpy_T matrix_H mT adjoint "
    "expand expand_as unsqueeze squeeze slice select narrow split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unbind "
    "unflatten flatten alias detach as_strided lift_fresh lift ravel"
)
_MOVES = (
    "contiguous clone to _to_copy type_as copy cat concat concatenate stack hstack vstack index_select repeat repeat_interleave tile roll "
    "flip pad constant_pad_nd"
)
_POINTWISE = (
    "add sub subtract rsub mul multiply div divide true_divide neg exp exp2 expm1 log log1p sqrt rsqrt sin cos tanh sigmoid silu gelu relu "
    "erf abs reciprocal square addcmul addcdiv lerp softplus mish leaky_relu elu clamp maximum minimum glu"
)
_SUMS = (
    "sum mean var var_mean std amax amin logsumexp softmax _softmax _safe_softmax log_softmax _log_softmax norm linalg_vector_norm cumsum "
    "prod native_layer_norm layer_norm rms_norm _fused_rms_norm group_norm native_group_norm"
)
_PRODUCTS = (
    "mm bmm matmul linear addmm baddbmm einsum dot mv outer _addmm_activation conv1d conv2d conv3d convolution "
    "scaled_dot_product_attention "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math _fused_sdp_choice"
)
_MADE = "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full arange linspace scalar_tensor eye tril triu fill zero"
_ASKED = "is_floating_point is_complex is_same_size"
_BLANK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
#: names of aten operations that are seen through; those that work in place have an underscore more
SEEN_THROUGH = {*" ".join((_VIEWS, _MOVES, _POINTWISE, _SUMS, _PRODUCTS, _MADE, _ASKED)).split(), *_BLANK}
#: of these one form only
_FORMS = {"pow": "Tensor_Scalar"}
#: these do not read their first argument where their "beta" is 0
_SCALED = {"addmm", "baddbmm"}
#: what writes a whole tensor without reading it
_FILLS = {"copy", "fill", "zero"}
#: methods of a tensor that read its values past torch's operations
_ESCAPES = {
    *("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "typed_storage", "apply_", "map_"),
    *("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
}


class Trace:
    """What one call did."""

    def __init__(self) -> None:
        #: why the call cannot be seen through; None as long as it can
        self.reason: str | None = None
        self._made: set[int] = set()
        #: storages whose memory no operation has written yet: how many elements are missing
        self._blank: dict[int, int] = {}
        self._paused = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with _Escapes(self), _Operations(self):
            yield

    def trusted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of the host, which need not be seen through."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self._paused = before

        call.__name__ = getattr(function, "__name__", "call")
        return call

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def check_output(self, output: Any) -> None:
        """What comes out was written by operations that were seen."""
        if any(self._blank.get(_storage(x), 0) > 0 for x in tree_leaves(output) if isinstance(x, Tensor)):
            self.refuse("it computes with functions that are not torch's")

    # -- called by the modes -------------------------------------------------------------

    def escape(self, name: str) -> None:
        if not self._paused:
            self.refuse(f"it reads values of a tensor ({name.strip('_')})")

    def operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        schema = function._schema
        name, form = schema.name.removeprefix("aten::"), schema.overload_name
        base = name[:-1] if name.endswith("_") else name
        written = _written(schema, args, kwargs)
        before = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if not self._paused:
            self._judge(base, form, args, kwargs, written, results, view=all(_storage(x) in before for x in results) and not written)
        for tensor in results:
            if _storage(tensor) not in before:
                self._made.add(_storage(tensor))
                self._blank.pop(_storage(tensor), None)
                if base in _BLANK and not self._paused:
                    self._blank[_storage(tensor)] = tensor.numel()

    def _judge(self, base: str, form: str, args: Any, kwargs: Any, written: list[Tensor], results: list[Tensor], view: bool) -> None:
        if base not in SEEN_THROUGH and _FORMS.get(base) != form:
            self.refuse(f"it uses {base}")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        unread = args[0] if base in _SCALED and kwargs.get("beta", 1) == 0 else None
        for tensor in tensors:
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                self.refuse(f"it computes on a {type(tensor).__name__}")
            fills = tensor is unread or (base in _FILLS and any(tensor is x for x in written))
            if not view and not fills and self._blank.get(_storage(tensor), 0) > 0:
                self.refuse("it computes with functions that are not torch's")
        for tensor in written:
            if _storage(tensor) not in self._made:
                self.refuse("it writes into what it was given")
            if _storage(tensor) in self._blank:
                self._blank[_storage(tensor)] -= tensor.numel()
        # attention kernels also give numbers that their backward pass would need
        whole = [x for x in (*results, *written) if not x.is_floating_point() and not base.startswith("_scaled_dot")]
        if whole and any(map(torch.is_floating_point, tensors)):
            self.refuse("it makes whole numbers of what it was given")


class _Operations(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._trace.operation(func, args, kwargs or {}, output)
        return output


class _Escapes(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in _ESCAPES:
            self._trace.escape(name)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _written(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]
