"""Checkpoint file: a nested state in the safetensors format, written atomically.

Tensors are named "0", "1", .... The metadata contains

    format    "samplewise checkpoint"
    version   version of this format
    state     JSON text: the state, see `encoding`
    sha256    checksum of `state` and the bytes of all tensors

A file contains no code, so one from an untrusted source cannot run anything. It is written without the safetensors
library, which keeps the whole file in memory, or leaves temporary files when it is interrupted.
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

from samplewise.core import atomic_io
from samplewise.distributed.sharded_parameters import is_dtensor
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
# Names of dtypes in safetensors. Tensors of other dtypes are stored as bytes.
STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
STORED |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
# Errors that the standard library, torch and safetensors raise for a header that `write` has not made.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def write(path: Path, state: dict[Any, Any], *, snapshot: bool = True) -> str:
    """Write `state` to `path` atomically, and return its checksum.

    `state` may nest dicts (keys str or int), lists and tuples of tensors, numbers, text, bytes and None. Types are
    preserved, except that subclasses of float (such as NumPy's, which schedulers return) are read as float. Tensors
    that share memory are read as separate tensors.

    snapshot: copy the tensors first. False if they are not changed during the call.
    """
    require_safetensors()  # not needed for writing, but without it the file could not be read
    text, given = encode(state)
    tensors = [_stored(tensor, snapshot) for tensor in given]
    digest = _checksum(text, tensors)
    header, order = _layout({"format": FORMAT, "version": str(VERSION), "state": text, "sha256": digest}, tensors)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with atomic_io.whole(path, aside) as file:
            file.write(header)
            for tensor in order:
                file.write(_memory(tensor))
    except OSError as why:
        raise CheckpointError(
            f"a checkpoint could not be written to {path}: {why}. Free disk space or fix the permissions, then save "
            "again. An existing file at this path is unchanged."
        ) from why
    return digest


def read(path: Path, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """Return the state in a file, with tensors copied to `device`."""
    state, _ = mapped(path)
    return moved(state, torch.device(device), copy=True)


def mapped(path: Path, verify: bool = True) -> tuple[dict[Any, Any], str]:
    """Return the state in a file, with memory-mapped tensors, and the checksum in its metadata.

    verify: False if another process compares the bytes with the checksum.
    """
    safetensors = require_safetensors()
    try:
        about = _metadata(path)
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        text = about["state"]
        digest = about["sha256"]
        if verify and _checksum(text, [tensors[str(k)] for k in range(len(tensors))]) != digest:
            raise corrupt(path, "another checksum")
        return decode(text, tensors, _unpacked), digest
    except OSError as why:
        raise CheckpointError(f"{path} must be a readable file; found: {why}. Check its path and permissions.") from why
    except Malformed as why:
        raise corrupt(path, str(why)) from why
    except (safetensors.SafetensorError, *MALFORMED) as why:
        raise corrupt(path, f"{type(why).__name__}: {why}") from why


def require_safetensors() -> Any:
    """Import safetensors, or raise ImportError with the command to install it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'samplewise[train]'") from None
    return safetensors


def moved(value: Any, device: torch.device, copy: bool = False) -> Any:
    """Return a nested state with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, copy=copy)
    if isinstance(value, dict):
        return type(value)({key: moved(item, device, copy) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device, copy) for item in value)
    return value


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (not its target) or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- tensors as bytes ------------------------------------------------------------------------------------------------


def _stored(value: Tensor, snapshot: bool) -> Tensor:
    """Return the tensor as it is stored: on the CPU, contiguous, with a dtype of `STORED`; otherwise as uint8."""
    if is_dtensor(value):
        raise TypeError(
            "a tensor must not be sharded over ranks if one process writes it; found a DTensor. Gather it first."
        )
    plain = value.detach().resolve_conj().resolve_neg()
    plain = plain.to("cpu", copy=snapshot, memory_format=torch.contiguous_format).contiguous()
    return plain if plain.dtype in STORED else plain.reshape(-1).view(torch.uint8)


def _unpacked(stored: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return a stored tensor with its original dtype and shape."""
    if dtype in STORED:
        return stored
    needed = math.prod(shape) * dtype.itemsize
    if stored.dtype != torch.uint8 or list(stored.shape) != [needed]:
        raise Malformed(f"a tensor stored as {stored.dtype} {list(stored.shape)} in place of {needed:,} bytes")
    return stored.clone().view(dtype).reshape(shape)  # cloned, since its address in the file may not be aligned


def _memory(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as a buffer, without a copy."""
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
    """Return the header of a safetensors file, preceded by its length, and the tensors in the order of their data."""
    header: dict[str, Any] = {"__metadata__": about}
    begin = 0
    # Wide dtypes first, after a multiple of 8 bytes, so that each tensor is aligned to its item size, as reading needs.
    order = sorted(enumerate(tensors), key=lambda named: -named[1].itemsize)
    for name, tensor in order:
        end = begin + tensor.nbytes
        header[str(name)] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, **STRICT).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise CheckpointError(
            f"numbers and texts of a state must take at most {LARGEST_HEADER} bytes as JSON; found {len(text)}. "
            "Convert long lists to tensors."
        )
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in order]


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file after checking its format, version and length."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe would block
        raise OSError("it is not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) == 9 and (start[8:] != b"{" or length > LARGEST_HEADER):
            raise _foreign(path, f"a file that begins with {start!r}")
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
            f"{path} must have checkpoint format {VERSION}; found {version}, written by a newer samplewise. Upgrade: "
            "pip install --upgrade samplewise"
        )
    if version != VERSION:
        raise corrupt(path, f"format {version}")


def corrupt(path: Path, found: str) -> CheckpointError:
    """Return the error for a file whose content was changed."""
    return CheckpointError(
        f"{path} must contain exactly what was written to it; found {found}. It is corrupt: use an earlier checkpoint."
    )


def _foreign(path: Path, found: str) -> CheckpointError:
    """Return the error for a file that is not a checkpoint."""
    return CheckpointError(
        f"{path} must be a checkpoint file written by samplewise; found {found}. It is not a checkpoint: pass another "
        "path."
    )
