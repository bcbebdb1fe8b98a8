"""Encoding of a nested state as JSON text and a list of tensors, and strict decoding.

Lists, text, None, bools and ordinary numbers are plain JSON; everything else is {"kind": content}. A tensor is
{"tensor": [name, dtype, shape]}; tensors are named "0", "1", ... in the order of the state.

Decoding is strict: it accepts what `encode` writes and raises `Malformed` for everything else.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.distributed.sharded_parameters import is_dtensor

DEEPEST = 100  # levels; the JSON parser fails at about 300, and a state that contains itself is infinite
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
TENSORS = (Tensor, nn.Parameter, nn.Buffer)
# Other dtypes are rejected, in a state and in a file.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
STRICT: dict[str, Any] = dict(allow_nan=False, separators=(",", ":"))

Take = Callable[[str, torch.dtype, list[int]], Any]
Unpack = Callable[[Tensor, torch.dtype, list[int]], Tensor]


class Malformed(ValueError):
    """Text or tensors that `encode` cannot have produced. The message names what was found."""


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(state: dict[Any, Any]) -> tuple[str, list[Tensor]]:
    """Return the state as JSON text, and its tensors in the order of their names "0", "1", ...."""
    tensors: list[Tensor] = []
    return json.dumps(_encode(state, (), tensors), **STRICT), tensors


def _encode(value: Any, place: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """Return `value` as JSON values, and append its tensors to `tensors`."""
    if len(place) > DEEPEST:
        raise TypeError(f"state must be at most {DEEPEST} levels deep; found more at {_dotted(place[:5])}...")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, TENSORS):
        return {"tensor": _encode_tensor(value, place, tensors)}
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**63 else {"int": hex(value)}  # Python refuses to print very long decimals
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in DICTS.values():
        return {kind.__name__: _encode_items(value, place, tensors)}
    if kind in (list, tuple):
        items = [_encode(item, (*place, k), tensors) for k, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    raise TypeError(
        f"{_dotted(place)} must be a tensor, number, text, bytes, None, or a dict, list or tuple of these; "
        f"found {kind_of(value)}. Convert it, or leave it out of the state."
    )


def _encode_items(value: dict[Any, Any], place: tuple[Any, ...], tensors: list[Tensor]) -> list[Any]:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"keys of {_dotted(place)} must be text or int; found {key!r}, {kind_of(key)}.")
    return [[_encode(key, place, tensors), _encode(item, (*place, key), tensors)] for key, item in value.items()]


def _encode_tensor(value: Tensor, place: tuple[Any, ...], tensors: list[Tensor]) -> list[Any]:
    plain = type(value) in TENSORS or is_dtensor(value)
    if not plain or value.layout != torch.strided or value.is_meta or value.dtype not in NAMES:
        raise TypeError(
            f"{_dotted(place)} must be a plain, dense tensor with data; found {kind_of(value)} of layout "
            f"{value.layout} and dtype {value.dtype} on {value.device}. Convert it, or leave it out of the state."
        )
    tensors.append(value)
    return [str(len(tensors) - 1), NAMES[value.dtype], list(value.shape)]


def _dotted(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place)) or "state"


def kind_of(value: object) -> str:
    """Return the qualified name of the value's type for error messages."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


# --- decoding --------------------------------------------------------------------------------------------------------


def decode(text: str, tensors: Mapping[str, Tensor], unpack: Unpack | None = None) -> dict[Any, Any]:
    """Return the state. It must refer to each of the tensors exactly once, with its dtype and shape.

    unpack: function (stored tensor, dtype, shape) that returns the tensor of the state.
    """
    left = dict(tensors)

    def take(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        if name not in left:
            raise Malformed(f"tensor {name!r} that is used twice, or is not stored")
        tensor = left.pop(name) if unpack is None else unpack(left.pop(name), dtype, shape)
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            found = f"{tensor.dtype} and shape {list(tensor.shape)}"
            raise Malformed(f"tensor {name!r} of dtype {found} in place of {dtype} and {shape}")
        return tensor

    state = _state(text, take)
    if left:
        raise Malformed(f"{len(left):,} tensors that the state does not use")
    return state


def tensors_in(text: str) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of the tensors of an encoded state, by name."""
    found: dict[str, tuple[torch.dtype, list[int]]] = {}

    def note(name: str, dtype: torch.dtype, shape: list[int]) -> None:
        if name in found:
            raise Malformed(f"tensor {name!r} that is used twice")
        found[name] = dtype, shape

    _state(text, note)
    return found


def parsed(text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Parse JSON without NaN and infinity.

    hook: converts the (key, value) pairs of an object.
    """
    try:
        return json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant, parse_float=_finite)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("JSON that is nested too deeply") from None
    except ValueError as why:
        raise Malformed(f"invalid JSON ({why})") from None


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook for `parsed`: return a dict; raise Malformed if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Malformed("JSON with a duplicate key")
    return found


def _no_constant(text: str) -> Any:
    raise Malformed(f"the number {text} in JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text[:20])


def _state(text: str, take: Take) -> dict[Any, Any]:
    state = _decode(parsed(text, without_repeats), take, 0)
    if not isinstance(state, dict):
        raise Malformed(f"a state of type {kind_of(state)}")
    return state


def _decode(value: Any, take: Take, depth: int) -> Any:
    if depth > DEEPEST:
        raise Malformed(f"a state of more than {DEEPEST} levels")
    if isinstance(value, list):
        return [_decode(item, take, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise Malformed(f"an object with {len(value)} keys in place of one")
    [(kind, content)] = value.items()
    if kind in DICTS:
        return DICTS[kind](_decode_items(content, take, depth))
    if kind == "tuple":
        return tuple(_decode(item, take, depth + 1) for item in _of(list, content))
    if kind == "tensor":
        return _decode_tensor(content, take)
    if kind in LEAVES:
        return _decode_leaf(kind, _of(str, content))
    raise Malformed(f"a value of unknown kind {kind[:40]!r}")


def _decode_items(content: Any, take: Take, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for item in _of(list, content):
        if type(item) is not list or len(item) != 2:
            raise Malformed("an entry of a dict that is not a pair")
        key = _decode(item[0], take, depth)
        if type(key) not in (str, int):
            raise Malformed(f"a key of type {kind_of(key)}")
        if key in found:
            raise Malformed(f"the duplicate key {key!r}")
        found[key] = _decode(item[1], take, depth + 1)
    return found


def _decode_tensor(content: Any, take: Take) -> Any:
    if type(content) is not list or len(content) != 3:
        raise Malformed("a tensor without name, dtype and shape")
    name = _of(str, content[0])
    dtype = _of(str, content[1])
    shape = sizes(content[2])
    if dtype not in DTYPES:
        raise Malformed(f"a tensor of dtype {dtype[:40]!r}")
    return take(name, DTYPES[dtype], shape)


def sizes(value: Any) -> list[int]:
    """Check that a value is a list of non-negative ints, a shape or an offset in each dimension, and return it."""
    if type(value) is not list or not all(type(size) is int and size >= 0 for size in value):
        raise Malformed(f"a shape or offset {str(value)[:40]}")
    return value


LEAVES = ("bytes", "float", "int")


def _decode_leaf(kind: str, text: str) -> Any:
    try:
        if kind == "bytes":
            return base64.b64decode(text, validate=True)
        if kind == "int":
            return int(text, 16)
    except ValueError:
        raise Malformed(f"{kind} that cannot be decoded") from None
    if text not in ("nan", "inf", "-inf"):
        raise Malformed(f"the float {text[:40]!r}")
    return float(text)


def _of(kind: type, value: Any) -> Any:
    """Return the value if it has the type `kind`; otherwise raise Malformed."""
    if type(value) is not kind:
        raise Malformed(f"{kind_of(value)} in place of {kind.__name__}")
    return value
