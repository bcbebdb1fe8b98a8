"""Files on disk: absolute paths, atomic writes, JSON, checksums, files of named tensors, format versions.

Every file that is replaced as a whole is written through `atomic_write`: a process that is killed leaves the old file
or the new one. torch is not imported, because the report is written without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from samplewise.core.text import listed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RUN_FILE = "run.json"  # in every run directory
RUN_VERSION = 2  # "format_version" in that file
RECIPE_FILE = "recipe.json"  # in the directory of a run of `samplewise train`: recipe and options
QUARANTINE_FILE = "quarantine.jsonl"  # in the directory of a run with sw.callbacks.Quarantine
DESCRIPTION = "samplewise"  # key of the description in the metadata of a file of tensors
RESERVED_NAME = "__metadata__"  # key of the metadata in a safetensors file
TENSOR_DTYPES = {  # names of torch's dtypes in safetensors
    "complex64": "C64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the path as an absolute path, unaffected by a later `os.chdir`; a leading ~ is expanded."""
    check_local(path)
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as why:  # the working directory was removed; ~name is no user
        raise ValueError(
            f"a directory must have a path that can be made absolute; found {str(path)!r}: {why} Pass an absolute path."
        ) from why


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a URL."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):  # pathlib merges the slashes of s3://
        raise ValueError(
            f"a path must be that of a local file or directory; found the URL {os.fspath(path)!r}. To train, pass a "
            "local run directory and callbacks=[sw.callbacks.Upload(url)]; to read a run in an object store, copy it "
            "with sw.download_run(url, directory)."
        )


# --- atomic writes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: Path, temporary: Path | None = None, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for atomic writing to `path`.

    The data is written to `temporary`, synced to disk, then renamed to `path`. On an error `temporary` is deleted and
    an existing file at `path` is unchanged.

    temporary: `.<name>.partial` next to `path` by default
    mode: permissions of a new file, before the umask
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_write(path) as file:
        file.write(content)


def sync_file(file: BinaryIO) -> None:
    """Flush an open file and sync it to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that renames in it survive a crash."""
    if os.name == "nt":  # Windows cannot open directories
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as why:
        if why.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some network file systems
            raise
    finally:
        os.close(directory)


# --- JSON ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file atomically."""
    write_bytes(path, json.dumps(content, indent=indent).encode())


def read_json(path: Path, error: type[Exception], remedy: str) -> Any:
    """Content of a JSON file. Raises FileNotFoundError, or `error` with the remedy if it cannot be read or parsed."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as why:
        raise error(f"{path} must be readable JSON; found {type(why).__name__}: {why}. {remedy}") from why


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file with one JSON object per line; empty without a file. Lines that are not complete are left out:
    a process may be writing them, or was killed.
    """
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def other_version(name: object, version: object, expected: int) -> str:
    """Return one sentence for a file or directory whose format version `version` is not `expected`."""
    if type(version) is int and version > expected:
        remedy = "it was written by a newer one; upgrade with pip install --upgrade samplewise"
    else:
        remedy = "use the version that wrote it, or start a new run directory"
    text = repr(version)[:40] if version is not None else "none"
    return (
        f"{name} must have format version {expected}; found {text}, which this version of samplewise does not read: "
        f"{remedy}."
    )


# --- bytes of tensors ------------------------------------------------------------------------------------------------


def sha256(contents: Iterable[str | bytes | Tensor]) -> str:
    """SHA-256 of texts, bytes and the values of tensors, one after another. The shape and dtype of a tensor are not
    included.
    """
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, str):
            digest.update(content.encode())
        else:
            digest.update(content if isinstance(content, bytes) else tensor_bytes(content))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order as a read-only memoryview, without NumPy.

    A contiguous tensor on the CPU is not copied: the view shows its memory, and keeps it alive. A tensor on another
    device, or with other strides, is copied first.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.nbytes:
        return memoryview(b"")
    buffer = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    vars(buffer)["tensor"] = plain  # keeps the memory alive as long as the view
    return memoryview(buffer).cast("B").toreadonly()


def have_same_bytes(first: Tensor, second: Tensor) -> bool:
    """True if two CPU tensors of one dtype have the same shape and bytes. Faster than torch.equal, and true for NaN."""
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (first, second))
    return a.shape == b.shape and _compare(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


_compare = (ctypes.cdll.msvcrt if platform.system() == "Windows" else ctypes.CDLL(None)).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


# --- files of tensors: safetensors, with a description in JSON; reading them runs no code ----------------------------


def require_safetensors(user: str = "checkpoints") -> Any:
    """Import safetensors, or raise ImportError with the command to install it."""
    try:
        import_module("safetensors.torch")
        return import_module("safetensors")
    except ImportError:
        raise ImportError(f"{user} need safetensors: pip install 'samplewise[train]'") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: Any) -> None:
    """Write a file atomically, one tensor after another. Tensors may share memory; they are written separately.

    Without the safetensors library, which copies all tensors: the memory is that of one copy of the largest tensor at
    most, if it is not contiguous or not on the CPU.
    """
    require_safetensors("files of tensors")  # not needed for writing, but without it the file could not be read
    # Wide dtypes first, so that each tensor is aligned to its item size, as reading needs.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    entries = []
    for name, tensor in ordered:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TENSOR_DTYPES:
            raise ValueError(
                f"tensors in a file must have one of the dtypes {listed(TENSOR_DTYPES)}; found {dtype} for {name!r}. "
                "Convert it."
            )
        entries.append((name, TENSOR_DTYPES[dtype], tensor.shape, tensor.nbytes))
    with atomic_write(path) as file:
        file.write(tensors_header(entries, {DESCRIPTION: json.dumps(description)}))
        for _, tensor in ordered:
            file.write(tensor_bytes(tensor))


def tensors_header(entries: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file, preceded by its length.

    entries: name, dtype in safetensors, shape and number of bytes of each tensor, in the order of their data
    """
    header: dict[str, Any] = {RESERVED_NAME: metadata}
    begin = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], Any]:
    """Tensors and description of a file. Raises ValueError for a file that `write_tensors` has not written."""
    safetensors = require_safetensors("files of tensors")
    try:
        with safetensors.safe_open(path, "pt", str(device)) as file:
            description = json.loads(file.metadata()[DESCRIPTION])
            return {name: file.get_tensor(name) for name in file.keys()}, description  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as why:
        raise ValueError(f"{path} must be a file of tensors; found other content: {why}") from why
