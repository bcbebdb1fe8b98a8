"""Runs with random settings that are killed at random moments end with the bits of an uninterrupted run.

SAMPLEWISE_FUZZ_SECONDS=600 python -m pytest -m slow -s tests/loop/test_killed_at_random.py goes on with new settings
until the time is over. SAMPLEWISE_FUZZ_SEED chooses the first of them; a failure names the seed that repeats it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import forks
import pytest
import random_run
import torch

import samplewise as sw

SCRIPT = Path(random_run.__file__)
TIMES = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")
SETTINGS = 8  # number of settings if no time is given
FIRST = int(os.environ.get("SAMPLEWISE_FUZZ_SEED", "0"))
SECONDS = float(os.environ.get("SAMPLEWISE_FUZZ_SECONDS", "0"))


def run(directory, seed, seconds=-1.0):
    """Exit code of the run, which is killed after these seconds."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(directory), str(seed), str(seconds)]
    # Not a pipe: a worker whose parent was killed before it has read the id of its parent never ends by itself.
    with open(directory / "errors.txt", "wb") as errors:
        process = forks.Popen(command, stdout=errors, stderr=errors, start_new_session=True)
    try:
        code = process.wait(timeout=600)
    finally:
        forks.kill(process)
        process.wait()
    assert code in (0, -signal.SIGKILL), (directory / "errors.txt").read_text()
    return code


def ended(directory):
    """Parameters, log, releases of a private run, and ledger."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    releases = directory / "privacy.jsonl"
    rows = sw.read_ledger(directory).to_pylist() if (directory / "samples").exists() else []
    parameters = [p.numpy().tobytes() for p in torch.load(directory / "parameters.pt")]
    released = [json.loads(line) for line in releases.read_text().splitlines()] if releases.exists() else []
    for line in released:
        line.pop("place", None)  # inodes of the directory
    return parameters, repr(log), released, list(map(repr, rows))  # NaN is not equal to itself


def killed_and_resumed(tmp_path, seed):
    """Compare a run that is killed up to three times with an uninterrupted one; returns the number of kills."""
    run(tmp_path / "whole", seed)
    seconds = json.loads((tmp_path / "whole/seconds.json").read_text())
    moment = random.Random(seed)
    kills = 0
    for _ in range(moment.choice([1, 2, 3])):
        kills += run(tmp_path / "killed", seed, seconds * moment.uniform(0.1, 1.0)) != 0
    run(tmp_path / "killed", seed)
    for part, found, expected in zip(
        ("parameters", "log", "releases", "ledger"), ended(tmp_path / "killed"), ended(tmp_path / "whole"), strict=True
    ):
        assert found == expected, f"{part} differ with seed {seed}: {random_run.settings(seed)}"
    return kills


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    until = time.monotonic() + SECONDS
    seed = FIRST
    kills = 0
    while seed < FIRST + SETTINGS or time.monotonic() < until:
        directory = tmp_path / str(seed)
        directory.mkdir()
        kills += killed_and_resumed(directory, seed)
        seed += 1
    print(f"{seed - FIRST} settings from seed {FIRST}, killed {kills} times")
    assert kills
