"""Chunks of tensors in a checkpoint: which rank writes which, and how tensors are assembled from them.

The planners of torch.distributed.checkpoint decide both. Its import takes about a second and 50 MB, so it is imported
only if there are several ranks to write, or a tensor to read that is stored in several chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from samplewise.loop.checkpoint.encoding import Malformed, TensorInfo
from samplewise.loop.checkpoint.format import Chunk, unpacked
from samplewise.parallel.group import current_group, on_rank_zero
from samplewise.parallel.sharded_parameters import is_dtensor

Offset = tuple[int, ...]  # in each dimension
Chunks = dict[Offset, Tensor]  # chunks of one tensor


def chunks_to_write(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Return the chunks that this rank writes. Collective.

    A tensor that several ranks have under the same name is written by one of them; of a sharded tensor (DTensor) each
    rank writes its shard.
    """
    if not current_group().distributed:
        return [_complete(name, tensor) for name, tensor in tensors.items()]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    group = current_group()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=group.rank == 0)
    local_plans = group.all_gather_object(planner.create_local_plan())
    plans = on_rank_zero(lambda: planner.create_global_plan(local_plans)[0])
    chunks = []
    for item in planner.finish_plan(plans[group.rank]).items:
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
