"""One training at a time writes to a run directory; a dead process's lock is no obstacle."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import forks
import pytest
import torch
from notices import wait_for_notices
from small import loader, log, make, parameters

import samplewise as sw
from samplewise.core import directory_lock
from samplewise.core.directory_lock import DirectoryLock, LockHolder
from samplewise.errors import CheckpointError
from samplewise.loop.run_dir import run_lock

SCRIPT = Path(__file__).with_name("holding.py")
IN_USE = "a run directory must be used by one training at a time; found that .* is in use by "


@contextlib.contextmanager
def training(run, workers=0):
    """Another process that trains in `run` and has made its first update."""
    run.mkdir(exist_ok=True)
    process = forks.Popen([sys.executable, str(SCRIPT), str(run), str(workers)], start_new_session=True)
    try:
        while not (run / "training").exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        forks.kill(process)
        process.wait()


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def locked_by(run, **changes):
    """Writes the lock of another process, which is this one with some changes."""
    run.mkdir(exist_ok=True)
    holder = dataclasses.replace(LockHolder.this_process(), **changes)
    (run / "run.lock").write_bytes(holder.encode())
    return holder


def age(run, seconds):
    then = time.time() - seconds
    os.utime(run / "run.lock", (then, then))


def free(run):
    return not list(run.glob("*run.lock*"))


def trains(run):
    make(run).fit(loader(), epochs=1)
    assert free(run)
    return log(run)[-1]["kind"] == "end"


# --- another process -------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_changes_nothing(tmp_path):
    with training(tmp_path) as process:
        before = contents(tmp_path)
        trainer = make(tmp_path)
        start = parameters(trainer).clone()
        for resume in (False, True):
            with pytest.raises(CheckpointError, match=IN_USE) as refused:
                trainer.fit(loader(), epochs=1, resume=resume)
        assert f"by process {process.pid} on host {socket.gethostname()!r}, since 2" in str(refused.value)
        assert str(refused.value).endswith("stop it, or choose another directory.")
        assert contents(tmp_path) == before and torch.equal(parameters(trainer), start)
        (tmp_path / "go").touch()
        assert process.wait(timeout=120) == 0
    assert free(tmp_path)
    assert make(tmp_path).fit(loader(), epochs=2, resume=True).reason == "2 epochs are done"


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("reaped", [True, False])
def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path, reaped):
    """Also while the process is a zombie, and with workers that were forked from it."""
    with training(tmp_path, workers=2) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie
        if reaped:
            process.wait()
        assert (tmp_path / "run.lock").exists()
        assert trains(tmp_path)


def test_a_suspended_process_keeps_its_lock(tmp_path, hasty):
    """On the same machine it is known to exist, however long its heartbeat is overdue."""
    with training(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        age(tmp_path, 3600)
        with pytest.raises(CheckpointError, match=f"{IN_USE}process {process.pid} "):
            make(tmp_path).fit(loader(), epochs=1)
        os.kill(process.pid, signal.SIGCONT)


def test_readers_need_no_lock(tmp_path):
    pytest.importorskip("pyarrow")
    from samplewise.report.page import write_report

    indexed = torch.utils.data.DataLoader(sw.Indexed(loader().dataset), batch_size=10)
    trainer = make(tmp_path, [sw.Ledger(columns={"label": 1})])
    trainer.fit(indexed, epochs=1)
    holder = locked_by(tmp_path)
    directory_lock._held.add(holder.token)
    before = (tmp_path / "run.lock").read_bytes()
    assert len(sw.read_ledger(tmp_path)) == 30
    assert write_report(tmp_path).exists()
    assert trainer.evaluate(loader())["loss"] > 0
    assert len(trainer.predict(loader())) == 30
    assert (tmp_path / "run.lock").read_bytes() == before
    directory_lock._held.discard(holder.token)


# --- a lock that was left behind -------------------------------------------------------------------------------------


def test_the_lock_of_a_process_that_is_gone(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    locked_by(tmp_path, pid=ended.pid)
    assert trains(tmp_path)


def test_a_process_id_that_is_used_again(tmp_path):
    locked_by(tmp_path, pid=os.getppid(), started="1")
    assert trains(tmp_path)


def test_a_process_that_has_replaced_itself(tmp_path):
    """exec keeps the process id and the start time."""
    locked_by(tmp_path)
    assert trains(tmp_path)


def test_a_process_id_that_no_system_has(tmp_path):
    locked_by(tmp_path, pid=2**70)
    assert trains(tmp_path)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\x00", b'{"pid": 1}', b'{"pid": "x"}'])
def test_a_damaged_lock_file_is_no_lock(tmp_path, monkeypatch, content):
    monkeypatch.setattr(directory_lock, "SETTLING", 0.2)
    (tmp_path / "run.lock").write_bytes(content)
    assert trains(tmp_path)


def test_a_lock_file_that_is_just_being_written(tmp_path, monkeypatch):
    """It was created, and its content comes a moment later."""
    monkeypatch.setattr(directory_lock, "SETTLING", 60.0)  # this machine may be busy; the content ends the wait
    (tmp_path / "run.lock").touch()
    holder = dataclasses.replace(
        LockHolder.this_process(), pid=os.getppid(), started=directory_lock._start_time(os.getppid())
    )
    writer = threading.Timer(0.2, (tmp_path / "run.lock").write_bytes, [holder.encode()])
    writer.start()
    with pytest.raises(CheckpointError, match=f"{IN_USE}process {os.getppid()} "):
        make(tmp_path).fit(loader(), epochs=1)
    writer.join()


# --- another machine -------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(directory_lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(directory_lock, "LEASE", 0.3)


ELSEWHERE = [
    {"host": "other", "machine": "other boot pid:[1]"},  # another host
    {"machine": f"{socket.gethostname()} boot pid:[1]"},  # another boot, or container, of the same name
    {"machine": "", "started": ""},  # a system without /proc
]


@pytest.mark.parametrize("changes", ELSEWHERE)
def test_a_live_process_elsewhere(tmp_path, hasty, monkeypatch, changes):
    monkeypatch.setattr(directory_lock, "LEASE", 60.0)  # this machine may be busy; the first heartbeat ends the wait
    holder = locked_by(tmp_path, pid=2**22, **changes)
    other = run_lock(tmp_path)
    other._identity = holder
    heart = threading.Thread(target=other._beat)
    heart.start()
    try:
        with pytest.raises(CheckpointError, match=f"{IN_USE}process {2**22} on host {holder.host!r}"):
            make(tmp_path).fit(loader(), epochs=1)
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    finally:
        other._released.set()
        heart.join()


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("changes", ELSEWHERE)
@pytest.mark.parametrize("seconds", [0, 3600, -3600])
def test_a_dead_process_elsewhere(tmp_path, hasty, changes, seconds):
    """Also if it died a moment ago, and if its clock was an hour ahead. Its process id may exist here."""
    locked_by(tmp_path, pid=os.getppid(), **changes)
    age(tmp_path, seconds)
    assert trains(tmp_path)


def test_waiting_for_a_sign_of_life_is_announced(tmp_path, hasty, monkeypatch, capfd):
    shows_life = DirectoryLock._shows_life
    monkeypatch.setattr(DirectoryLock, "_shows_life", lambda *given: wait_for_notices() or shows_life(*given))
    monkeypatch.setattr("samplewise.core.text.PATIENCE", 0.0)
    monkeypatch.setattr(directory_lock, "LEASE", 1.0)
    locked_by(tmp_path, host="other", machine="other")
    assert trains(tmp_path)
    assert "waiting up to 1 s for a heartbeat of process" in capfd.readouterr().err


# --- this process ----------------------------------------------------------------------------------------------------


def test_one_fit_after_another(tmp_path):
    trainer = make(tmp_path)
    for epochs in (1, 2):
        trainer.fit(loader(), epochs=epochs)
        assert free(tmp_path)
    make(tmp_path).fit(loader(), epochs=3, resume=True)
    assert free(tmp_path)


def test_two_trainers_at_once(tmp_path):
    said = []

    class Second:
        def on_update(self):
            assert (tmp_path / "run.lock").exists()
            with pytest.raises(CheckpointError, match=IN_USE) as refused:
                make(tmp_path).fit(loader(), epochs=1, resume=True)
            said.append(str(refused.value))

    assert make(tmp_path, [Second()]).fit(loader(), epochs=1).reason == "1 epoch is done"
    assert len(said) == 3 and all(f"in use by this process, process {os.getpid()} on" in message for message in said)
    assert [line["kind"] for line in log(tmp_path)].count("end") == 1


def test_one_of_many_processes_takes_over_a_dead_lock(tmp_path):
    for _ in range(20):
        locked_by(tmp_path, pid=os.getppid(), started="1")
        locks, got = [run_lock(tmp_path) for _ in range(8)], []
        start = threading.Barrier(len(locks))

        def acquire(lock, start=start, got=got):
            start.wait()
            with contextlib.suppress(CheckpointError):
                lock.acquire()
                got.append(lock)

        threads = [threading.Thread(target=acquire, args=[lock]) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        got[0].verify()
        got[0].release()
        assert free(tmp_path)


def test_a_takeover_that_was_killed_in_the_middle(tmp_path, hasty):
    locked_by(tmp_path, pid=os.getppid(), started="1")
    (tmp_path / ".run.lock.takeover").touch()
    assert trains(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_holds_nor_releases_it(tmp_path):
    lock = run_lock(tmp_path)
    lock.acquire()
    child = os.fork()
    if not child:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    lock.verify()
    lock.release()
    lock.release()
    assert free(tmp_path)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_it_is_released_when_training_fails(tmp_path, error):
    class Fails:
        def on_update(self):
            raise error

    with pytest.raises(type(error)):
        make(tmp_path, [Fails()]).fit(loader(), epochs=1)
    assert free(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_released_after_a_signal(tmp_path, number):
    class Signalled:
        def on_update(self):
            os.kill(os.getpid(), number)

    assert make(tmp_path, [Signalled()]).fit(loader(), epochs=1).signal == number.name
    assert free(tmp_path)


def test_it_is_released_when_something_cannot_be_closed(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    monkeypatch.setattr("samplewise.loop.data.loader.ResumableLoader.close", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(loader(), epochs=1)
    assert free(tmp_path)


def test_a_rehearsal_needs_no_lock(tmp_path):
    locked_by(tmp_path, pid=os.getppid(), started=directory_lock._start_time(os.getppid()))
    make(tmp_path).fit(loader(), epochs=1, fast_dev_run=True)
    with pytest.raises(CheckpointError, match=IN_USE):
        make(tmp_path).fit(loader(), epochs=1)


# --- a lock that is lost ---------------------------------------------------------------------------------------------

LOST = "must hold the lock of its run directory until it ends; found that .*run.lock no longer names process"


@pytest.mark.parametrize("other", [b'{"pid": 1}', None])
def test_a_lost_lock_ends_the_training_before_a_checkpoint(tmp_path, other):
    """As if this process had been suspended, and another one had taken over."""

    class Loses:
        def on_update(self):
            (tmp_path / "run.lock").unlink(missing_ok=True)
            if other is not None:
                (tmp_path / "run.lock").write_bytes(other)

    with pytest.raises(CheckpointError, match=LOST):
        make(tmp_path, [Loses()]).fit(loader(), epochs=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert (tmp_path / "run.lock").exists() == (other is not None)  # the other one's is left alone


def test_a_lost_lock_ends_the_training_before_a_line_of_the_log(tmp_path, hasty):
    class Loses:
        def on_update(self, trainer):
            (tmp_path / "run.lock").unlink(missing_ok=True)
            while not trainer._files._lock.is_lost:  # until the next heartbeat
                time.sleep(0.01)

    with pytest.raises(CheckpointError, match=LOST):
        make(tmp_path, [Loses()], log_every="1up").fit(loader(), epochs=1)
    assert {line["update"] for line in log(tmp_path)} == {1}  # written before the lock was lost


def test_a_file_server_that_does_not_answer_for_a_while(tmp_path, hasty, monkeypatch):
    lock = run_lock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", lambda path: (_ for _ in ()).throw(OSError("stale file handle")))
        lock.verify()
    lock.verify()
    lock.release()
    assert free(tmp_path)


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch, error):
    real = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("run.lock"):
            raise error
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=f"must be a directory that can be written to; found: .*{error.strerror}"):
        make(tmp_path).fit(loader(), epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(
        LockHolder, "encode", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        make(tmp_path).fit(loader(), epochs=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["directory", "link to nothing"])
def test_something_else_of_that_name(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(directory_lock, "POLL", 0.0)
    path = tmp_path / "run.lock"
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"must be a directory that can be written to; found: .*run\.lock"):
        make(tmp_path).fit(loader(), epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
