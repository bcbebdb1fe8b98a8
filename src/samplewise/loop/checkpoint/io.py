"""Writing and reading of a checkpoint directory, by one process or by several ranks.

A checkpoint is written to a temporary directory, synced to disk and renamed. A directory cannot replace another one in
a rename, so an existing checkpoint of the same name is first renamed to a hidden name, and removed at the end. `read`
uses the hidden one if there is none of the final name, so that the old or the new checkpoint can be read at any time.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from samplewise.core.files import require_safetensors, sha256, sync_directory
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint.encoding import Encoder, decode, replace_infos, to_json, type_name
from samplewise.loop.checkpoint.format import (
    MODEL_FILE,
    MODEL_PREFIX,
    PARSE_ERRORS,
    Chunk,
    assemble,
    check_length,
    chunks_to_write,
    corrupt,
    match_chunks,
    read_shard,
    read_state,
    shard_file,
    write_shard,
    write_state,
)
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.parallel.sharded_parameters import is_dtensor

PARTIAL = ".partial"  # suffix of a checkpoint that is being written or removed
REPLACED = ".replaced"  # suffix of a checkpoint while another one of the same name takes its place
SHARED = ("model", "optimizer", "loss")  # entries of a state whose tensors are the same, or sharded, on all ranks
PER_RANK = "per_rank"  # entry of a state that is a list with one item from each rank
CLOSE_TIMEOUT = 30.0  # seconds that `BackgroundWriter.close` waits for a save

Gather = Callable[[Any], list[Any]]  # all_gather_object


# --- writing ---------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """Content of the files that this rank writes."""

    state: str  # encoded state as text
    shards: dict[str, list[Chunk]]  # by file name

    def copied(self) -> Prepared:
        """Return the content with copies of the tensors on the CPU."""
        shards = {
            file: [chunk._replace(tensor=chunk.tensor.to("cpu", copy=True)) for chunk in chunks]
            for file, chunks in self.shards.items()
        }
        return self._replace(shards=shards)


def write(path: Path, state: dict[Any, Any], rank_state: Any = None) -> None:
    """Write a checkpoint to the directory `path` atomically. Collective.

    state: nested dicts (keys str or int), lists and tuples of tensors, numbers, text, bytes and None. Types are
    preserved, except that subclasses of float (such as NumPy's, which schedulers return) are read as float. Tensors
    that share memory are read as separate tensors. With several ranks, the entries "model", "optimizer" and "loss" must
    be the same on all ranks, except that tensors may be sharded; other entries are those of rank 0.
    rank_state: that of this rank; `read` returns those of all ranks as a list, in the entry "per_rank". None: no such
    entry.
    """
    _write_files(path, prepare(state, rank_state), collectives.all_gather_object)


def check(state: dict[Any, Any]) -> None:
    """Raise the error that `write` would raise for the content of a state, without copying or writing."""
    require_safetensors()
    Encoder().encode(state)


def prepare(state: dict[Any, Any], rank_state: Any = None) -> Prepared:
    """Encode a state and assign its tensors to ranks. Collective. The tensors are not copied."""
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict; found {type_name(state)}.")
    require_safetensors()  # not needed for writing, but without it the checkpoint could not be read
    encoder = Encoder()
    encoded, encoded_rank_state = on_every_rank(
        lambda: (
            encoder.encode(state),
            encoder.encode(rank_state, (PER_RANK, collectives.rank())),
        )  # names contain the rank
    )
    [items] = encoded.values()
    # Tensors for model.safetensors: those of the model, unless some are sharded over ranks.
    inside = [name for name, path in encoder.paths.items() if path[0] == "model" and len(path) > 1]
    model = {name: encoder.tensors[name] for name in inside}
    if any(map(is_dtensor, model.values())):
        model = {}
    shared = [*[item for item in items if item[0] in SHARED], sorted(model)]
    if not collectives.all_equal(sha256([to_json(shared)])):
        raise CheckpointError(
            "model, optimizer and loss must have state dicts of the same structure on all ranks, since each rank "
            "saves a part; found that they differ. Construct them identically on every rank. To shard the state of "
            "an optimizer, use parallel='fsdp'."
        )
    if rank_state is not None:
        items.append([PER_RANK, collectives.all_gather_object(encoded_rank_state)])
    text = to_json(encoded)
    on_every_rank(lambda: check_length(text))
    offered = (*SHARED, PER_RANK) if collectives.rank() else (*state, PER_RANK)
    tensors = {n: t for n, t in encoder.tensors.items() if n not in model and encoder.paths[n][0] in offered}
    shards = {shard_file(collectives.rank()): chunks_to_write(tensors)}
    if model and collectives.rank() == 0:
        chunks = [Chunk(name.removeprefix(MODEL_PREFIX), tensor.detach()) for name, tensor in model.items()]
        shards = {MODEL_FILE: chunks, **shards}
    return Prepared(text, shards)


def _write_files(path: Path, prepared: Prepared, gather: Gather, then: Callable[[], None] | None = None) -> None:
    """Write the shards of all ranks, then state.json, and rename the directory. Collective.

    then: called on rank 0 when the checkpoint is on disk.
    """
    rank = collectives.rank()
    partial = hidden(path, PARTIAL)

    def create() -> None:
        remove(partial)
        partial.mkdir()

    def write_shards() -> list[dict[str, Any]]:
        partial.mkdir(exist_ok=True)  # makes a directory of another machine visible on network file systems
        return [write_shard(partial / file, chunks) for file, chunks in prepared.shards.items()]

    def finish() -> None:
        for shard in shards:
            if not (partial / shard["file"]).exists():
                raise CheckpointError(
                    f"all ranks must see the same run directory; found that rank 0 does not see {shard['file']} in "
                    f"{partial.parent}. Use a directory on a shared file system."
                )
        write_state(partial, prepared.state, shards)
        sync_directory(partial)
        _replace(partial, path)
        if then is not None:
            then()

    def nothing() -> None:
        pass

    try:
        _call_on_ranks(create if rank == 0 else nothing, path, gather)
        shards = [entry for entries in _call_on_ranks(write_shards, path, gather) for entry in entries]
        _call_on_ranks(finish if rank == 0 else nothing, path, gather)
    except BaseException:
        if rank == 0:
            with suppress(OSError):
                remove(partial)
        raise


def _call_on_ranks(call: Callable[[], Any], path: Path, gather: Gather) -> list[Any]:
    """Call a function on each rank and return the results of all; raise on all ranks if one fails. Collective."""
    result = None
    error: Exception | None = None
    try:
        result = call()
    except Exception as why:
        error = why
    results = gather((result, None if error is None else _message(error, path)))
    messages = [message for _, message in results if message is not None]
    if messages:
        raise CheckpointError(messages[0]) from error
    return [result for result, _ in results]


def _message(error: Exception, path: Path) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    rank = f" on rank {collectives.rank()}" if collectives.size() > 1 else ""
    return (
        f"a checkpoint could not be written to {path}: {type(error).__name__}{rank}: {str(error).rstrip('.')}. Free "
        "disk space or fix the permissions, then save again. An existing checkpoint at this path is unchanged."
    )


def _replace(new: Path, path: Path) -> None:
    """Rename the directory `new` to `path`, and remove what was at `path` before."""
    replaced = hidden(path, REPLACED)
    if os.path.lexists(path):
        remove(replaced)
        os.rename(path, replaced)
    os.rename(new, path)
    sync_directory(path.parent)
    with suppress(OSError):  # removed with the next checkpoint
        remove(replaced)


class BackgroundWriter:
    """Writer of checkpoints of several ranks, in a thread. A new save first waits for the previous one."""

    def __init__(self) -> None:
        # A separate process group, so that collectives of a save cannot mix with those of the training.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, path: Path, state: dict[Any, Any], rank_state: Any, then: Callable[[], None]) -> None:
        """Copy a state to the CPU and start to write it: see `write`. Collective.

        then: called on rank 0 when the checkpoint is on disk.
        """
        self.wait()
        prepared = prepare(state, rank_state).copied()

        def run() -> None:
            try:
                _write_files(path, prepared, self._gather, then)
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="samplewise checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current save is on disk on all ranks; raise CheckpointError if it failed. Collective."""
        if self._thread is None:
            return
        self._thread.join()
        error = self._error
        self._thread = None
        self._error = None
        on_every_rank(lambda: _raise(error))

    def finish(self) -> None:
        """Wait for the current save and destroy the process group with its threads. Collective."""
        self.wait()
        dist.destroy_process_group(self._group)

    def close(self) -> None:
        """After an error: wait up to 30 s for the current save. It may never end if another rank is dead."""
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
            self._thread = None
            self._error = None

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * collectives.size()
        dist.all_gather_object(values, value, group=self._group)
        return values


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """Return the state in a checkpoint, with its tensors on `device`.

    A checkpoint contains no code, so one from an untrusted source cannot run anything.
    """
    return _read(Path(path), torch.device(device), rank=0, size=1, select=None)


def read_for_rank(path: Path) -> dict[Any, Any]:
    """Return the state in a checkpoint for this rank, with its tensors on the CPU. To be called on all ranks.

    Each rank verifies the checksums of some of the files. Of the entry "per_rank" each rank gets its own item, or the
    first one if there were fewer ranks; the others are None.
    """
    return _read(Path(path), torch.device("cpu"), collectives.rank(), collectives.size(), select=collectives.rank())


def _read(path: Path, device: torch.device, rank: int, size: int, select: int | None) -> dict[Any, Any]:
    """Read a checkpoint as rank `rank` of `size`. select: item of "per_rank" to read, the others are None (the
    first if there is no such item); None for all."""
    require_safetensors()
    path = readable(path)
    encoded, shards = read_state(path)
    stored = [chunk for k, entry in enumerate(shards) for chunk in read_shard(path, entry, verify=k % size == rank)]
    try:
        state, infos = decode(encoded)
        chunks = match_chunks(infos, stored)
        if select is not None and isinstance(state.get(PER_RANK), list):
            items = state[PER_RANK]
            selected = select if select < len(items) else 0
            state[PER_RANK] = [item if k == selected else None for k, item in enumerate(items)]
        return replace_infos(state, lambda info: assemble(info, chunks[info.name], device))
    except PARSE_ERRORS as why:
        raise corrupt(path, why) from why


def readable(path: Path) -> Path:
    """Return the path; or that of the checkpoint that was to be replaced, if the process was killed meanwhile."""
    replaced = hidden(path, REPLACED)
    return replaced if not os.path.lexists(path) and replaced.is_dir() else path


# --- names and removal -----------------------------------------------------------------------------------------------


def hidden(path: Path, suffix: str) -> Path:
    """Return the temporary name of a checkpoint with the suffix PARTIAL or REPLACED."""
    return path.with_name(f".{path.name}{suffix}")


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (not its target) or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first: if the process is killed, no damaged checkpoint is left."""
    partial = hidden(path, PARTIAL)
    remove(partial)
    if os.path.lexists(path):
        os.rename(path, partial)
    remove(partial)
    remove(hidden(path, REPLACED))
