"""Releases of a private run: what identifies them, the log that counts them, and the file of the secret.

    privacy.jsonl   one line per release, written and synced before the parameters change: a crash cannot hide one
    privacy.key     the key of draws and noise, readable by its owner only; removed when all updates are made
    privacy.lock    names the process that writes to the log

A release is the noisy sum of an update. It is identified by its index, the branch of the random streams, and a digest
of all bits. A resumed run repeats the updates after its checkpoint with the same draws and the same noise. If the
digest is the same, nothing new is released, and nothing is spent. If not, the difference of the two sums would not be
protected by noise: the update is refused, and later updates use another branch, with new draws and new noise, and are
counted again. The first line of the log has the inodes of log and directory: a copy of the directory gets a new key,
and so does a directory with a key but no log.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import atomic_write, other_version, sync_directory
from samplewise.errors import PrivacyError
from samplewise.privacy.rng import KEY_BYTES, Secret

VERSION = 2  # of the log; version 1, which has no number, has SHA-256 as digests
LOG_FILE = "privacy.jsonl"
KEY_FILE = "privacy.key"
PARTIAL_KEY_FILE = ".privacy.key.partial"
LOCK_FILE = "privacy.lock"

LANES = 2  # checksums with independent weights
CHUNK = 1 << 12  # words per chunk: the weights of a chunk stay in the cache of a processor
PIECE = 1 << 18  # words that are multiplied at once, in buffers of 6 MB


@dataclass(frozen=True)
class Release:
    """One noisy sum."""

    update: int
    branch: int
    key: str  # public id of the key
    digest: str


class ReleaseChecksum:
    """Keyed checksum of the bits of tensors, computed on their device in integers; 16 bytes are copied to the host.

    The bits of all tensors are one sequence of 32-bit words w, cut into chunks. Each of two lanes has secret, uniform
    64-bit weights a and b, and computes modulo 2^64

        c_j = (a_0 + Σ_i a_i · w_ji) >> 32    of each chunk j; two chunks that differ agree with probability 2^-32
        Σ_j b_j · c_j                         of all chunks; two sequences that differ agree with probability 2^-33

    (Lemire and Kaser 2014, "Strongly universal string hashing is fast"). Two sums that differ in one bit or more have
    the same checksum with probability (2^-32 + 2^-33)^2 < 2^-62. The weights are computed from the secret: a replay,
    also in another process, has the same ones.
    """

    def __init__(self, secret: Secret):
        self.secret = secret
        self._weights: dict[tuple[torch.device, int, int], Tensor] = {}
        self._buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def digest(self, tensors: Sequence[Tensor]) -> str:
        """Hash of the bits of tensors on any devices, of their sizes and of their order: 32 hexadecimal digits.

        It is a keyed hash of the checksums, because checksums of published sums would reveal the weights.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        by_device = groupby((tensor for tensor in tensors if tensor.numel()), lambda tensor: tensor.device)
        checksums = [self._checksum(group, device) for device, group in by_device]
        return self.secret.derive(f"release {sizes} {checksums}", 16).hex()

    def _checksum(self, tensors: Iterable[Tensor], device: torch.device) -> list[int]:
        """The sums over b_j · c_j of the two lanes."""
        if device not in self._buffers:  # kept: to allocate them in every update takes longer than to fill them
            products = torch.empty(PIECE // CHUNK, LANES, CHUNK, dtype=torch.int64, device=device)
            self._buffers[device] = (torch.empty(PIECE, dtype=torch.int64, device=device), products)
        buffer, products = self._buffers[device]
        weights = self._draw_weights(LANES, CHUNK + 1, device)
        sums = []
        filled = 0

        def add_chunks() -> None:
            buffer[filled:][: -filled % CHUNK] = 0  # only the last chunk of all is padded
            words = buffer[: filled + -filled % CHUNK].view(-1, 1, CHUNK)
            # Integers of torch wrap around on overflow: products and sums are modulo 2^64.
            sums.append(torch.mul(words, weights[:, 1:], out=products[: len(words)]).sum(2))

        for words in map(_as_words, tensors):
            while len(words):
                part = words[: PIECE - filled]
                buffer[filled : filled + len(part)] = part
                words = words[len(part) :]
                filled += len(part)
                if filled == PIECE:
                    add_chunks()
                    filled = 0
        if filled:
            add_chunks()
        chunk_sums = torch.cat(sums).add_(weights[:, 0])
        high_bits = chunk_sums >> 32  # the low ones depend on the low bits of words and weights only
        return high_bits.mul_(self._draw_weights(len(high_bits), LANES, device)).sum(0).tolist()

    def _draw_weights(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Uniform 64-bit integers, computed once; those of different shapes are independent."""
        key = (device, rows, columns)
        if key not in self._weights:
            seed = self.secret.derive(f"checksum weights {rows} {columns}", KEY_BYTES)
            content = bytearray(hashlib.shake_256(seed).digest(8 * rows * columns))
            self._weights[key] = torch.frombuffer(content, dtype=torch.int64).view(rows, columns).to(device)
        return self._weights[key]


def _as_words(tensor: Tensor) -> Tensor:
    """Bits of a tensor in row-major order as 32-bit words, padded with zeros; a view where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # not view(-1), which keeps any stride of a single element
    if flat.element_size() < 4:
        # Also for even sizes: the copy that F.pad makes is aligned, a part of a larger tensor may not be.
        flat = F.pad(flat, (0, -len(flat) % (4 // flat.element_size())))
    return flat.view(torch.int32)


class ReleaseLog:
    """All releases of a run. Without a directory, they are kept in memory only."""

    def __init__(self) -> None:
        self.releases: dict[tuple[str, int, int], str] = {}  # (key, branch, update) -> digest
        self.diverged: set[tuple[str, int]] = set()  # branches of which a replay has differed
        self._file: Any = None
        self._lock: DirectoryLock | None = None
        self._openings = 0  # by steps of one plan, which share the log
        self.inherits = False  # whether the log is that of this directory, so that its key is, too
        self._base = 0  # releases of an earlier process, known by their number only

    @property
    def count(self) -> int:
        """Number of releases that are spent."""
        return self._base + len(self.releases)

    def assume(self, count: int) -> None:
        """Count at least this many releases, for a state that was saved without a log."""
        self._base += max(0, count - self.count)

    def is_replay(self, release: Release) -> bool:
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
        if self._lock is not None:
            self._lock.verify()
        self._write(vars(release))  # first: if it fails, the release must not be known, so that it is written later
        self.releases[release.key, release.branch, release.update] = release.digest

    # --- files -----------------------------------------------------------------------------------------------------

    def open(self, directory: Path, settings: dict[str, Any]) -> None:
        """Read the log of a directory, if there is one, and append to it from now on. Holds the lock of the log until
        `close` was called as often as this.
        """
        if self._openings == 0:
            self._lock = _acquire_lock(directory)
            try:
                self._open(directory, settings)
            except BaseException:
                self._close()
                raise
        self._openings += 1

    def _open(self, directory: Path, settings: dict[str, Any]) -> None:
        before = dict(self.releases)
        path = directory / LOG_FILE
        lines = _read(path)
        if lines and lines[0].get("settings") != settings:
            first = lines[0].get("settings") or {}
            changes = ", ".join(f"{k}={v!r} after {first.get(k)!r}" for k, v in settings.items() if first.get(k) != v)
            raise PrivacyError(
                f"a run must be continued with the privacy settings it was started with; found {changes}. Use these, "
                "or start a new run directory."
            )
        logged: dict[tuple[str, int, int], str] = {}
        for line in lines[1:]:
            if "diverged" in line:
                self.diverged.add((line["key"], line["branch"]))
            else:
                logged[line["key"], line["branch"], line["update"]] = line["digest"]
        self.inherits = bool(lines) and lines[0].get("place", _place_of(path)) == _place_of(path)
        if not self.inherits:
            with atomic_write(path) as file:
                place = _place_of(Path(file.name))  # the inode stays when the file is renamed
                first_line = {"format_version": VERSION, "settings": settings, "place": place}
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in (first_line, *lines[1:])))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        for (key, branch, update), digest in before.items():
            if (key, branch, update) not in logged:  # made before the log was opened
                self._write(vars(Release(update, branch, key, digest)))
        self.releases.update(logged)
        sync_directory(directory)

    @property
    def is_open(self) -> bool:
        return self._openings > 0

    def close(self) -> None:
        self._openings = max(0, self._openings - 1)
        if self._openings == 0:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __del__(self) -> None:
        self._close()

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


def _place_of(path: Path) -> list[int]:
    """Numbers that differ between a log and its copies, and stay when its directory is moved in its file system."""
    return [path.parent.stat().st_ino, path.stat().st_ino]


def _acquire_lock(directory: Path) -> DirectoryLock:
    """Lock of the log: two steps that write to it would use the same noise for different sums."""
    lock = DirectoryLock(
        directory,
        LOCK_FILE,
        place="directory of a private run",
        user="private training",
        remedy="resume from the last checkpoint",
        error=PrivacyError,
    )
    try:
        lock.acquire()
    except PrivacyError:
        gc.collect()  # a step of this process that is no longer used may hold it
        lock.acquire()
    return lock


def _read(path: Path) -> list[dict[str, Any]]:
    """Lines of a log. The last one may be cut off by a crash: it is removed, its update was not made."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as why:
        raise PrivacyError(
            f"{path} must be a file that can be read; found: {why}. Restore it from a backup: without it the privacy "
            "of the run is unknown."
        ) from why
    complete, newline, rest = content.rpartition(b"\n")
    lines = [_parse(path, number, line) for number, line in enumerate(complete.split(b"\n"), 1)] if newline else []
    if lines and lines[0].get("format_version") != VERSION:
        raise PrivacyError(other_version(path, lines[0].get("format_version"), VERSION))
    digests: dict[tuple[str, int, int], str] = {}
    for line in lines[1:]:
        place = (line["key"], line["branch"], line.get("update", -1))
        if digests.setdefault(place, line.get("digest", "")) != line.get("digest", ""):
            raise PrivacyError(
                f"{path} must have one release for each draw of noise; found two sums for update {line['update']} with "
                f"branch {line['branch']} of the same key. Restore it from a backup: the difference of the two sums is "
                "not protected by noise."
            )
    if rest:
        os.truncate(path, len(complete) + len(newline))
    return lines


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    """Line of a log: the settings first, then releases and notes of divergence."""
    try:
        line = json.loads(text)
        reason = "another object"
    except (ValueError, RecursionError) as why:
        line = None
        reason = str(why)
    if number == 1:
        types: dict[str, type] = {"settings": dict}
    else:
        is_note = isinstance(line, dict) and "diverged" in line
        types = {"diverged": int} if is_note else {"update": int, "digest": str}
        types |= {"branch": int, "key": str}
    if not isinstance(line, dict) or any(
        type(line.get(name)) is not type_ or (type_ is int and line[name] < 0) for name, type_ in types.items()
    ):
        raise PrivacyError(
            f"{path} must have one JSON object per line, the settings of the run and then its releases; found {reason} "
            f"in line {number}, {text[:60]!r}. Restore it from a backup: without it the privacy of the run is unknown."
        )
    return line


def save_secret(directory: Path, secret: Secret) -> None:
    """Write the key of a run, readable by its owner only. A crash leaves a whole key or none."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / PARTIAL_KEY_FILE
    partial.unlink(missing_ok=True)  # the mode is that of a new file only
    with atomic_write(directory / KEY_FILE, partial, mode=0o600) as file:
        file.write(secret.bytes)


def load_secret(directory: Path) -> Secret | None:
    """Key of a run; None if there is none, for example because all of its updates are made."""
    path = directory / KEY_FILE
    try:
        return Secret(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as why:
        raise PrivacyError(
            f"{path} must be the key of the run, {KEY_BYTES} bytes; found: {why} Restore it from a backup, or remove "
            "it: draws and noise are then new, and updates that are repeated are counted twice."
        ) from why


def remove_secret(directory: Path) -> None:
    for name in (KEY_FILE, PARTIAL_KEY_FILE):
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
