"""Trees of plain values and tensors as a JSON header plus raw bytes. Nothing is pickled.

A message is ``header (JSON, UTF-8) | zero padding to 64 | tensor bytes ...``. The header
holds the tree with every tensor replaced by an index, and a table that gives each
tensor's dtype, shape and place. Reading is defensive: a header that does not describe
exactly the bytes that came with it is refused with a :class:`WireError`.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import WireError

ALIGNMENT = 64
MAX_DEPTH = 32
MAX_HEADER_BYTES = 64 << 20
#: torch copies more than a little on several threads, which then spin for milliseconds on the cores that CPU workers need
SERIAL_BYTES = 4 << 20

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass
class Encoded:
    """A tree ready to be written: JSON-able ``tree`` and the tensors that it names by index."""

    tree: Any
    tensors: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def encode(value: Any) -> Encoded:
    """Replace tensors in a tree by indices.

    Raises:
        WireError: the tree holds something that is neither plain data nor a tensor; the
            message names its place.
    """
    out = Encoded(None)
    out.tree = _encode(value, "", out, 0)
    return out


def unsendable(value: Any) -> str | None:
    """The sentence that :func:`encode` would refuse a value with; None for a value that can be sent. Builds nothing."""
    return _problem(value, "", 0)


#: the first class that a value is an instance of gives its tag: a torch.Size is a tuple as well
_TAGS: tuple[tuple[type, str], ...] = (
    *((type(None), "plain"), (bool, "plain"), (str, "plain"), (int, "int"), (float, "float"), (Tensor, "tensor")),
    # ComfyUI hands block numbers over in sets
    *((torch.Size, "size"), (tuple, "tuple"), (list, "list"), (set, "set"), (frozenset, "frozenset"), (dict, "dict")),
    *((torch.dtype, "dtype"), (torch.device, "device"), (uuid.UUID, "uuid")),
)
_TAG_OF = dict(_TAGS)


def _refusal(tag: str | None, value: Any, path: str, depth: int) -> str | None:
    """Why this node of a tree cannot be sent, whatever is below it; None where it can."""
    if depth > MAX_DEPTH:
        return f"cannot send '{path}': nested deeper than {MAX_DEPTH}"
    if tag == "tensor" and value.dtype not in _NAMES:
        return f"cannot send '{path}': dtype {value.dtype} does not cross the wire"
    if tag is None or (tag == "dtype" and value not in _NAMES):
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        return f"cannot send '{path}' to the workers: {name} is neither plain data nor a tensor"
    return None


def _tagged(value: Any) -> tuple[str | None, Any]:
    """(tag, value) of one node; the tag is None where nothing fits. A scalar of numpy counts as the number that it holds."""
    tag = _TAG_OF.get(type(value)) or next((tag for kind, tag in _TAGS if isinstance(value, kind)), None)
    if tag is None and type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        number = value.item()
        return next((tag for kind, tag in _TAGS if isinstance(number, kind)), None), number
    return tag, value


def _items(tag: str | None, value: Any, path: str) -> list[tuple[str, Any]]:
    """(path, value) of what a node holds."""
    if tag not in ("tuple", "list", "set", "frozenset", "dict"):
        return []
    pairs: Iterable[tuple[Any, Any]] = value.items() if tag == "dict" else enumerate(value)
    return [(f"{path}.{key}" if path else str(key), item) for key, item in pairs]


def _problem(value: Any, path: str, depth: int) -> str | None:
    tag, value = _tagged(value)
    if (refusal := _refusal(tag, value, path, depth)) is not None:
        return refusal
    below = [(path, key) for key in value] if tag == "dict" else []
    for place, item in (*below, *_items(tag, value, path)):
        if (problem := _problem(item, place, depth + 1)) is not None:
            return problem
    return None


def _encode(value: Any, path: str, out: Encoded, depth: int) -> Any:
    tag, value = _tagged(value)
    if (refusal := _refusal(tag, value, path, depth)) is not None:
        raise WireError(refusal)
    if tag == "plain":
        return value
    if tag in ("int", "float"):
        # a subclass (an enum, a number of numpy) travels as the plain number
        return int(value) if tag == "int" else float(value)
    if tag == "tensor":
        out.tensors.append(value)
        out.paths.append(path)
        return {"tensor": len(out.tensors) - 1}
    if tag == "size":
        return {tag: list(value)}
    if tag in ("dtype", "device", "uuid"):
        return {tag: _NAMES[value] if tag == "dtype" else value.hex if tag == "uuid" else None}
    if tag == "dict":
        keys = [_encode(key, path, out, depth + 1) for key in value]
        return {"dict": [keys, [_encode(item, place, out, depth + 1) for place, item in _items(tag, value, path)]]}
    return {tag: [_encode(item, place, out, depth + 1) for place, item in _items(tag, value, path)]}


def decode(tree: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """The tree that :func:`encode` was given. ``torch.device`` values become ``device``.

    Raises:
        WireError: the tree is not one that :func:`encode` makes.
    """
    return _decode(tree, tensors, device, 0)


def _decode(node: Any, tensors: list[Tensor], device: torch.device, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise WireError("malformed message: nested too deeply")
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise WireError("malformed message: a node is neither a plain value nor tagged")
    ((tag, body),) = node.items()

    def nested(items: Any) -> list[Any]:
        if not isinstance(items, list):
            raise WireError(f"malformed message: '{tag}' holds no list")
        return [_decode(item, tensors, device, depth + 1) for item in items]

    if tag == "tensor":
        if type(body) is not int or not 0 <= body < len(tensors):
            raise WireError(f"malformed message: tensor {body!r} of {len(tensors)}")
        return tensors[body]
    if tag == "list":
        return nested(body)
    if tag == "tuple":
        return tuple(nested(body))
    if tag in ("set", "frozenset"):
        items = nested(body)
        try:
            return set(items) if tag == "set" else frozenset(items)
        except TypeError as error:
            raise WireError(f"malformed message: '{tag}' has a member that cannot be one") from error
    if tag == "size":
        return torch.Size(_sizes(body))
    if tag == "dict":
        if not isinstance(body, list) or len(body) != 2:
            raise WireError("malformed message: 'dict' holds no keys and values")
        keys, values = nested(body[0]), nested(body[1])
        if len(keys) != len(values):
            raise WireError("malformed message: 'dict' has another number of keys than values")
        try:
            return dict(zip(keys, values, strict=True))
        except TypeError as error:
            raise WireError("malformed message: 'dict' has a key that cannot be one") from error
    if tag == "dtype" and isinstance(body, str) and body in _DTYPES:
        return _DTYPES[body]
    if tag == "device":
        return device
    if tag == "uuid":
        try:
            return uuid.UUID(hex=body)
        except (ValueError, AttributeError, TypeError) as error:
            raise WireError("malformed message: a bad uuid") from error
    raise WireError(f"malformed message: unknown tag {str(tag)[:40]!r}")


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(size) is not int or not 0 <= size < 2**48 for size in value):
        raise WireError("malformed message: a shape that is not a list of sizes")
    return value


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor as an array of numpy that shares its memory, for what one thread is to do; None where there is none.

    There is one for contiguous tensors in main memory of at most :data:`SERIAL_BYTES`.
    """
    if tensor.device.type != "cpu" or nbytes(tensor) > SERIAL_BYTES or not tensor.is_contiguous():
        return None
    if tensor.is_neg() or tensor.is_conj():  # the memory holds other values
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack(tree: Any, entries: list[dict[str, Any]], tensors: list[Tensor]) -> tuple[bytes, list[int], int]:
    """Lay a message out: its header, the offset of each tensor, and its whole size in bytes.

    ``entries[i]`` may carry extra keys (``store``: keep under this id) or be a bare
    reference ``{"cached": id}``; ``tensors`` are those of the entries that are not bare.
    """
    table, sizes, tail = [], [], 0
    source = iter(tensors)
    for entry in entries:
        if "cached" in entry:
            table.append(entry)
            continue
        tensor = next(source)
        table.append({**entry, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "at": tail, "bytes": nbytes(tensor)})
        sizes.append(nbytes(tensor))
        tail = align(tail + sizes[-1])
    header = json.dumps({"tree": tree, "tensors": table}, separators=(",", ":")).encode()
    start = align(len(header))
    offsets, at = [], start
    for size in sizes:
        offsets.append(at)
        at = align(at + size)
    return header, offsets, at


def unpack(buffer: Tensor, header_bytes: int, device: torch.device, store: dict[int, Tensor] | None = None, views: bool = False) -> Any:
    """Read a message from ``buffer`` (uint8, CPU). Tensors land on ``device``, none of them a view of the buffer.

    Args:
        store: keeps the tensors that the sender named; later messages refer to them.
        views: on the CPU tensors are views of the buffer after all, for a reader who is done before the next message.

    Raises:
        WireError: the message is malformed.
    """
    if not 0 < header_bytes <= min(buffer.numel(), MAX_HEADER_BYTES):
        raise WireError(f"malformed message: a header of {header_bytes} bytes in {buffer.numel()}")
    try:
        header = json.loads(bytes(buffer[:header_bytes].numpy()))
        tree, table = header["tree"], header["tensors"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("malformed message: the header is not the JSON it should be") from error
    if not isinstance(table, list):
        raise WireError("malformed message: no table of tensors")
    start = align(header_bytes)
    tensors = [_read(entry, buffer, start, device, store, views) for entry in table]
    return decode(tree, tensors, device)


def _read(entry: Any, buffer: Tensor, start: int, device: torch.device, store: dict[int, Tensor] | None, views: bool) -> Tensor:
    if not isinstance(entry, dict):
        raise WireError("malformed message: a tensor entry that is not an object")
    if "cached" in entry:
        if store is None or entry["cached"] not in store:
            raise WireError(f"malformed message: tensor id {str(entry['cached'])[:20]} was never sent")
        return store[entry["cached"]]
    name = entry.get("dtype")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    shape, at, size = _sizes(entry.get("shape")), entry.get("at"), entry.get("bytes")
    if dtype is None or type(at) is not int or type(size) is not int or at < 0 or at % ALIGNMENT:
        raise WireError("malformed message: a tensor entry with a bad dtype or place")
    if size != math.prod(shape) * dtype.itemsize or start + at + size > buffer.numel():
        raise WireError("malformed message: a tensor entry that does not fit its bytes")
    raw = buffer[start + at : start + at + size]
    tensor = raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    keep = entry.get("store")
    # every rank reads the same buffer, and the next message overwrites it
    if not views or device.type != "cpu":
        tensor = tensor.clone() if device.type == "cpu" else tensor.to(device)
    if keep is not None and store is not None:
        store[keep] = tensor
    return tensor


def write(buffer: Tensor, header: bytes, offsets: list[int], tensors: list[Tensor]) -> None:
    """Copy a packed message into ``buffer`` (uint8, CPU, large enough)."""
    place = buffer.numpy()
    place[: len(header)] = memoryview(header)
    for offset, tensor in zip(offsets, tensors, strict=True):
        size = nbytes(tensor)
        if not size:
            continue
        if (raw := bytes_of(tensor)) is not None:
            place[offset : offset + size] = raw
        else:
            buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
