"""Lock of a directory, such as that of a run or of a store: one process writes to it at a time. Readers need no lock.

The lock is a file in the directory, JSON that names the process which holds it. It is created with O_EXCL, which is
atomic on local and on network file systems, and removed by `release`. A process that is killed leaves it behind. The
next process that acquires the lock then decides whether the holder is still alive:

    same machine      alive if the process with this id and start time exists and is not a zombie. "Same" means the
                      same host name, boot and pid namespace: process ids have no meaning in another container.
    another machine   the holder updates the file's modification time every HEARTBEAT seconds. If that time does not
                      change for LEASE seconds, the holder is dead. Both times are those of the file server, so clocks
                      need not agree.

A dead holder's lock is replaced by the process that has created `.<name of the lock>.takeover`, so that one of several
processes succeeds. A holder that was suspended for longer than the lease, and whose lock was taken over, finds out at
its next heartbeat or `verify` and stops with an error. No file stays open and no system lock is held, so a forked
worker process inherits nothing.

Why not `filelock`, which torch depends on (compared with version 4.2):

    FileLock        a lock of the operating system: not reliable on network file systems, and it does not name its
                    holder
    SoftFileLease   takes the lock from a suspended process of this machine after the lease, so that two processes
                    write; waits for the whole lease if the holder is a zombie; never takes over an empty lock file,
                    which a crash leaves. It exists since 3.30, while torch accepts any version.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from samplewise.core.text import notify_if_slow
from samplewise.errors import SamplewiseError

HEARTBEAT = 10.0  # seconds between two updates of the modification time
LEASE = 60.0  # seconds without a heartbeat after which a holder on another machine counts as dead
SETTLING = 1.0  # seconds after which a lock file that cannot be parsed counts as stale, not as being written
POLL = 0.1  # seconds between two reads of a lock file
ATTEMPTS = 100  # attempts to create the lock file while other processes create and remove it


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a lock, as written to the lock file."""

    host: str
    machine: str  # identifies the host, its boot and the pid namespace; "" if unknown
    pid: int
    started: str  # start time of the process in clock ticks since boot; "" if unknown
    since: str  # UTC
    token: str  # unique id of each acquisition

    @classmethod
    def this_process(cls) -> LockHolder:
        pid = os.getpid()
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(socket.gethostname(), _machine(), pid, _start_time(pid), since, uuid.uuid4().hex)

    @classmethod
    def parse(cls, content: bytes) -> LockHolder | None:
        """Return the holder in the content of a lock file; None if it cannot be parsed."""
        try:
            fields = json.loads(content)
            texts = (str(fields[name]) for name in ("host", "machine", "started", "since", "token"))
            host, machine, started, since, token = texts
            return cls(host, machine, int(fields["pid"]), started, since, token)
        except (ValueError, TypeError, LookupError):
            return None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        prefix = "this process, " if self.pid == os.getpid() and self.machine == _machine() else ""
        return f"{prefix}process {self.pid} on host {self.host!r}, since {self.since}"


@dataclass(frozen=True)
class LockFile:
    """Content and modification time of a lock file at one moment."""

    content: bytes
    modified: int  # ns

    @classmethod
    def read(cls, path: Path) -> LockFile | None:
        """Read a lock file; None if there is none. It is opened each time, so that network file systems fetch the
        current content.
        """
        try:
            with open(path, "rb") as file:
                return cls(file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return None


class DirectoryLock:
    """Exclusive right of this process to write to `directory`, from `acquire` to `release`, or in a `with` block.

    name: of the lock file in the directory
    place, user, remedy: words of the error messages: the kind of the directory, such as "run directory", what writes to
        it, such as "training", and what to do after the lock was lost, such as "resume from the last checkpoint"
    error: class of the errors
    """

    def __init__(self, directory: Path, name: str, *, place: str, user: str, remedy: str, error: type[SamplewiseError]):
        self._directory = directory
        self._path = directory / name
        self._place = place
        self._user = user
        self._remedy = remedy
        self._error = error
        self._identity: LockHolder | None = None
        self.is_lost = False  # a heartbeat has found that the lock file no longer names this process
        self._released = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self) -> None:
        """Create the lock file; raise an error that names the holder if another process holds it."""
        identity = LockHolder.this_process()
        _held.add(identity.token)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._claim(identity)
        except BaseException as why:
            _held.discard(identity.token)
            if not isinstance(why, OSError):
                raise
            raise self._error(
                f"{self._directory} must be a directory that can be written to; found: {why}. "
                "Use another directory, or fix its permissions."
            ) from why
        self._identity = identity
        self.is_lost = False
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"samplewise {self._path.name}", daemon=True)
        self._heart.start()

    def verify(self) -> None:
        """Read the lock file, and raise an error if it no longer names this process."""
        if self._identity is None:
            return
        self._touch(self._identity)
        if self.is_lost:
            raise self._error(
                f"a {self._user} must hold the lock of its {self._place} until it ends; found that {self._path} no "
                f"longer names process {os.getpid()}, so another {self._user} may have written to the directory. "
                f"Nothing more was written. Make sure that no other {self._user} uses the directory, then "
                f"{self._remedy}."
            )

    def release(self) -> None:
        """Remove the lock file if this process holds it. May be called twice, and without `acquire`."""
        identity = self._identity
        if identity is None or identity.pid != os.getpid():  # in a forked child
            return
        self._identity = None
        self._released.set()
        if self._heart is not None:
            self._heart.join()
        _held.discard(identity.token)
        with suppress(OSError):  # a file that stays is taken over later, as that of a dead process
            current = LockFile.read(self._path)
            if current is not None and LockHolder.parse(current.content) == identity:
                self._path.unlink()

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    # --- acquiring -------------------------------------------------------------------------------------------------

    def _claim(self, identity: LockHolder) -> None:
        for _ in range(ATTEMPTS):
            if _create(self._path, identity.encode()):
                return
            current = LockFile.read(self._path)
            if current is None:  # released in the meantime
                time.sleep(POLL)
                continue
            holder = LockHolder.parse(current.content)
            if self._is_held(current, holder):
                raise self._error(
                    f"a {self._place} must be used by one {self._user} at a time; found that {self._directory} is in "
                    f"use by {holder}. Wait until that {self._user} has ended or stop it, or choose another directory."
                )
            if self._take_over(current, identity):
                return
        raise FileExistsError(f"{self._path} can be neither read as a lock file nor created")

    def _is_held(self, current: LockFile, holder: LockHolder | None) -> bool:
        if holder is None:
            self._shows_life(current, SETTLING)
            return False
        alive = _is_alive(holder)
        if alive is not None:
            return alive
        remaining = LEASE - (_now(self._path) - current.modified) / 1e9
        notice = f"waiting up to {LEASE:.0f} s for a heartbeat of {holder}, which holds {self._path}"
        with notify_if_slow(lambda line: print(line, file=sys.stderr, flush=True), notice):
            return self._shows_life(current, min(remaining, LEASE))

    def _shows_life(self, before: LockFile, seconds: float) -> bool:
        """Return True if the holder updates the modification time within `seconds`.

        Returns False early if the file is removed or its content changes.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(POLL)
            now = LockFile.read(self._path)
            if now is None or now.content != before.content:
                return False
            if now.modified != before.modified:
                return True
        return False

    def _take_over(self, stale: LockFile, identity: LockHolder) -> bool:
        """Replace a dead holder's lock, if it is still there and no other process is doing so."""
        guard = self._path.with_name(f".{self._path.name}.takeover")
        if not _create(guard, b""):
            takeover = LockFile.read(guard)
            if takeover is not None and _now(self._path) - takeover.modified > LEASE * 1e9:  # its process was killed
                guard.unlink(missing_ok=True)
            time.sleep(POLL)
            return False
        try:
            now = LockFile.read(self._path)
            if now is None or now.content != stale.content:
                return False
            guard.write_bytes(identity.encode())
            os.replace(guard, self._path)
            return True
        finally:
            guard.unlink(missing_ok=True)

    # --- holding ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        identity = self._identity
        while identity is not None and not self._released.wait(HEARTBEAT):
            self._touch(identity)

    def _touch(self, identity: LockHolder) -> None:
        try:
            current = LockFile.read(self._path)
            if current is None or LockHolder.parse(current.content) != identity:
                self.is_lost = True
            else:
                os.utime(self._path)  # without a time argument, so that the clock of the file server is used
        except OSError:  # the file server does not answer: the next heartbeat tries again
            pass


_held: set[str] = set()  # tokens of the locks of this process


def _create(path: Path, content: bytes) -> bool:
    """Create a file with O_EXCL and return True; return False if it exists."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def _now(path: Path) -> int:
    """Return the time of the file server that has the lock file `path`, in nanoseconds."""
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    probe.touch()
    try:
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)


# --- processes -------------------------------------------------------------------------------------------------------


def _is_alive(holder: LockHolder) -> bool | None:
    """Return True if the holder's process exists; None if this machine cannot decide it."""
    if not holder.machine or not holder.started or holder.machine != _machine():
        return None
    if holder.pid == os.getpid() and holder.started == _start_time(holder.pid):
        return holder.token in _held  # False: this process has replaced itself (exec) while it held the lock
    started = _start_time(holder.pid)
    if started:
        return started == holder.started
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # exists, but belongs to a user whose processes are hidden
        return None
    return False  # a zombie


def _machine() -> str:
    """Return host name, boot id and pid namespace; "" if there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot.

    "" if the process does not exist or is a zombie, or if there is no /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state = fields[0]
    start = fields[19]
    return "" if state in "ZX" else start
