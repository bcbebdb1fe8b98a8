"""Copy of a run directory in an object store: `sw.callbacks.Upload` and `sw.download_run`.

A run directory needs renames, appends, a lock and fsync. An object store has none of them: it replaces whole objects.
So training uses a local directory, whose files are copied below a URL after each checkpoint, under the same names:

    upload.json     id of the run, and of the `fit` that writes to the store; written when `fit` starts
    *.ckpt/         state.json is written after the other files of a checkpoint and removed before them: a checkpoint
                    that has it is complete
    other files     written before the checkpoint: the log and the ledger may be longer than the checkpoint needs, and
                    are cut when it is resumed

A process that is killed at any moment leaves a store from which another one can continue.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from samplewise.core.files import absolute, atomic_write, other_version, write_bytes
from samplewise.core.state import RandomState
from samplewise.core.text import plural
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop.checkpoint.directory import FOLDER, NAME
from samplewise.loop.checkpoint.format import STATE_FILE, read_shard, read_state
from samplewise.loop.checkpoint.io import PARTIAL, hidden, remove

MARKER = "upload.json"
VERSION = 1  # "format_version" in that file
CHUNK = 1 << 20  # bytes that are copied at once
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")


class UploadFailed(CheckpointError):
    """A store cannot be reached, read or written; the next attempt may succeed."""


class Store:
    """Files below a URL, by their paths relative to it. Hidden ones do not count."""

    def __init__(self, url: str, options: Mapping[str, Any]):
        if not isinstance(url, str) or not URL.fullmatch(url):
            raise ValueError(f"url must be a URL such as 's3://bucket/runs/name'; found {url!r}.")
        self.url = url.rstrip("/")
        try:
            url_to_fs = import_module("fsspec.core").url_to_fs
            # An instance of its own, because a transaction belongs to the instance.
            self._files, self._root = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as why:
            raise ImportError(
                f"{url} needs a package that is not installed ({str(why).rstrip('.')}): pip install "
                "'samplewise[remote]' for s3://, gcsfs for gs://, adlfs for az://"
            ) from None
        self._is_local = "file" in self._files.protocol

    def sizes(self) -> dict[str, int]:
        """Sizes of all files in bytes, by name."""
        listing = self._files.find(self._root, detail=True)
        sizes = {path[len(self._root) + 1 :]: int(about["size"]) for path, about in listing.items()}
        return {name: size for name, size in sizes.items() if _is_visible(name)}

    def read(self, name: str) -> bytes:
        return self._files.cat_file(f"{self._root}/{name}")

    def write(self, name: str, source: Path, size: int) -> None:
        """Replace a file by the first `size` bytes of a local one: readers see the old file or the new one."""
        target = f"{self._root}/{name}"
        if self._is_local:  # transactions of fsspec are not atomic between two file systems, such as /tmp and this one
            folder, _, last = target.rpartition("/")
            partial = f"{folder}/.{last}{PARTIAL}"
            self._files.makedirs(folder, exist_ok=True)
            self._copy(source, size, partial)
            os.replace(partial, target)
        else:
            with self._files.transaction:  # without it, an error would store what was written until then
                self._copy(source, size, target)

    def _copy(self, source: Path, size: int, target: str) -> None:
        with open(source, "rb") as content, self._files.open(target, "wb") as file:
            while data := content.read(min(size, CHUNK)):
                file.write(data)
                size -= len(data)

    def fetch(self, name: str, path: Path) -> None:
        """Write a file to a local path atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._files.open(f"{self._root}/{name}", "rb") as content, atomic_write(path) as file:
            shutil.copyfileobj(content, file, CHUNK)

    def remove_checkpoint(self, folder: str, names: Iterable[str]) -> None:
        """Remove a checkpoint of the store, which has the files `names`. It is incomplete from the beginning on."""
        files = {name for name in names if _folder(name) == folder}
        if (state := f"{folder}/{STATE_FILE}") in files:
            self._files.rm_file(f"{self._root}/{state}")
        if files - {state}:
            self._files.rm(f"{self._root}/{folder}", recursive=True)


class Mirror:
    """Copy of one run directory in a store. Used on rank 0 only: `is_ahead`, `start`, then `send`."""

    def __init__(self, url: str, options: Mapping[str, Any]):
        self.store = Store(url, options)
        self._marker = b""
        self._sent: dict[str, tuple[int, ...]] = {}  # size, time and inode of local files that are in the store

    def is_ahead(self, directory: Path, newest: int, resume: bool) -> bool:
        """True if the run in the store has a newer checkpoint than the local one. Raises CheckpointError if the store
        must not be written to.

        newest: number of updates of the newest local checkpoint; -1 without one
        """
        with self._explained("be accessible when fit starts"):
            names = self.store.sizes()
            run = None  # also if a run has started there, but uploaded nothing
            if len(names) > 1 and MARKER in names:
                run = _run_id(self.store.read(MARKER), self.store.url)
        if run is None and set(names) - {MARKER}:
            raise CheckpointError(
                f"the store of a new run must be empty; found {plural(len(names), 'file')} of another kind in "
                f"{self.store.url}. Use another URL."
            )
        if run is not None and not resume:
            raise CheckpointError(
                f"the store of a new run must be empty; found a run in {self.store.url}. Use Trainer(..., "
                "exists='resume') to continue that run, or another URL."
            )
        marker = directory / MARKER
        local = _run_id(marker.read_bytes(), marker) if marker.exists() else None
        if run is not None and newest >= 0 and run != local:
            raise CheckpointError(
                f"a run directory and its store must have the same run; found different ones in {directory} and "
                f"{self.store.url}. Use another URL, or an empty run directory to continue the run in the store."
            )
        about = {"format_version": VERSION, "run": run or uuid.uuid4().hex, "writer": uuid.uuid4().hex}
        self._marker = json.dumps(about).encode()
        return max(map(_update, _complete(names)), default=-1) > newest

    def start(self, directory: Path, fetch: bool) -> None:
        """Become the writer of the store. `fetch`: copy the run from there to the directory."""
        self._sent = {}
        # The local one first: if the process is killed in between, a local run is not taken for another one.
        write_bytes(directory / MARKER, self._marker)
        with self._explained("be writable when fit starts"):
            self._send_file(directory, MARKER, {})
        if fetch:
            self.fetch(directory)

    def fetch(self, directory: Path) -> None:
        """Copy the run from the store to a directory. The newest checkpoint comes last: without it, or if the process
        is killed before, the store is still ahead.
        """
        with self._explained("be readable"):
            names = self.store.sizes()  # before the log is read, which then has all lines of these checkpoints
            for name in names:
                if not _folder(name):
                    self.store.fetch(name, directory / name)
                    self._sent[name] = _signature(directory / name)
            folders = sorted(_complete(names), key=_update)
            intact = {folder: self._fetch_checkpoint(directory, folder, names) for folder in folders}
        checkpoints = [is_intact for folder, is_intact in intact.items() if _update(folder) >= 0]
        if checkpoints and not any(checkpoints):
            raise CheckpointError(
                f"a run in a store must have a readable checkpoint; found none among {len(checkpoints)} in "
                f"{self.store.url}. Restore one from a backup, or start a new run with another URL."
            )

    def _fetch_checkpoint(self, directory: Path, folder: str, names: Iterable[str]) -> bool:
        """Copy a checkpoint and compare it with its checksums; False with a warning if it is damaged."""
        path = directory / folder
        partial = hidden(path, PARTIAL)
        remove(partial)
        for name in names:
            if _folder(name) == folder:
                self.store.fetch(name, partial / PurePosixPath(name).name)
        try:
            for shard in read_state(partial)[1]:
                read_shard(partial, shard)
        except CheckpointError as why:
            warnings.warn(f"{why} It is left out.", CheckpointWarning, stacklevel=2)
            remove(partial)
            return False
        os.rename(partial, path)
        return True

    def send(self, directory: Path, last: bool = False) -> None:
        """Copy what is new in the run directory to the store. If that fails, warn and let the next call repeat it.

        last: raise CheckpointError in place of the warning
        """
        try:
            with self._explained("be writable"):
                self._send(directory)
        except UploadFailed as why:
            if last:
                raise UploadFailed(f"{why} {directory} is complete: the next fit(resume=True) uploads it.") from why
            text = f"{why} Training goes on; the next checkpoint is uploaded with all that is missing now."
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def _send(self, directory: Path) -> None:
        if self.store.read(MARKER) != self._marker:
            raise CheckpointError(
                f"a run must be continued by one process at a time; found that another one has started to write to "
                f"{self.store.url}, so this one stops. Resume when the other one has ended."
            )
        sizes = self.store.sizes()
        names = list(_local_names(directory))
        folders = sorted(_complete(names), key=_update, reverse=True)
        gone = {_folder(name) for name in sizes} - {"", *folders}

        # A damaged checkpoint that was left out may be ahead of the local ones: it would not fit to the log below.
        newest = max(map(_update, folders), default=-1)
        ahead = {folder for folder in gone if _update(folder) > newest >= 0}
        for folder in sorted(ahead):
            self.store.remove_checkpoint(folder, sizes)

        for name in names:
            if not _folder(name):
                self._send_file(directory, name, sizes)

        # state.json has the checksums of the other files: if it is the same, the checkpoint is in the store.
        for folder in folders:
            files = [name for name in names if _folder(name) == folder]
            state = f"{folder}/{STATE_FILE}"
            same_sizes = all(sizes.get(name) == _signature(directory / name)[0] for name in files)
            if not (same_sizes and self.store.read(state) == (directory / state).read_bytes()):
                self.store.remove_checkpoint(folder, sizes)
                for name in sorted(files, key=lambda name: name == state):
                    self.store.write(name, directory / name, _signature(directory / name)[0])

        # At the end, because until now they were the only complete checkpoints, if earlier uploads have failed.
        for folder in sorted(gone - ahead if newest >= 0 else ()):
            self.store.remove_checkpoint(folder, sizes)

    def _send_file(self, directory: Path, name: str, sizes: Mapping[str, int]) -> None:
        """Copy a file, unless it is in the store with its size and was not changed since."""
        signature = _signature(directory / name)
        if self._sent.get(name) != signature or sizes.get(name) != signature[0]:
            self.store.write(name, directory / name, signature[0])
            self._sent[name] = signature

    @contextmanager
    def _explained(self, need: str) -> Iterator[None]:
        """Raise CheckpointError for any error of the store, and restore the random generators.

        Libraries of stores draw from Python's generator, for the pause before they try again.
        """
        generators = RandomState()
        try:
            yield
        except CheckpointError:
            raise
        except Exception as why:
            text = str(why).rstrip(".") or "no message"
            raise UploadFailed(
                f"the store of a run must {need}; found {type(why).__name__} at {self.store.url}: {text}. Check the "
                "URL, the credentials and the network."
            ) from why
        finally:
            generators.restore()


def download_run(url: str, directory: str | Path, **options: Any) -> Path:
    """Copy a run that `sw.callbacks.Upload` has uploaded to a local directory, and return its path.

        run = sw.download_run("s3://bucket/runs/digits", "runs/digits")
        sw.load_checkpoint(run), sw.read_ledger(run)

    url: of the run, as passed to `Upload`; for a run that is still being trained, the result is its newest checkpoint.
    directory: must be empty or not exist.
    options: of the file system of fsspec, as for `Upload`.

    Checkpoints are compared with their checksums.
    """
    mirror = Mirror(url, options)
    path = absolute(directory)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"a run must be downloaded to an empty directory; found {path}. Choose another one.")
    with mirror._explained("be readable"):
        is_run = MARKER in mirror.store.sizes()
    if not is_run:
        raise CheckpointError(
            f"url must be that of a run that sw.callbacks.Upload has uploaded; found no {MARKER} in {url}. Check the "
            "URL."
        )
    mirror.fetch(path)
    return path


# --- names and files -------------------------------------------------------------------------------------------------


def _is_visible(name: str) -> bool:
    """True for a relative path without hidden parts, which therefore does not lead out of its directory."""
    leads_out = os.name == "nt" and any(character in name for character in "\\:")
    return not leads_out and all(part[:1] not in (".", "") for part in name.split("/"))


def _folder(name: str) -> str:
    """Directory of a checkpoint or a saved model that a file is in; "" for other files."""
    folder = name.rpartition("/")[0]
    return folder if folder.endswith(".ckpt") else ""


def _complete(names: Iterable[str]) -> list[str]:
    """Checkpoints and saved models that have a state.json."""
    return [_folder(name) for name in names if _folder(name) and name.endswith(f"/{STATE_FILE}")]


def _update(folder: str) -> int:
    """Number of updates in the name of a checkpoint; -1 for a saved model."""
    parent, _, last = folder.rpartition("/")
    match = NAME.fullmatch(last)
    return int(match[1]) if match and parent == FOLDER else -1


def _local_names(directory: Path) -> Iterator[str]:
    """Names of finished files: temporary ones are hidden."""
    for path, folders, files in os.walk(directory):
        folders[:] = sorted(folder for folder in folders if _is_visible(folder))
        for file in sorted(files):
            if _is_visible(file) and not file.endswith(".lock") and (Path(path) / file).is_file():
                yield (Path(path) / file).relative_to(directory).as_posix()


def _signature(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino


def _run_id(content: bytes, place: object) -> str:
    """Id of the run in the content of an upload.json."""
    about = None
    with suppress(ValueError):
        about = json.loads(content)
    version = about.get("format_version") if isinstance(about, dict) else None
    if not isinstance(about, dict) or version != VERSION:
        raise CheckpointError(other_version(f"{MARKER} in {place}", version, VERSION))
    return str(about.get("run"))
