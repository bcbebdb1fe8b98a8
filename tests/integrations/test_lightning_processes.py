"""The Lightning callback in processes of their own: killed and resumed, and on two ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_problem import SAMPLES, one_by_one, windows_of

import samplewise as sw

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("lightning_module.py")
COLUMNS = ["id", "epoch", "update", "loss", "norm", "weight"]


def run(directory, ranks=1, code=0, **arguments):
    """Parameters after training in a process of its own."""
    Path(directory).mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, SCRIPT, json.dumps({"directory": str(directory), **arguments})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stderr
    return torch.load(f"{directory}/parameters.pt") if code == 0 else None


def rows(directory):
    return sw.samples(f"{directory}/run").select(COLUMNS).to_pylist()


@pytest.mark.parametrize(
    "settings",
    [{"kill_after": 9}, {"kill_after": 10, "every": 2, "stateful": True, "accumulate_grad_batches": 2}],
    ids=["end of the epoch", "in the epoch"],
)
def test_killed_in_the_second_epoch_and_resumed(tmp_path, settings):
    """Epochs of six batches. The checkpoint is older than the last rows, which must not be there twice."""
    settings = {"max_epochs": 3, "enable_checkpointing": True, "every": None, **settings}
    kill_after = settings.pop("kill_after")
    expected = run(tmp_path / "whole", **settings)
    run(tmp_path / "killed", code=-signal.SIGKILL, kill_after=kill_after, **settings)
    last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    found = run(tmp_path / "killed", ckpt=str(last), **settings)
    assert torch.equal(found, expected)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 3 * SAMPLES


@pytest.mark.parametrize(
    ("accumulate", "strategy", "clip"),
    [(1, "ddp", False), (2, "ddp", True), (3, "ddp_find_unused_parameters_true", True)],
)
def test_two_ranks_give_the_update_of_one(tmp_path, accumulate, strategy, clip):
    """Lightning shuffles the samples and gives half of them to each rank; the ledger says which update they were in."""
    settings = dict(accumulate_grad_batches=accumulate, max_epochs=2, clip=clip)
    found = run(tmp_path, ranks=2, batch_size=2, devices=2, strategy=strategy, **settings)
    table = rows(tmp_path)
    windows = {}
    for row in table:
        windows.setdefault(row["update"], []).append(row["id"])
    assert [len(window) for window in windows.values()] == [len(each) for each in windows_of(4 * accumulate, 2)]
    expected, norms = one_by_one(windows.values(), **({} if clip else {"bound": torch.inf}))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.tensor([row["norm"] for row in table]).double(), norms, rtol=1e-6, atol=1e-6)
    assert sorted(row["id"] for row in table) == sorted([*range(SAMPLES)] * 2)
