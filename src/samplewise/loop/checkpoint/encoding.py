"""Encoding of a nested state as JSON values and named tensors, strict decoding, and schemas of decoded states.

Lists, text, None, bools and ordinary numbers are plain JSON; everything else is {"type": content}. A tensor is
{"tensor": [name, dtype, shape]}. Its name is its path in the state, such as "model.0.weight". A tensor whose memory is
not in row-major order, such as one in channels_last, has a fourth entry: its dimensions in the order of their strides.
Fused optimizers are wrong if their state is in another order than the parameter.

Decoding is strict: it accepts what `Encoder` writes and raises `Malformed` for everything else. A schema states the
keys and kinds of values that a decoded state must have.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.files import RESERVED_NAME
from samplewise.parallel.sharded_parameters import is_dtensor

MAX_DEPTH = 100  # levels; the JSON parser fails at about 300, and a state that contains itself is infinite
DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
TENSOR_TYPES = (Tensor, nn.Parameter, nn.Buffer)
# Other dtypes are rejected, in a state and in a file.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
RESERVED_NAMES = (RESERVED_NAME, f"model.{RESERVED_NAME}")  # the second is written without "model."

KeyPath = tuple[Any, ...]  # keys and indices that lead to a value


class Malformed(ValueError):
    """Content that `Encoder` cannot have produced. The message names what was found."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of a tensor; its placeholder in a decoded state. `order`: its dimensions from the largest
    stride to the smallest; None for row-major order.
    """

    name: str
    dtype: torch.dtype
    shape: list[int]
    order: list[int] | None = None

    def in_order(self, tensor: Tensor) -> Tensor:
        """The tensor, with its memory in this order."""
        if self.order is None:
            return tensor
        empty = torch.empty_permuted(tensor.shape, self.order, dtype=tensor.dtype, device=tensor.device)
        return empty.copy_(tensor)


# --- encoding --------------------------------------------------------------------------------------------------------


class Encoder:
    """Converter of nested values to JSON values. `tensors` and `paths` collect their tensors and paths by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.paths: dict[str, KeyPath] = {}

    def encode(self, value: Any, path: KeyPath = ()) -> Any:
        """Return `value`, which is at `path` in the state, as JSON values."""
        if len(path) > MAX_DEPTH:
            raise TypeError(f"state must be at most {MAX_DEPTH} levels deep; found more at {_dotted(path[:5])}...")
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, TENSOR_TYPES):
            return {"tensor": self._encode_tensor(value, path)}
        cls = type(value)
        if value is None or cls in (bool, str):
            return value
        if cls is int:
            return value if abs(value) < 2**63 else {"int": hex(value)}  # Python refuses to print very long decimals
        if cls is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if cls in DICT_TYPES.values():
            for key in value:
                if type(key) not in (str, int):
                    raise TypeError(f"keys of {_dotted(path)} must be text or int; found {key!r}, {type_name(key)}.")
            return {cls.__name__: [[self.encode(k, path), self.encode(v, (*path, k))] for k, v in value.items()]}
        if cls in (list, tuple):
            items = [self.encode(item, (*path, k)) for k, item in enumerate(value)]
            return items if cls is list else {"tuple": items}
        raise TypeError(
            f"{_dotted(path)} must be a tensor, number, text, bytes, None, or a dict, list or tuple of these; "
            f"found {type_name(value)}. Convert it, or leave it out of the state."
        )

    def _encode_tensor(self, value: Tensor, path: KeyPath) -> list[Any]:
        plain = type(value) in TENSOR_TYPES or is_dtensor(value)
        if not plain or value.layout != torch.strided or value.is_meta or value.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{_dotted(path)} must be a plain, dense tensor with data; found {type_name(value)} of layout "
                f"{value.layout} and dtype {value.dtype} on {value.device}. Convert it, or leave it out of the state."
            )
        name = _dotted(path).encode(errors="backslashreplace").decode()  # safetensors rejects lone surrogates
        while name in self.tensors or name in RESERVED_NAMES:  # as for {"a.b": x, "a": {"b": y}}
            name += "'"
        self.tensors[name] = value
        self.paths[name] = path
        order = _memory_order(value)
        return [name, DTYPE_NAMES[value.dtype], list(value.shape), *([] if order is None else [order])]


def _memory_order(tensor: Tensor) -> list[int] | None:
    """Dimensions from the largest stride to the smallest; None for row-major order, and if elements are not dense."""
    if is_dtensor(tensor) or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = torch.empty_permuted(tensor.shape, order, device="meta").stride() == strides
    return order if dense else None


def to_json(value: Any) -> str:
    """Return JSON values as text, without NaN and infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path) or "state"


def type_name(value: object) -> str:
    """Return the name of a value's type, with its module if it is not built in."""
    cls = type(value)
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


# --- decoding --------------------------------------------------------------------------------------------------------


def from_json(text: str | bytes) -> Any:
    """Parse JSON; raise `Malformed` for invalid JSON, NaN, infinity and duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise Malformed("JSON with a duplicate key")
        return content

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant, parse_float=_finite)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("JSON that is nested too deeply") from None
    except ValueError as why:
        raise Malformed(f"invalid JSON ({why})") from None


def decode(value: Any) -> tuple[dict[Any, Any], dict[str, TensorInfo]]:
    """Return the state with a `TensorInfo` in place of each tensor, and these by name."""
    infos: dict[str, TensorInfo] = {}
    state = _decode(value, infos, 0)
    if not isinstance(state, dict):
        raise Malformed(f"a state of type {type_name(state)}")
    return state, infos


def replace_infos(state: Any, tensor: Callable[[TensorInfo], Tensor]) -> Any:
    """Return a decoded state with the tensors that `tensor` returns in place of their placeholders."""
    if isinstance(state, TensorInfo):
        return state.in_order(tensor(state))
    if isinstance(state, dict):
        return type(state)({key: replace_infos(item, tensor) for key, item in state.items()})
    if isinstance(state, list | tuple):
        return type(state)(replace_infos(item, tensor) for item in state)
    return state


def _no_constant(text: str) -> Any:
    raise Malformed(f"the number {text} in JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text[:20])


def _decode(value: Any, infos: dict[str, TensorInfo], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Malformed(f"a state of more than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode(item, infos, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise Malformed(f"an object with {len(value)} keys in place of one")
    [(cls, content)] = value.items()
    if cls in DICT_TYPES:
        return DICT_TYPES[cls](_decode_items(content, infos, depth))
    if cls == "tuple":
        return tuple(_decode(item, infos, depth + 1) for item in _instance(list, content))
    if cls == "tensor":
        return _decode_tensor(content, infos)
    if cls in ("bytes", "float", "int"):
        return _decode_text(cls, _instance(str, content))
    raise Malformed(f"a value of unknown type {cls[:40]!r}")


def _decode_items(content: Any, infos: dict[str, TensorInfo], depth: int) -> dict[Any, Any]:
    items: dict[Any, Any] = {}
    for item in _instance(list, content):
        if type(item) is not list or len(item) != 2:
            raise Malformed("an entry of a dict that is not a pair")
        key = _decode(item[0], infos, depth)
        if type(key) not in (str, int):
            raise Malformed(f"a key of type {type_name(key)}")
        if key in items:
            raise Malformed(f"the duplicate key {key!r}")
        items[key] = _decode(item[1], infos, depth + 1)
    return items


def _decode_tensor(content: Any, infos: dict[str, TensorInfo]) -> TensorInfo:
    if type(content) is not list or len(content) not in (3, 4):
        raise Malformed("a tensor without name, dtype and shape")
    name = _instance(str, content[0])
    dtype = _instance(str, content[1])
    shape = check_sizes(content[2])
    if dtype not in DTYPES:
        raise Malformed(f"a tensor of dtype {dtype[:40]!r}")
    if name in infos:
        raise Malformed(f"tensor {name!r} that is used twice")
    order = check_sizes(content[3]) if len(content) == 4 else None
    if order is not None and sorted(order) != list(range(len(shape))):
        raise Malformed(f"the order {str(order)[:40]} of {len(shape)} dimensions")
    infos[name] = TensorInfo(name, DTYPES[dtype], shape, order)
    return infos[name]


def check_sizes(value: Any) -> list[int]:
    """Check that a value is a list of non-negative ints, a shape or an offset in each dimension, and return it."""
    if type(value) is not list or not all(type(size) is int and size >= 0 for size in value):
        raise Malformed(f"a shape or offset {str(value)[:40]}")
    return value


def _decode_text(cls: str, text: str) -> Any:
    try:
        if cls == "bytes":
            return base64.b64decode(text, validate=True)
        if cls == "int":
            return int(text, 16)
    except ValueError:
        raise Malformed(f"{cls} that cannot be decoded") from None
    if text not in ("nan", "inf", "-inf"):
        raise Malformed(f"the float {text[:40]!r}")
    return float(text)


def _instance(cls: type, value: Any) -> Any:
    """Return the value if it has the type `cls`; otherwise raise Malformed."""
    if type(value) is not cls:
        raise Malformed(f"{type_name(value)} in place of {cls.__name__}")
    return value


# --- schemas ---------------------------------------------------------------------------------------------------------

# A schema is a `Kind`, a list of one schema (a list of such values), or a dict of schemas by key. A dict may have
# further keys.


class Kind(NamedTuple):
    """Named predicate of a value."""

    name: str
    holds: Callable[[Any], bool]


Schema = Kind | list[Any] | dict[str, Any]

COUNT = Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
WHOLE = Kind("a whole number", lambda value: type(value) is int)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
POSITIVE = Kind("a finite number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf)
TEXT = Kind("a text", lambda value: type(value) is str)
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
DICT = Kind("a dict", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: type(value) is list)


def maybe(kind: Kind) -> Kind:
    """Return a kind that also accepts None."""
    return Kind(f"{kind.name}, or None", lambda value: value is None or kind.holds(value))


def check(value: Any, schema: Schema, place: str = "") -> None:
    """Raise `Malformed` with the path of the first value that is missing or of another kind."""
    if isinstance(schema, Kind):
        if not schema.holds(value):
            raise Malformed(f"{_shown(value)} as {place} in place of {schema.name}")
    elif isinstance(schema, list):
        check(value, LIST, place)
        for k, item in enumerate(value):
            check(item, schema[0], f"{place}.{k}")
    else:
        check(value, DICT, place)
        for key, inner in schema.items():
            where = f"{place}.{key}" if place else key
            if key not in value:
                raise Malformed(f"no {where}")
            check(value[key], inner, where)


def _shown(value: Any) -> str:
    if type(value) in (bool, int, float, str, type(None)):
        return repr(value)[:40]
    return type_name(value)
