"""Storage layer for torch.distributed.checkpoint without pickle: one checkpoint file for each rank.

torch's planners decide which rank writes which chunk of which tensor, and from which chunks a tensor is read. The state
in the file of a rank is {"chunks": [[name of the tensor, offset in each dimension, chunk], ...]}.

torch.distributed.checkpoint is slow to import, so this module is imported only when it is needed.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from samplewise.loop.checkpoint import file
from samplewise.loop.checkpoint.encoding import Malformed, sizes

Chunks = dict[str, dict[tuple[int, ...], Tensor]]  # tensor name -> offset of the chunk -> chunk
Shapes = dict[str, tuple[torch.dtype, list[int]]]  # tensor name -> dtype and shape


class ShardWriter(StorageWriter):
    """Writer of the chunks of one rank to the file `path`. After writing, `digest` is the checksum of the file."""

    def __init__(self, path: Path):
        self.path = path
        self.digest = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.digest = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        chunks = []
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and item.tensor_data is not None  # `save` is called with tensors only
            chunks.append([item.index.fqn, list(item.tensor_data.chunk.offsets), tensor.detach()])
            results.append(WriteResult(item.index, tensor.nbytes, None))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.digest = file.write(self.path, {"chunks": chunks}, snapshot=False)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the offset of each chunk is stored in its file."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(StorageReader):
    """Reader that passes chunks in memory to torch's planner."""

    def __init__(self, shapes: Shapes, chunks: Chunks):
        self._shapes = shapes
        self._chunks = chunks

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: self._described(name) for name in self._shapes})

    def _described(self, name: str) -> TensorStorageMetadata:
        dtype, shape = self._shapes[name]
        parts = [ChunkStorageMetadata(torch.Size(at), chunk.shape) for at, chunk in self._chunks[name].items()]
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), parts)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            assert item.storage_index.offset is not None  # set by `_described`
            chunk = self._chunks[item.storage_index.fqn][tuple(item.storage_index.offset)]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk)
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read(shapes: Shapes, chunks: Chunks) -> dict[str, Tensor]:
    """Assemble the named tensors from chunks; raise `Malformed` if the chunks do not fill them exactly."""
    for name, (dtype, shape) in shapes.items():
        _check_chunks(name, dtype, shape, chunks.get(name, {}))
    whole = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about loading without a process group
            load(whole, storage_reader=ShardReader(shapes, chunks), no_dist=True)
    except CheckpointException as why:  # a subclass of BaseException
        raise Malformed(f"chunks that torch cannot read: {why}") from why
    return whole


def chunks_in(states: list[Any]) -> Chunks:
    """Collect the chunks from the states in the files of all ranks."""
    found: Chunks = {}
    for state in states:
        if list(state) != ["chunks"] or type(state["chunks"]) is not list:
            raise Malformed("a state that is not a list of chunks")
        for entry in state["chunks"]:
            if type(entry) is not list or [type(part) for part in entry] != [str, list, Tensor]:
                raise Malformed("a chunk without name, offset and tensor")
            name, offset, tensor = entry
            of_name = found.setdefault(name, {})
            if tuple(sizes(offset)) in of_name:
                raise Malformed(f"a duplicate chunk of tensor {name!r}")
            of_name[tuple(offset)] = tensor
    return found


def _check_chunks(name: str, dtype: torch.dtype, shape: list[int], chunks: dict[tuple[int, ...], Tensor]) -> None:
    """Check that the chunks cover each element of the tensor once. Nothing is allocated before the sizes agree."""
    for offset, chunk in chunks.items():
        inside = len(offset) == len(shape) == chunk.dim() and all(
            start + length <= size for start, length, size in zip(offset, chunk.shape, shape, strict=True)
        )
        if chunk.dtype != dtype or not inside:
            raise Malformed(f"a chunk that does not fit into tensor {name!r} of {dtype} and shape {shape}")
    stored = sum(chunk.numel() for chunk in chunks.values())
    if stored != math.prod(shape) or not chunks:
        raise Malformed(f"{stored:,} stored numbers of tensor {name!r} in place of {math.prod(shape):,}")
    if len(chunks) > 1:
        _check_apart(name, shape, chunks)


def _check_apart(name: str, shape: list[int], chunks: dict[tuple[int, ...], Tensor]) -> None:
    """Check that chunks do not overlap. Together they have the size of the tensor, so they then fill it."""
    filled = torch.zeros(shape, dtype=torch.bool)
    for offset, chunk in chunks.items():
        place = filled[tuple(slice(start, start + length) for start, length in zip(offset, chunk.shape, strict=True))]
        if place.any():
            raise Malformed(f"chunks of tensor {name!r} that overlap")
        place.fill_(True)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
