"""Scripts of this folder in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import samplewise as sw

COLUMNS = ["id", "epoch", "update", "loss", "norm", "weight"]


def run(script, directory, ranks=1, code=0, **arguments):
    """What the script has written to parameters.pt. `code`: exit code that it must have."""
    Path(directory).mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    path = Path(__file__).with_name(script)
    command = [sys.executable, *launcher, path, json.dumps({"directory": str(directory), **arguments})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stderr
    return torch.load(f"{directory}/parameters.pt") if code == 0 else None


def rows(directory):
    return sw.read_ledger(f"{directory}/run").select(COLUMNS).to_pylist()


def windows(table):
    """Ids of the samples of each update."""
    found = {}
    for row in table:
        found.setdefault(row["update"], []).append(row["id"])
    return list(found.values())
