"""Checkpoint of several ranks: a directory that all ranks write with torch.distributed.checkpoint.

    update-000000010.ckpt/
        state.ckpt                  everything except the tensors of model, optimizer and loss; and the checksums of
                                    the other files
        rank-0.ckpt, rank-1.ckpt    a part of these tensors, written by one rank; and its part of an open window

Each file has the format of a checkpoint file of one process: see `file`. The directory is written under a temporary
name, in the background while the training continues, and renamed by rank 0 when all ranks are done.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from samplewise.core.atomic_io import sync_directory
from samplewise.distributed.group import current_group, on_every_rank, on_rank_zero
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint import file
from samplewise.loop.checkpoint.encoding import Malformed, decode, encode, tensors_in
from samplewise.loop.checkpoint.schema import LIST, TENSOR, TEXT, Schema, check, maybe

VERSION = 2  # version 1 was the format of torch, which contains a pickle
STATE = "state.ckpt"
CONTENT: Schema = {"shards": [TEXT], "large": TEXT, "owns": maybe(LIST), "rest": TEXT, "small": [TENSOR]}
LARGE = ("model", "optimizer", "loss")
OWN = "own"  # key of the state that differs between ranks
PATIENCE = 30.0  # seconds that `close` waits for a save


class Saver:
    """Background writer of checkpoints. A new save first waits for the previous one."""

    def __init__(self) -> None:
        # A separate process group, so that collectives of a save cannot mix with those of the training.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(self, path: Path, state: dict[str, Any], then: Callable[[], None]) -> None:
        """Copy a state and start writing it to the directory `path`. Collective.

        state: the same on all ranks, except for state["own"].
        then: called on rank 0 when the checkpoint is on disk.
        """
        self.wait()
        rest, small = on_every_rank(lambda: encode({name: state[name] for name in state if name not in (*LARGE, OWN)}))
        text, tensors = encode({name: state[name] for name in LARGE if name in state})
        if not current_group().all_equal(hashlib.sha256(text.encode()).digest()):
            raise CheckpointError(
                "model, optimizer and loss must have state dicts of the same structure on all ranks, since each rank "
                "saves a part; found that they differ. Construct them identically on every rank. To shard the state of "
                "an optimizer, use strategy='fsdp'."
            )
        copies = {str(k): _copy(tensor) for k, tensor in enumerate(tensors)}
        owns = None
        if OWN in state:
            own, parts = on_every_rank(lambda: encode(state[OWN]))
            owns = current_group().all_gather_object(own)
            copies |= {_own_name(str(k)): _copy(tensor) for k, tensor in enumerate(parts)}
        texts = {"version": VERSION, "large": text, "owns": owns, "rest": rest, "small": [_copy(t) for t in small]}
        aside = path.with_name(f".{path.name}{file.PARTIAL}")
        on_rank_zero(lambda: _make_way(aside))

        def write() -> None:
            try:
                self._write(aside, path, texts, copies, then)
            except BaseException as problem:  # raised by `wait`
                self._problem = problem

        self._thread = threading.Thread(target=write, name="samplewise checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current save is on disk on all ranks; raise CheckpointError if it failed. Collective."""
        if self._thread is None:
            return
        self._thread.join()
        problem = self._problem
        self._thread = None
        self._problem = None
        on_every_rank(lambda: _raise(problem))

    def finish(self) -> None:
        """Wait for the current save and destroy the process group with its threads. Collective."""
        self.wait()
        dist.destroy_process_group(self._group)

    def close(self) -> None:
        """After an error: wait up to 30 s for the current save. It may never end if another rank is dead."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            self._thread = self._problem = None

    def _write(
        self, aside: Path, path: Path, texts: dict[str, Any], tensors: dict[str, Tensor], then: Callable[[], None]
    ) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        from samplewise.loop.checkpoint.shards import ShardWriter

        writer = ShardWriter(aside / _shard(current_group().rank))
        save(tensors, storage_writer=writer, process_group=self._group)
        digests = self._each(lambda: writer.digest)

        def finish() -> None:
            file.write(aside / STATE, {**texts, "shards": digests}, snapshot=False)
            file.remove(path)  # a checkpoint of the same update, which this one replaces
            os.replace(aside, path)
            sync_directory(path.parent)
            then()

        self._each(finish if current_group().rank == 0 else lambda: None)

    def _each(self, call: Callable[[], Any]) -> list[Any]:
        """Call a function on each rank and return the results of all; raise on all ranks if one fails. Collective."""
        found = None
        problem = None
        try:
            found = call()
        except Exception as error:
            problem = f"{type(error).__name__} on rank {current_group().rank}: {error}"
        everyones: list[Any] = [None] * current_group().size
        dist.all_gather_object(everyones, (found, problem), group=self._group)
        for _, told in everyones:
            if told is not None:
                raise CheckpointError(told)
        return [one for one, _ in everyones]


def read(path: Path) -> dict[str, Any]:
    """Return the complete state in a directory, on one process or on each of several ranks."""
    try:
        return _read(path)
    except (Malformed, *file.MALFORMED) as why:
        raise file.corrupt(path, str(why)) from why


def _read(path: Path) -> dict[str, Any]:
    from samplewise.loop.checkpoint import shards

    about = _described(path)
    own = None
    if about["owns"] is not None and len(about["owns"]) == current_group().size:
        own = about["owns"][current_group().rank]
    large = tensors_in(about["large"])
    mine = {} if own is None else tensors_in(own)
    shapes = large | {_own_name(name): shape for name, shape in mine.items()}
    tensors = shards.read(shapes, shards.chunks_in(_shards(path, about["shards"])))
    state = decode(about["rest"], dict(zip(map(str, range(len(about["small"]))), about["small"], strict=True)))
    state |= decode(about["large"], {name: tensors[name] for name in large})
    if about["owns"] is not None:
        state["owners"] = len(about["owns"])
    if own is not None:
        state[OWN] = decode(own, {name: tensors[_own_name(name)] for name in mine})
    return state


def _described(path: Path) -> dict[str, Any]:
    """Read and check state.ckpt, as written by `Saver.save`."""
    if not (path / STATE).exists() and (path / ".metadata").exists():
        raise _other_version(path, 1)
    about = file.read(path / STATE)
    if about.get("version") != VERSION:
        raise _other_version(path, about.get("version"))
    check(about, CONTENT)
    check(about["owns"] or [], [TEXT], "owns")
    return about


def _other_version(path: Path, version: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a checkpoint of several ranks in format {VERSION}; found format {version!r}, written by "
        "another version of samplewise. Resume with that version, or start a new run directory."
    )


def _shards(path: Path, digests: list[str]) -> list[dict[Any, Any]]:
    """Return the states in the files of all ranks. Each rank verifies the checksums of some of the files."""
    states = []
    for rank, digest in enumerate(digests):
        state, found = file.mapped(path / _shard(rank), verify=rank % current_group().size == current_group().rank)
        if found != digest:
            raise file.corrupt(path / _shard(rank), "another checksum")
        states.append(state)
    return states


def _shard(rank: int) -> str:
    return f"rank-{rank}.ckpt"


def _own_name(name: str) -> str:
    """Name of a tensor of this rank's own state."""
    return f"{current_group().rank}/{name}"


def _make_way(directory: Path) -> None:
    """Create an empty directory; remove an existing one."""
    file.remove(directory)
    directory.mkdir(parents=True)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, since the training continues to change it."""
    return tensor.detach().to("cpu", copy=True)


def _raise(problem: BaseException | None) -> None:
    if problem is not None:
        raise CheckpointError(
            f"all ranks must write their part of a checkpoint; found: {_told(problem).rstrip('.')}. Free disk space or "
            "fix the permissions, then resume: earlier checkpoints are intact."
        ) from problem


def _told(problem: BaseException) -> str:
    """Return the errors of all ranks without the tracebacks that torch's CheckpointException includes."""
    failures = getattr(problem, "failures", {})
    told = [f"{type(error).__name__} on rank {rank}: {error}" for rank, (error, _) in failures.items()]
    return "; ".join(told) or str(problem)
