"""Spending of a private run: the log of its releases, and the file of its secret.

    privacy.jsonl   one line per release, written and synced before the parameters change: a crash cannot hide one
    privacy.key     the key of draws and noise, readable by its owner only; removed when all updates are made

A release is the noisy sum of an update. It is identified by its index, the branch of the random streams, and a hash. A
resumed run repeats the updates after its checkpoint with the same draws and the same noise. If the hash is the same,
nothing new is released, and nothing is spent. If not, the difference of the two sums would not be protected by noise:
the update is refused, and later updates use another branch, with new draws and new noise, and are counted again.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samplewise.core.atomic_io import sync_directory
from samplewise.errors import PrivacyError
from samplewise.privacy.streams import Secret

LOG_FILE = "privacy.jsonl"
KEY_FILE = "privacy.key"


@dataclass(frozen=True)
class Release:
    """One noisy sum."""

    update: int
    branch: int
    key: str  # public id of the key
    digest: str


class Spending:
    """All releases of a run. Without a directory, they are kept in memory only."""

    def __init__(self) -> None:
        self.releases: dict[tuple[str, int, int], str] = {}  # (key, branch, update) -> digest
        self.diverged: set[tuple[str, int]] = set()  # branches of which a replay has differed
        self._file: Any = None
        self._base = 0  # releases of an earlier process, known by their number only

    @property
    def count(self) -> int:
        """Number of releases that are spent."""
        return self._base + len(self.releases)

    def assume(self, count: int) -> None:
        """Count at least this many releases, for a state that was saved without a log."""
        self._base += max(0, count - self.count)

    def known(self, release: Release) -> bool:
        """True if this update has a release already; raises if that one differs."""
        place = (release.key, release.branch, release.update)
        digest = self.releases.get(place)
        if digest is not None and digest != release.digest:
            self.diverged.add(place[:2])
            self._write({"diverged": release.update, "branch": release.branch, "key": release.key})
            raise PrivacyError(
                f"update {release.update} must be repeated exactly, because its noise was used before; found another "
                "sum of gradients, as with another number of ranks or threads. Nothing was released. Continue, or "
                "resume again: draws and noise are then new, and the repeated updates are counted twice."
            )
        return digest is not None

    def add(self, release: Release) -> None:
        """Record a release, on disk before this returns."""
        self._write(vars(release))  # first: if it fails, the release must not be known, so that it is written later
        self.releases[release.key, release.branch, release.update] = release.digest

    # --- files -----------------------------------------------------------------------------------------------------

    def open(self, directory: Path, settings: dict[str, Any]) -> None:
        """Read the log of a directory, if there is one, and append to it from now on."""
        path = directory / LOG_FILE
        lines = _read(path)
        if lines and lines[0].get("settings") != settings:
            before = lines[0].get("settings") or {}
            found = ", ".join(f"{k}={v!r} after {before.get(k)!r}" for k, v in settings.items() if before.get(k) != v)
            raise PrivacyError(
                f"a run must be continued with the privacy settings it was started with; found {found}. Use these, or "
                "start a new run directory."
            )
        for line in lines[1:]:
            if "diverged" in line:
                self.diverged.add((line["key"], line["branch"]))
            else:
                self.releases[line["key"], line["branch"], line["update"]] = line["digest"]
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if not lines:
            self._write({"settings": settings})
        sync_directory(directory)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        text = json.dumps(line).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, f"a line of {LOG_FILE} was written in part")
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)  # the next line must not follow a part of this one
            raise


def _read(path: Path) -> list[dict[str, Any]]:
    """Lines of a log. The last one may be cut off by a crash: it is removed, its update was not made."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, newline, rest = content.rpartition(b"\n")
    if rest:
        os.truncate(path, len(whole) + len(newline))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as why:
        raise PrivacyError(
            f"{path} must have one JSON object per line; found {why}. Restore it from a backup: without it the privacy "
            "of the run is unknown."
        ) from why


def save_secret(directory: Path, secret: Secret) -> None:
    """Write the key of a run, readable by its owner only."""
    path = directory / KEY_FILE
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.chmod(path, 0o600)  # an existing file keeps its mode otherwise
    with open(descriptor, "wb") as file:
        file.write(secret.bytes)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def load_secret(directory: Path) -> Secret | None:
    """Key of a run; None if there is none, for example because all of its updates are made."""
    try:
        return Secret((directory / KEY_FILE).read_bytes())
    except FileNotFoundError:
        return None


def remove_secret(directory: Path) -> None:
    (directory / KEY_FILE).unlink(missing_ok=True)
    sync_directory(directory)
