"""A run that is killed again and again ends as one that never was: parameters, log, and the order of samples."""

import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path

import forks
import pytest
import torch

SCRIPT = Path(__file__).with_name("killed.py")
TIMES = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")
LOADERS = ["stateful", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "compiled"))]


@contextlib.contextmanager
def running(directory, loader, pause=0.0, kill=-1):
    directory.mkdir(exist_ok=True)
    with open(directory / "errors.txt", "wb") as errors:
        command = [sys.executable, str(SCRIPT), str(directory), loader, str(pause), str(kill)]
        process = forks.Popen(command, stderr=errors, start_new_session=True)
    try:
        yield process
    finally:
        forks.kill(process)  # and its workers, which would end by themselves later
        process.wait()


def to_the_end(directory, loader):
    with running(directory, loader) as process:
        assert process.wait(timeout=600) == 0, (directory / "errors.txt").read_text()


def ended(directory):
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    # On a busy machine, a note says how long loading takes.
    lines = [line for line in lines if not line.get("text", "").startswith("Loading takes")]
    log = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return log, torch.load(directory / "parameters.pt")


def assert_same(found, expected):
    (log, parameters), (right_log, right) = found, expected
    assert log == right_log
    assert all(torch.equal(a, b) for a, b in zip(parameters, right, strict=True))


@pytest.fixture(scope="module", params=LOADERS)
def uninterrupted(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    to_the_end(directory, request.param)
    return request.param, ended(directory)


def test_metrics_are_evaluated_in_mid_epoch_and_at_its_end(uninterrupted):
    log, _ = uninterrupted[1]
    for kind, times in (("middle", 8), ("validation", 4)):
        lines = [line for line in log if line["kind"] == kind]
        assert len(lines) == times and all("accuracy" in line for line in lines)


@pytest.mark.parametrize("uninterrupted", [LOADERS[1], "stateful"], indirect=True)  # compiled code notes no samples
def test_every_sample_once_an_epoch(uninterrupted):
    log, _ = uninterrupted[1]
    ids = [i for line in log if line["kind"] == "order" for i in line["ids"]]
    assert len(ids) == 200
    epochs = [ids[k : k + 50] for k in range(0, 200, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def started(directory, before):
    path = directory / "run.json"
    return path.exists() and path.stat().st_mtime_ns != before


def live_for_a_while(process, directory, wait):
    """Mostly until some moment of the training; now and then not even so long."""
    path = directory / "run.json"
    before = path.stat().st_mtime_ns if path.exists() else None
    if wait.random() < 0.2:
        time.sleep(wait.uniform(0.0, 1.0))
        return
    while not started(directory, before) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(wait.uniform(0.0, 1.0))


def interrupted_until_done(directory, loader, signals, pause):
    wait = random.Random(len(signals))
    interrupted = 0
    for number in signals:
        with running(directory, loader, pause) as process:
            live_for_a_while(process, directory, wait)
            if process.poll() is not None:  # the rest was done before the signal, because this process was stalled
                assert process.returncode == 0, (directory / "errors.txt").read_text()
                break
            process.send_signal(number)
            process.wait(timeout=600)
            interrupted += 1
    assert interrupted
    to_the_end(directory, loader)


def test_killed(uninterrupted, tmp_path):
    """In the first and in the third of four epochs, so that the last process has done much less than one that was not
    killed: fewer validations, metrics, hooks and other models.
    """
    loader, expected = uninterrupted
    for update in (4, 15):
        with running(tmp_path, loader, kill=update) as process:
            assert process.wait(timeout=600) == -signal.SIGKILL, (tmp_path / "errors.txt").read_text()
    to_the_end(tmp_path, loader)
    assert_same(ended(tmp_path), expected)


@pytest.mark.slow
def test_killed_at_any_moment(uninterrupted, tmp_path):
    loader, expected = uninterrupted
    interrupted_until_done(tmp_path, loader, [signal.SIGKILL] * 2, pause=0.2)
    assert_same(ended(tmp_path), expected)


@pytest.mark.slow
def test_killed_twenty_times(uninterrupted, tmp_path):
    loader, expected = uninterrupted
    interrupted_until_done(tmp_path, loader, [signal.SIGKILL] * 22, pause=0.4)
    assert_same(ended(tmp_path), expected)


@pytest.mark.slow
def test_asked_to_leave(uninterrupted, tmp_path):
    loader, expected = uninterrupted
    interrupted_until_done(tmp_path, loader, [signal.SIGTERM, signal.SIGINT], pause=0.3)
    log, parameters = ended(tmp_path)
    log = [line for line in log if line["kind"] != "end" or line["reason"] == "4 epochs are done"]
    assert_same((log, parameters), expected)
