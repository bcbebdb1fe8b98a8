"""Checkpoints of several ranks: a folder that all of them write, with torch.distributed.checkpoint.

    update-000000010.ckpt/
        rest.ckpt                                   all but large tensors, in the format of one process
        .metadata, __0_0.distcp, __1_0.distcp, ...  the tensors of model, optimizer and loss, of which each rank has
                                                    written some; and its own of an open window

`rest.ckpt` says where each of those tensors belongs and what the bytes of all files sum up to. The folder is written
beside its place and renamed by rank 0 when all are done, while the training goes on. Reading it takes `.metadata`,
which is a pickle of torch's: do not read a folder from a stranger.

Torch's module takes long to import: that is done when it is needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samplewise import ranks
from samplewise.errors import CheckpointError
from samplewise.files import sync_directory
from samplewise.loop import store
from samplewise.loop.distributed import by_all, by_first

REST = "rest.ckpt"
LARGE = ("model", "optimizer", "loss")
OWN = "own"  # what each rank has for itself
PATIENCE = 30.0  # seconds


class Saver:
    """Saves one state at a time. Whoever asks for the next waits for the last."""

    def __init__(self) -> None:
        # A group of its own: what a save has to say must not get between what the training says.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(self, path: Path, state: dict[str, Any], then: Callable[[], None]) -> None:
        """Begins to write a state, of which all ranks have the same but for their own, to a folder. `then` is called by
        rank 0.
        """
        self.wait()
        rest = {name: part for name, part in state.items() if name not in (*LARGE, OWN)}
        text, tensors = store.encoded({name: state[name] for name in LARGE if name in state})
        if not ranks.same(hashlib.sha256(text.encode()).digest()):
            raise CheckpointError(
                "model, optimizer and loss must have states of the same form on all ranks, of which each saves a part; "
                "found that they differ. Make them alike on every rank; for an optimizer that divides its state among "
                "them, use strategy='fsdp'."
            )
        copies = {str(k): _copy(tensor) for k, tensor in enumerate(tensors)}
        if OWN in state:
            own, parts = by_all(lambda: store.encoded(state[OWN]))
            rest["owns"] = ranks.everyone(own)
            copies |= {_own_name(k): _copy(tensor) for k, tensor in enumerate(parts)}
        aside = path.with_name(f".{path.name}{store.PARTIAL}")
        by_first(lambda: _make_way(aside))

        def write() -> None:
            try:
                self._write(aside, path, {**rest, "large": text}, copies, then)
            except BaseException as problem:  # told by `wait`
                self._problem = problem

        self._thread = threading.Thread(target=write, name="samplewise checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is on disk, on all ranks. Raises what has kept it from getting there."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, problem, self._problem = None, self._problem, None
        by_all(lambda: _raise(problem))

    def finish(self) -> None:
        """When all is on disk, the group is given back, with its threads."""
        self.wait()
        dist.destroy_process_group(self._group)

    def close(self) -> None:
        """After an error: what was begun gets some time, but a rank that is gone is not waited for."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            self._thread = self._problem = None

    def _write(
        self, aside: Path, path: Path, rest: dict[str, Any], tensors: dict[str, Tensor], then: Callable[[], None]
    ) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(tensors, storage_writer=FileSystemWriter(aside), process_group=self._group)
        sums = self._each(lambda: _sums(aside.glob(f"__{ranks.rank()}_*")))

        def finish() -> None:
            files = {name: found for one in sums for name, found in one.items()} | _sums([aside / ".metadata"])
            store.write(aside / REST, {**rest, "files": files})
            _make_way(path, make=False)  # an older one of that number: this one is as good
            os.replace(aside, path)
            sync_directory(path.parent)
            then()

        self._each(finish if ranks.rank() == 0 else lambda: None)

    def _each(self, call: Callable[[], Any]) -> list[Any]:
        """What each rank gets from its call; an error of one is everybody's."""
        found, problem = None, None
        try:
            found = call()
        except Exception as error:
            problem = f"{type(error).__name__} on rank {ranks.rank()}: {error}"
        everyones: list[Any] = [None] * ranks.size()
        dist.all_gather_object(everyones, (found, problem), group=self._group)
        for _, told in everyones:
            if told is not None:
                raise CheckpointError(told)
        return [one for one, _ in everyones]


def read(path: Path) -> dict[str, Any]:
    """The state in a folder, whole, in one process or in each of several."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = store.read(path / REST)
    _check(path, state.pop("files"))
    text, owns = state.pop("large"), state.pop("owns", None)
    own = owns[ranks.rank()] if owns is not None and len(owns) == ranks.size() else None
    large, mine = _room(text, str), {} if own is None else _room(own, _own_name)
    tensors = large | mine
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is for this process alone
            load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as why:
        raise CheckpointError(f"{path} must be a checkpoint that torch can read; found: {why}") from why
    state |= store.decoded(text, [tensors[name] for name in large])
    if owns is not None:
        state["owners"] = len(owns)
    if own is not None:
        state[OWN] = store.decoded(own, [tensors[name] for name in mine])
    return state


def _room(text: str, name: Callable[[int], str]) -> dict[str, Tensor]:
    """For the tensors of an encoded state."""
    return {name(k): torch.empty(shape, dtype=dtype) for k, (dtype, shape) in enumerate(store.tensors_in(text))}


def _own_name(number: int) -> str:
    return f"{ranks.rank()}/{number}"


def _check(path: Path, files: dict[str, str]) -> None:
    """Each rank looks at some of the files."""
    own = sorted(files)[ranks.rank() :: ranks.size()]
    there = [path / name for name in own if (path / name).exists()]
    found = _sums(there)
    for name in own:
        if found.get(name) != files[name]:
            what = "another checksum" if name in found else "nothing"
            raise CheckpointError(
                f"{path / name} must hold what was once written to it; found {what}. It is corrupt: use an earlier "
                "checkpoint."
            )


def _sums(files: Any) -> dict[str, str]:
    found = {}
    for path in files:
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _make_way(folder: Path, make: bool = True) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    if make:
        folder.mkdir(parents=True)


def _copy(tensor: Tensor) -> Tensor:
    """As it is now: the training goes on."""
    return tensor.detach().to("cpu", copy=True)


def _raise(problem: BaseException | None) -> None:
    if problem is not None:
        raise CheckpointError(
            f"a checkpoint must be written by all ranks, which failed: {_told(problem).rstrip('.')}. Free some space "
            "or see to the permissions, and resume: the checkpoints before it are whole."
        ) from problem


def _told(problem: BaseException) -> str:
    """Torch's own tells of each rank's error, with all that it was called by."""
    failures = getattr(problem, "failures", {})
    told = [f"{type(error).__name__} on rank {rank}: {error}" for rank, (error, _) in failures.items()]
    return "; ".join(told) or str(problem)
