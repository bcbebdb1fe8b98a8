"""A run that is killed again and again ends as one that never was: parameters, log, and the order of samples."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("killed.py")
TIMES = ("seconds", "samples_per_second")


def start(directory, pause=0.0):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), str(pause)], stderr=subprocess.PIPE, start_new_session=True
    )


def ended(directory):
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return log, torch.load(directory / "parameters.pt")


def assert_same(found, expected):
    (log, parameters), (right_log, right) = found, expected
    assert log == right_log
    assert all(torch.equal(a, b) for a, b in zip(parameters, right, strict=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    process = start(directory)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return ended(directory)


def test_every_sample_once_an_epoch(uninterrupted):
    log, _ = uninterrupted
    ids = [i for line in log if line["kind"] == "order" for i in line["ids"]]
    assert len(ids) == 200
    epochs = [ids[k : k + 50] for k in range(0, 200, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def killed_until_done(directory, kills, with_signal, longest):
    """Lets it live for a random while, so many times; then to the end."""
    wait = random.Random(kills)
    for _ in range(kills):
        process = start(directory, pause=0.05)
        time.sleep(wait.uniform(0.5, longest))
        process.send_signal(with_signal)
        process.communicate(timeout=60)
    process = start(directory)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def test_killed(uninterrupted, tmp_path):
    killed_until_done(tmp_path, 4, signal.SIGKILL, longest=6.0)
    assert_same(ended(tmp_path), uninterrupted)


@pytest.mark.slow
def test_killed_twenty_times(uninterrupted, tmp_path):
    killed_until_done(tmp_path, 22, signal.SIGKILL, longest=7.0)
    assert_same(ended(tmp_path), uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_leave(uninterrupted, tmp_path, number):
    killed_until_done(tmp_path, 2, number, longest=6.0)
    log, parameters = ended(tmp_path)
    log = [line for line in log if line["kind"] != "end" or line["reason"] == "4 epochs are done"]
    assert_same((log, parameters), uninterrupted)
