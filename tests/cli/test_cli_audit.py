"""`samplewise audit`: unmodified scripts, with their own arguments."""

import sys

import forks
import pytest
from recipes import command

from samplewise.audit import script

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--fail", action="store_true")
arguments = parser.parse_args()
torch.manual_seed(0)
x = torch.randint(0, 5, (16, 6))
lengths = torch.arange(16) % 6 + 1
y = torch.where(torch.arange(6) < lengths[:, None], x.roll(1, 1), -100)
model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if __name__ == "__main__":
    for i in range(16 // arguments.batch):
        rows = slice(i * arguments.batch, (i + 1) * arguments.batch)
        loss = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
        (loss / arguments.accumulate).backward()
        if (i + 1) % arguments.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        if arguments.fail:
            raise ValueError("of the script")
    print("trained")
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments):
        command = [sys.executable, "-m", "samplewise.cli.main", "audit", *arguments]
        return forks.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return run


def test_a_script_with_arguments_of_its_own(run, tmp_path):
    result = run("train.py", "--batch", "2", "--max-updates", "3", "--per", "token", "--to", "audit.html")
    assert result.returncode == 1 and "trained" not in result.stdout
    assert "audit of 3 updates: 1 fault: microbatch-weights" in result.stdout
    assert "Look at train.py:" in result.stdout
    assert (tmp_path / "audit.html").exists()


def test_a_right_script(run):
    result = run("train.py", "--accumulate", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("trained\naudit of 4 updates: no fault found")


def test_variations_are_compared(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(script, "subprocess", forks)
    result = command("audit", "train.py", "--vary", "--batch 8 --accumulate 1", "--vary", "--batch 2 --accumulate 4")
    assert result.exit_code == 1
    assert "--batch 8 --accumulate 1 against --batch 2 --accumulate 4" in result.stdout
    assert "in update 1, a sample's weight differs by" in result.stdout


def test_a_script_that_fails(run):
    result = run("train.py", "--fail")
    assert result.returncode == 2
    assert "ValueError: of the script" in result.stderr
    assert "audit of 0 updates: no update seen" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "file 'missing.py' does not exist"),
        (["train.py", "--per", "rows"], "must be token, sample or a positive number; found 'rows'"),
        (["train.py", "--vary", "--batch 8"], "--vary: must be used at least twice; found one"),
        (["train.py", "--allow", "eval"], "found 'eval'. Did you mean 'eval-mode'"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = command("audit", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
