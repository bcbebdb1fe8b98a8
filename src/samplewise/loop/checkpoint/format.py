"""Files of a checkpoint: a directory with a JSON file, and safetensors files.

    update-000000010.ckpt/
        state.json            everything except tensors; size and SHA-256 of each shard
        model.safetensors     tensors of the model under their names in its state dict: "fc.weight"
        rank-0.safetensors    shard of rank 0: the other tensors that it writes, named after their path in the state
        rank-1.safetensors    shard of rank 1; one process writes rank-0 only

There is no model.safetensors if the state has no tensors of a model, or if they are sharded over ranks (FSDP): then
each rank writes its part of each of them to its own shard, under the name "model.fc.weight".

state.json has the keys

    format            "samplewise checkpoint"
    format_version    version of this format
    shards            one {"file", "bytes", "sha256", "offsets"} for model.safetensors, if it exists, and for each rank;
                      "offsets" has the offset in each dimension of the tensors that the shard contains only a part of,
                      by name
    state             the state: see `encoding`
    sha256            checksum of state.json without this entry

No file contains code, so a checkpoint from an untrusted source cannot run anything. Shards are written without the
safetensors library, which keeps the whole file in memory, or leaves temporary files when it is interrupted.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Iterable, Mapping
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.core.files import (
    RESERVED_NAME,
    TENSOR_DTYPES,
    other_version,
    require_safetensors,
    sha256,
    sync_file,
    tensor_bytes,
    tensors_header,
)
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint.encoding import (
    COUNT,
    DICT,
    TEXT,
    Malformed,
    Schema,
    TensorInfo,
    check,
    check_sizes,
    from_json,
    to_json,
)
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_rank_zero
from samplewise.parallel.sharded_parameters import is_dtensor

FORMAT = "samplewise checkpoint"
# 1: one file, or a directory with torch's pickle. 2: a directory of files of version 1. 3: without model.safetensors,
# settings and base. 4: with the random state of CUDA devices only. 5: with other keys in the state. None of them was
# released.
VERSION = 6
STATE_FILE = "state.json"
CONTENTS = {STATE_FILE: VERSION, ".metadata": 1, "state.ckpt": 2}  # file in each checkpoint of a version
MODEL_FILE = "model.safetensors"
MODEL_PREFIX = "model."  # of the names of tensors in the state; omitted in MODEL_FILE
MAX_JSON_BYTES = 100_000_000  # of state.json and of the header of a shard; safetensors refuses to read longer headers
SHARD: Schema = {"file": TEXT, "bytes": COUNT, "sha256": TEXT, "offsets": DICT}
CONTENT: Schema = {"format": TEXT, "format_version": COUNT, "shards": [SHARD], "state": DICT}
# Names of dtypes in safetensors. Tensors of other dtypes, also complex ones, are stored as uint8 with one more
# dimension, their bytes.
STORED_DTYPES = {
    dtype: stored for name, stored in TENSOR_DTYPES.items() if not (dtype := getattr(torch, name)).is_complex
}
# Errors that the standard library, torch and safetensors raise for files that were not written by this module.
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)


Offset = tuple[int, ...]  # in each dimension
Chunks = dict[Offset, Tensor]  # chunks of one tensor


class Chunk(NamedTuple):
    """Tensor, or the part of it that begins at `offset`."""

    name: str
    tensor: Tensor
    offset: Offset | None = None  # None for a complete tensor


def shard_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(path: Path, chunks: Iterable[Chunk]) -> dict[str, Any]:
    """Write chunks to a safetensors file, sync it to disk, and return its entry in state.json."""
    # Wide dtypes first, after a multiple of 8 bytes, so that each tensor is aligned to its item size, as reading needs.
    ordered = sorted(chunks, key=lambda chunk: -chunk.tensor.itemsize if chunk.tensor.dtype in STORED_DTYPES else -1)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        buffers = (tensor_bytes(chunk.tensor) for chunk in ordered)
        for data in chain([memoryview(_header(ordered))], buffers):
            digest.update(data)
            file.write(data)
        sync_file(file)
        size = file.tell()
    offsets = {chunk.name: list(chunk.offset) for chunk in ordered if chunk.offset is not None}
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest(), "offsets": offsets}


def _header(chunks: Iterable[Chunk]) -> bytes:
    """Return the header of a safetensors file, preceded by its length."""
    entries = []
    for name, tensor, _ in chunks:
        stored = tensor.dtype in STORED_DTYPES
        dtype = STORED_DTYPES[tensor.dtype] if stored else "U8"
        shape = [*tensor.shape] if stored else [*tensor.shape, tensor.itemsize]
        entries.append((name, dtype, shape, tensor.nbytes))
    return tensors_header(entries, {"format": "pt"})


def write_state(directory: Path, state: str, shards: list[dict[str, Any]]) -> None:
    """Write state.json and sync it to disk. `state`: the encoded state as text."""
    head = to_json({"format": FORMAT, "format_version": VERSION, "shards": shards})
    text = f'{head[:-1]},"state":{state}}}'
    digest = sha256([text])
    with open(directory / STATE_FILE, "wb") as file:
        file.write(f'{text[:-1]},"sha256":"{digest}"}}'.encode())
        sync_file(file)


def check_length(state: str) -> None:
    """Raise CheckpointError if an encoded state is too long for state.json."""
    if len(state) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"numbers and texts of a state must take at most {MAX_JSON_BYTES} bytes as JSON; found {len(state)}. "
            "Convert long lists to tensors."
        )


# --- reading ---------------------------------------------------------------------------------------------------------


def read_state(directory: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the encoded state and the entries of the shards, after checking format, version and checksum."""
    path = directory / STATE_FILE
    _check_directory(directory)
    try:
        with _open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > 2 * MAX_JSON_BYTES:  # state and entries of the shards
                raise foreign(path, "a file that is too long")
            data = file.read()
        if data[:1] not in (b"{", b""):
            raise foreign(path, f"a file that begins with {data[:9]!r}")
        content = from_json(data)
        if content.get("format") != FORMAT:
            raise foreign(path, f"JSON of format {str(content.get('format'))[:40]!r}")
        if content.get("format_version") != VERSION or type(content["format_version"]) is not int:
            raise CheckpointError(other_version(directory, content.get("format_version"), VERSION))
        digest = content.pop("sha256", None)
        if sha256([to_json(content)]) != digest:
            raise Malformed("another checksum")
        check(content, CONTENT)
        names = [entry["file"] for entry in content["shards"]]
        first = [MODEL_FILE] if MODEL_FILE in names[:1] else []
        expected = [*first, *map(shard_file, range(len(names) - len(first)))]
        for name, right in zip(names, expected, strict=True):
            if name != right:
                raise Malformed(f"the file name {name[:40]!r} in place of {right!r}")
    except OSError as why:
        raise _unreadable(path, why) from why
    except PARSE_ERRORS as why:
        raise corrupt(path, why) from why
    return content["state"], content["shards"]


def _check_directory(path: Path) -> None:
    """Raise CheckpointError for a checkpoint of an earlier version of the format, and for other files."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            version = next((v for name, v in CONTENTS.items() if (path / name).exists()), VERSION)
        else:
            with _open_regular(path) as file:
                start = file.read(100)
            if f'"format":"{FORMAT}"'.encode() not in start:
                raise foreign(path, f"a file that begins with {start[:9]!r}")
            version = 1
    except OSError as why:
        raise _unreadable(path, why) from why
    if version != VERSION:
        raise CheckpointError(other_version(path, version, VERSION))


def read_shard(directory: Path, entry: dict[str, Any], verify: bool = True) -> list[Chunk]:
    """Return the chunks in a shard, memory-mapped and as they are stored: see `unpacked`.

    verify: False if another process compares the file with its checksum.
    """
    safetensors = require_safetensors()
    path = directory / entry["file"]
    prefix = MODEL_PREFIX if path.name == MODEL_FILE else ""
    try:
        with _open_regular(path) as file:
            header, names = _read_header(path, file, entry["bytes"])
        with safetensors.safe_open(path, framework="pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in names}
        if verify and sha256([header, *tensors.values()]) != entry["sha256"]:
            raise Malformed("another checksum")
        missing = [name for name in entry["offsets"] if name not in tensors]
        if missing:
            raise Malformed(f"an offset of {missing[0]!r}, which is not stored")
        offsets = {name: tuple(check_sizes(offset)) for name, offset in entry["offsets"].items()}
        return [Chunk(prefix + name, tensor, offsets.get(name)) for name, tensor in tensors.items()]
    except OSError as why:
        raise _unreadable(path, why) from why
    except (safetensors.SafetensorError, *PARSE_ERRORS) as why:
        raise corrupt(path, why) from why


def _read_header(path: Path, file: BufferedReader, size: int) -> tuple[bytes, list[str]]:
    """Return the header of a shard, preceded by its length, and the names of its tensors in the order of their data.

    Checks the length of the file, and that the header is JSON without duplicate keys; safetensors checks its content.
    """
    start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    if len(start) == 9 and (start[8:] != b"{" or length > MAX_JSON_BYTES):
        raise foreign(path, f"a file that begins with {start!r}")
    actual = os.fstat(file.fileno()).st_size
    if actual < size:
        raise CheckpointError(
            f"{path} must be {size} bytes long; found {actual}. It is truncated: copy it again, or use an earlier "
            "checkpoint."
        )
    if actual > size:
        raise Malformed(f"{actual} bytes in place of {size}")
    start += file.read(length - 1)
    header = from_json(start[8:])
    if header.pop(RESERVED_NAME, None) != {"format": "pt"}:
        raise Malformed("other metadata")
    spans = {name: check_sizes(tensor["data_offsets"]) for name, tensor in header.items()}
    end = 8 + length + max((span[1] for span in spans.values()), default=0)
    if end != size:
        raise Malformed(f"{size} bytes for tensors that end at {end}")
    return start, sorted(spans, key=lambda name: spans[name])


def unpacked(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor with its original dtype; raise `Malformed` if it is stored as another one."""
    packed = dtype not in STORED_DTYPES
    if stored.dtype != (torch.uint8 if packed else dtype) or (packed and stored.shape[-1:] != (dtype.itemsize,)):
        raise Malformed(f"a tensor stored as {stored.dtype} {list(stored.shape)} in place of {dtype}")
    return stored.clone().view(dtype).squeeze(-1) if packed else stored  # cloned: it may not be aligned in the file


def _open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise OSError for a named pipe, which would block."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")
    return open(path, "rb")


# --- chunks: which rank writes which, and how tensors are assembled from them ----------------------------------------

# The planners of torch.distributed.checkpoint decide both. Its import takes about a second and 50 MB, so it is imported
# only if there are several ranks to write, or a tensor to read that is stored in several chunks.


def chunks_to_write(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Return the chunks that this rank writes. Collective.

    A tensor that several ranks have under the same name is written by one of them; of a sharded tensor (DTensor) each
    rank writes its shard.
    """
    if collectives.size() == 1:
        return [_complete(name, tensor) for name, tensor in tensors.items()]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=collectives.rank() == 0)
    local_plans = collectives.all_gather_object(planner.create_local_plan())
    plans = on_rank_zero(lambda: planner.create_global_plan(local_plans)[0])
    chunks = []
    for item in planner.finish_plan(plans[collectives.rank()]).items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor) and item.tensor_data is not None  # there are tensors only
        where = item.tensor_data.chunk
        offset = None if where.sizes == item.tensor_data.size else tuple(where.offsets)
        chunks.append(Chunk(item.index.fqn, tensor.detach(), offset))
    return chunks


def _complete(name: str, tensor: Tensor) -> Chunk:
    if is_dtensor(tensor):
        raise TypeError(
            f"{name} must not be sharded over ranks if one process writes it; found a DTensor. Gather it first."
        )
    return Chunk(name, tensor.detach())


def match_chunks(infos: Mapping[str, TensorInfo], stored: Iterable[Chunk]) -> dict[str, Chunks]:
    """Return the chunks of each tensor; raise `Malformed` unless they cover each of its elements exactly once.

    Nothing is allocated before the sizes agree.
    """
    chunks: dict[str, Chunks] = {name: {} for name in infos}
    for name, tensor, offset in stored:
        if name not in infos:
            raise Malformed(f"tensor {name!r}, which the state does not use")
        chunk = unpacked(tensor, infos[name].dtype)
        at = (0,) * chunk.dim() if offset is None else offset
        if at in chunks[name]:
            raise Malformed(f"a duplicate chunk of tensor {name!r}")
        chunks[name][at] = chunk
    for name, info in infos.items():
        _check_cover(info, chunks[name])
    return chunks


def _check_cover(info: TensorInfo, chunks: Chunks) -> None:
    for offset, chunk in chunks.items():
        inside = len(offset) == len(info.shape) == chunk.dim() and all(
            start + length <= size for start, length, size in zip(offset, chunk.shape, info.shape, strict=True)
        )
        if not inside:
            raise Malformed(
                f"a chunk of shape {list(chunk.shape)} that does not fit into tensor {info.name!r} of {info.dtype} and "
                f"shape {info.shape}"
            )
    count = sum(chunk.numel() for chunk in chunks.values())
    if count != math.prod(info.shape) or not chunks:
        raise Malformed(f"{count:,} stored numbers of tensor {info.name!r} in place of {math.prod(info.shape):,}")
    if len(chunks) == 1:
        return
    # Together the chunks have the size of the tensor, so they fill it if they do not overlap.
    filled = torch.zeros(info.shape, dtype=torch.bool)
    for offset, chunk in chunks.items():
        target = filled[tuple(slice(start, start + length) for start, length in zip(offset, chunk.shape, strict=True))]
        if target.any():
            raise Malformed(f"chunks of tensor {info.name!r} that overlap")
        target.fill_(True)


def assemble(info: TensorInfo, chunks: Chunks, device: torch.device) -> Tensor:
    """Return a tensor on `device`, copied from the chunks that cover it."""
    if len(chunks) == 1:
        [chunk] = chunks.values()
        return chunk.to(device, copy=True)
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    parts = [ChunkStorageMetadata(torch.Size(offset), chunk.shape) for offset, chunk in chunks.items()]
    stored = TensorStorageMetadata(TensorProperties(info.dtype), torch.Size(info.shape), parts)
    tensor = torch.empty(info.shape, dtype=info.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({info.name: tensor}, Metadata({info.name: stored}), is_coordinator=True)
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None  # set by ChunkStorageMetadata
        chunk = chunks[tuple(item.storage_index.offset)]
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        planner.resolve_tensor(item).copy_(chunk)
    return tensor.to(device)


# --- errors ----------------------------------------------------------------------------------------------------------


def corrupt(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file or directory whose content was changed."""
    content = str(error) if isinstance(error, Malformed) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{path} must contain exactly what was written to it; found {content}. It is corrupt: use an earlier "
        "checkpoint."
    )


def foreign(path: Path, content: str) -> CheckpointError:
    """Return the error for a file that is not part of a checkpoint."""
    return CheckpointError(
        f"{path} must be a checkpoint file written by samplewise; found {content}. It is not a checkpoint: pass "
        "another path."
    )


def _unreadable(path: Path, why: OSError) -> CheckpointError:
    return CheckpointError(f"{path} must be readable; found: {why}. Check its path and permissions.")
