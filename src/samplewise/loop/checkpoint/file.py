"""One checkpoint file: a nested state that is either whole or not there.

A file is in the safetensors format. Its tensors are named "0", "1", ...; its metadata holds

    format    "samplewise checkpoint"
    version   of what is described here
    state     JSON text: the state, see `encoding`
    sha256    of `state` and the bytes of all tensors

Nothing in it is code, so a file from an untrusted source runs nothing. The file is written without the safetensors
library, which holds the whole file in memory, or leaves files with names of its own when it is interrupted.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplewise import files
from samplewise.engine.sharded import in_parts
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint.encoding import (
    STRICT,
    Malformed,
    decode,
    encode,
    parsed,
    sizes,
    without_repeats,
)

FORMAT = "samplewise checkpoint"
VERSION = 1
LARGEST_HEADER = 100_000_000  # bytes; safetensors refuses to read longer ones
PARTIAL = ".partial"
# As safetensors calls them. Tensors of other dtypes are stored as their bytes.
STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
STORED |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
# What the standard library, torch and safetensors raise for a header that `write` has not made.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def write(path: Path, state: dict[Any, Any], *, snapshot: bool = True) -> str:
    """Writes `state` to `path`, all of it or nothing, and returns its checksum.

    `state` may nest dicts (keys text or int), lists and tuples of tensors, numbers, text, bytes and None. They come
    back with the types they had, except that subclasses of float (NumPy's, as schedules return) come back as float.
    Tensors that share memory come back apart. snapshot: False if nothing changes the tensors meanwhile.
    """
    require_safetensors()  # a file that cannot be read again is of no use
    text, given = encode(state)
    tensors = [_stored(tensor, snapshot) for tensor in given]
    digest = _checksum(text, tensors)
    header, order = _layout({"format": FORMAT, "version": str(VERSION), "state": text, "sha256": digest}, tensors)
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
    return digest


def read(path: Path, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """The state in a file, with tensors of its own on `device`."""
    state, _ = mapped(path)
    return moved(state, torch.device(device), copy=True)


def mapped(path: Path, verify: bool = True) -> tuple[dict[Any, Any], str]:
    """The state in a file, whose tensors are windows into the file, and the checksum that the file states.

    verify: False if another process compares the bytes with the checksum.
    """
    safetensors = require_safetensors()
    try:
        about = _metadata(path)
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        text, digest = about["state"], about["sha256"]
        if verify and _checksum(text, [tensors[str(k)] for k in range(len(tensors))]) != digest:
            raise corrupt(path, "another checksum")
        return decode(text, tensors, _unpacked), digest
    except OSError as why:
        raise CheckpointError(
            f"{path} must be a file that can be read; found: {why}. See to its path and permissions."
        ) from why
    except Malformed as why:
        raise corrupt(path, str(why)) from why
    except (safetensors.SafetensorError, *MALFORMED) as why:
        raise corrupt(path, f"{type(why).__name__}: {why}") from why


def require_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'samplewise[train]'") from None
    return safetensors


def moved(value: Any, device: torch.device, copy: bool = False) -> Any:
    """A state with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, copy=copy)
    if isinstance(value, dict):
        return type(value)({key: moved(item, device, copy) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device, copy) for item in value)
    return value


def remove(path: Path) -> None:
    """Removes a file, a link or a directory with its content, if it is there. What a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- tensors as bytes ------------------------------------------------------------------------------------------------


def _stored(value: Tensor, snapshot: bool) -> Tensor:
    """As it goes into the file: on the CPU, contiguous, of a dtype that safetensors knows."""
    if in_parts(value):
        raise TypeError("a tensor must be whole to be written by one process; found one that ranks share.")
    plain = value.detach().resolve_conj().resolve_neg()
    plain = plain.to("cpu", copy=snapshot, memory_format=torch.contiguous_format).contiguous()
    return plain if plain.dtype in STORED else plain.reshape(-1).view(torch.uint8)


def _unpacked(stored: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if dtype in STORED:
        return stored
    needed = math.prod(shape) * dtype.itemsize
    if stored.dtype != torch.uint8 or list(stored.shape) != [needed]:
        raise Malformed(f"a tensor stored as {stored.dtype} {list(stored.shape)} in place of {needed:,} bytes")
    return stored.clone().view(dtype).reshape(shape)  # cloned, since it may begin anywhere in the file


def _memory(tensor: Tensor) -> Any:
    if not tensor.nbytes:
        return b""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _checksum(text: str, tensors: list[Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(_memory(tensor))
    return digest.hexdigest()


# --- the header ------------------------------------------------------------------------------------------------------


def _layout(about: dict[str, str], tensors: list[Tensor]) -> tuple[bytes, list[Tensor]]:
    """The header of a safetensors file, with its length in front, and the tensors in the order in which they follow."""
    header: dict[str, Any] = {"__metadata__": about}
    begin = 0
    # Wide ones first, after a multiple of 8 bytes: so each begins at a multiple of its width, as reading them needs.
    order = sorted(enumerate(tensors), key=lambda named: -named[1].itemsize)
    for name, tensor in order:
        end = begin + tensor.nbytes
        header[str(name)] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
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
    """What the file states about itself, once it is known to be of our format and of full length."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe would block
        raise OSError("it is no regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) == 9 and (start[8:] != b"{" or length > LARGEST_HEADER):
            raise _foreign(path, f"one that begins with {start!r}")
        _check_length(path, size, 8 + length if len(start) == 9 else 9)
        header = parsed(start[8:] + file.read(length - 1), without_repeats)
    about = header.pop("__metadata__", {})
    if about.get("format") != FORMAT:
        raise _foreign(path, f"a safetensors file of format {about.get('format')!r}")
    _check_version(path, int(about["version"]))
    ends = [sizes(tensor["data_offsets"])[1] for tensor in header.values()]
    _check_length(path, size, 8 + length + max(ends, default=0))
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
        raise corrupt(path, f"format {version}")


def corrupt(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must hold what was once written to it; found {found}. It is corrupt: use an earlier checkpoint."
    )


def _foreign(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a file that samplewise has written; found {found}. It is no checkpoint: give another path."
    )
