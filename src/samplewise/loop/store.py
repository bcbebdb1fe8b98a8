"""Checkpoints on disk: a nested state in one file that is either whole or not there.

A file is in the safetensors format. Its tensors are named "0", "1", ...; its metadata holds

    format    "samplewise checkpoint"
    version   of what is described here
    state     JSON: the state, each tensor in it as {"tensor": [name, dtype, shape]}
    sha256    of `state` and the bytes of all tensors

Nothing in it is code, so reading a file from a stranger runs nothing of theirs. It is written by hand: safetensors
itself holds the whole file in memory, or leaves files of its own naming behind when it is interrupted.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import files, ranks
from samplewise.engine.sharded import in_parts
from samplewise.errors import CheckpointError, CheckpointWarning

FORMAT = "samplewise checkpoint"
VERSION = 1
LARGEST_HEADER = 100_000_000  # bytes; safetensors refuses to read longer ones
DEEPEST = 100  # levels; the JSON parser gives up at some 300, and a state that contains itself never ends
PARTIAL = ".partial"


def write(path: Path, state: dict[Any, Any]) -> None:
    """Writes `state` to `path`: all of it, or nothing.

    `state` may nest dicts (keys text or int), lists and tuples of tensors, numbers, text, bytes and None. They come
    back with the types they had, except that subclasses of float (NumPy's, as schedules return) come back as float.
    Tensors that share memory come back apart.
    """
    _safetensors()  # whoever writes will want to read
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict; found {_kind(state)}.")
    text, given = encoded(state)
    tensors = [_copy(tensor) for tensor in given]
    about = {"format": FORMAT, "version": str(VERSION), "state": text, "sha256": _checksum(text, tensors)}
    header, order = _layout(about, tensors)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with files.whole(path, aside) as file:
            file.write(header)
            for tensor in order:
                file.write(_memory(tensor))
    except OSError as why:
        raise CheckpointError(
            f"a checkpoint must be written to {path}, which failed: {why}. Free some space or see to the permissions, "
            "and save again; a file that stands there is still whole."
        ) from why


def check(state: dict[Any, Any]) -> None:
    """Raises where `write` would, because of what is in the state, and copies nothing."""
    _safetensors()
    _encode(state, (), [])


def encoded(state: dict[Any, Any]) -> tuple[str, list[Tensor]]:
    """The state as JSON in which each tensor is a number, and the tensors."""
    given: list[Tensor] = []
    return json.dumps(_encode(state, (), given), **STRICT), given


def decoded(text: str, tensors: list[Tensor]) -> Any:
    """The state again."""
    return _decode(json.loads(text), tensors)


def tensors_in(text: str) -> list[tuple[torch.dtype, list[int]]]:
    """What the tensors of an encoded state must be."""
    found: dict[int, tuple[torch.dtype, list[int]]] = {}

    def note(entry: dict[str, Any]) -> Any:
        if list(entry) == ["tensor"]:
            name, dtype, shape = entry["tensor"]
            found[int(name)] = getattr(torch, dtype), shape
        return entry

    json.loads(text, object_hook=note)
    return [found[k] for k in range(len(found))]


def read(path: Path, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """The state that `write` has put there, or several ranks together, its tensors on `device`."""
    if Path(path).is_dir():
        from samplewise.loop import folders  # which reads most of it with this very function

        return _moved(folders.read(Path(path)), torch.device(device))
    safetensors = _safetensors()
    try:
        about = _metadata(path)
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = [file.get_tensor(str(k)) for k in range(len(file.keys()))]
        if _checksum(about["state"], tensors) != about["sha256"]:
            raise _corrupt(path, "another checksum")
        state = _decode(json.loads(about["state"]), tensors)
        if not isinstance(state, dict):
            raise _corrupt(path, f"a state of type {_kind(state)}")
    except OSError as why:
        raise CheckpointError(
            f"{path} must be a file that can be read; found: {why}. See to its path and permissions."
        ) from why
    except (safetensors.SafetensorError, *MALFORMED) as why:
        raise _corrupt(path, f"{type(why).__name__}: {why}") from why
    return _moved(state, torch.device(device))


class Checkpoints:
    """A directory of checkpoints, the newest `keep` of them and those in `protect`.

    One run at a time may use it: what another one is just writing looks like the leftover of an interrupted save.
    """

    def __init__(self, directory: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the newest checkpoint; found {keep}.")
        self.directory, self.keep = Path(directory), keep
        self.protect: set[Path] = set()
        self._check_writable()

    def save(self, state: dict[Any, Any], update: int) -> Path:
        """Writes the state after `update` updates, then removes older checkpoints."""
        if update < 0:
            raise ValueError(f"update must be a number of updates, 0 or more; found {update}.")
        self._remove_leftovers()  # first, since they may fill the disk
        path = self.path_of(update)
        if path.is_dir():  # of several ranks: a file does not take the place of a folder
            path.rename(path.with_name(f".{path.name}{PARTIAL}"))
        write(path, state)
        self.remove_older_than(update)
        return path

    def path_of(self, update: int) -> Path:
        return self.directory / f"update-{update:09d}.ckpt"

    def latest(self, read: Callable[[Path], dict[Any, Any]] = read) -> tuple[dict[Any, Any], Path] | None:
        """The newest checkpoint that can be read, and its path."""
        self._remove_leftovers()
        for _, path in self._newest_first():
            try:
                return read(path), path
            except CheckpointError as why:
                warnings.warn(f"{why} Going on to the checkpoint before it.", CheckpointWarning, stacklevel=2)
        return None

    def paths(self) -> list[Path]:
        """Of all checkpoints, readable or not, the newest first."""
        return [path for _, path in self._newest_first()]

    def _newest_first(self) -> list[tuple[int, Path]]:
        named = ((re.fullmatch(r"update-([0-9]{9,})\.ckpt", path.name), path) for path in self.directory.iterdir())
        return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def remove_older_than(self, update: int) -> None:
        """But for the newest of them, and those that are protected."""
        # Later ones stay: whoever went back to an early checkpoint and trains from there may still want them.
        older = [path for number, path in self._newest_first() if number < update]
        protected = {path.resolve() for path in self.protect}
        _remove(path for path in older[self.keep - 1 :] if path.resolve() not in protected)

    def _remove_leftovers(self) -> None:
        if ranks.rank() == 0:
            _remove(self.directory.glob(f".*{PARTIAL}"))

    def _check_writable(self) -> None:
        # Tried, not asked for: for root every permission looks fine, on a read-only disk too.
        probe = self.directory / f".{uuid.uuid4().hex[:8]}{PARTIAL}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as why:
            raise CheckpointError(
                f"{self.directory} must be a directory that can be written to; found: {why}. "
                "Give another directory, or see to its permissions."
            ) from why


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'samplewise[train]'") from None
    return safetensors


# ------------------------------------------------------------------------------ state <-> JSON
# Lists, text, None, bools and ordinary numbers stand for themselves; all else is {"what it is": content}.

DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
TENSORS = (Tensor, nn.Parameter, nn.Buffer)
# As safetensors calls them. Tensors of other dtypes are written as their bytes.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
STRICT: dict[str, Any] = dict(allow_nan=False, separators=(",", ":"))
# What decoding raises at a file with the right checksum that `write` has not made.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def _encode(value: Any, place: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """`value` as JSON; its tensors are appended to `tensors`."""
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
        f"found {_kind(value)}. Convert it, or leave it out of the state."
    )


def _encode_items(value: dict[Any, Any], place: tuple[Any, ...], tensors: list[Tensor]) -> list[Any]:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"keys of {_dotted(place)} must be text or int; found {key!r}, {_kind(key)}.")
    return [[_encode(key, place, tensors), _encode(item, (*place, key), tensors)] for key, item in value.items()]


def _encode_tensor(value: Tensor, place: tuple[Any, ...], tensors: list[Tensor]) -> list[Any]:
    whole = type(value) in TENSORS or in_parts(value)
    if not whole or value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise TypeError(
            f"{_dotted(place)} must be a plain, dense tensor with data; found {_kind(value)} of layout {value.layout} "
            f"and dtype {value.dtype} on {value.device}. Convert it, or leave it out of the state."
        )
    tensors.append(value)
    return [str(len(tensors) - 1), str(value.dtype).removeprefix("torch."), list(value.shape)]


def _copy(value: Tensor) -> Tensor:
    """As it goes into the file."""
    if in_parts(value):
        raise TypeError("a tensor must be whole to be written by one process; found one that ranks share.")
    copy = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy if copy.dtype in DTYPES else copy.reshape(-1).view(torch.uint8)


def _decode(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind in DICTS:
        return DICTS[kind]({_decode(key, tensors): _decode(item, tensors) for key, item in content})
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "tensor":
        return _decode_tensor(content, tensors)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "float":
        return float(content)
    if kind == "int":
        return int(content, 16)
    raise ValueError(f"unknown kind {kind!r}")


def _decode_tensor(content: list[Any], tensors: list[Tensor]) -> Tensor:
    # The dtype and shape count that stand here, under the checksum, not those in the header of the file.
    name, dtype_name, shape = content
    dtype, stored = getattr(torch, dtype_name), tensors[int(name)]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {dtype_name!r}")
    if stored.dtype != dtype:
        stored = stored.clone().view(dtype)  # cloned, since it may begin anywhere in the file
    return stored.reshape(shape)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)  # what safetensors returns are windows into the file
    if isinstance(value, dict):
        return type(value)({key: _moved(item, device) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _dotted(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place)) or "state"


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ----------------------------------------------------------------------------------- the file


def _memory(tensor: Tensor) -> Any:
    if not tensor.nbytes:
        return b""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _checksum(text: str, tensors: list[Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(_memory(tensor))
    return digest.hexdigest()


def _layout(about: dict[str, str], tensors: list[Tensor]) -> tuple[bytes, list[Tensor]]:
    """The header of a safetensors file, with its length in front, and the tensors in the order in which they follow."""
    header: dict[str, Any] = {"__metadata__": about}
    # Wide ones first, after a multiple of 8 bytes: so each begins at a multiple of its width, as reading them needs.
    order, begin = sorted(enumerate(tensors), key=lambda named: -named[1].itemsize), 0
    for name, tensor in order:
        end = begin + tensor.nbytes
        header[str(name)] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, **STRICT).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise CheckpointError(
            f"the numbers and texts of a state must take at most {LARGEST_HEADER} bytes as JSON; found {len(text)}. "
            "Make tensors of the long lists in it."
        )
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in order]


def _metadata(path: Path) -> dict[str, str]:
    """What the file says about itself, once it is known to be of our format and of full length."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) == 9 and (start[8:] != b"{" or length > LARGEST_HEADER):
            raise _foreign(path, f"one that begins with {start!r}")
        _check_length(path, size, 8 + length if len(start) == 9 else 9)
        header = json.loads(start[8:] + file.read(length - 1))
    about = header.pop("__metadata__", {})
    if about.get("format") != FORMAT:
        raise _foreign(path, f"a safetensors file of format {about.get('format')!r}")
    _check_version(path, int(about["version"]))
    _check_length(path, size, 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0))
    return about


def _check_length(path: Path, size: int, needed: int) -> None:
    if size < needed:
        raise CheckpointError(
            f"{path} must be at least {needed} bytes long; found {size}. It is truncated: copy it again, or use "
            "an earlier checkpoint."
        )


def _check_version(path: Path, version: int) -> None:
    if version > VERSION:
        raise CheckpointError(
            f"{path} must be of checkpoint format {VERSION}; found {version}. A newer samplewise has written it: "
            "pip install --upgrade samplewise"
        )
    if version != VERSION:
        raise _corrupt(path, f"format {version}")


def _corrupt(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must hold what was once written to it; found {found}. It is corrupt: use an earlier checkpoint."
    )


def _foreign(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a file that samplewise has written; found {found}. It is no checkpoint: give another path."
    )


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as why:
            warnings.warn(
                f"{path} must go, but cannot be removed: {why}. Remove it by hand.", CheckpointWarning, stacklevel=4
            )
