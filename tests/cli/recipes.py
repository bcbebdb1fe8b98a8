"""Recipes for the tests, and functions that run the command line on them."""

import subprocess
import sys

import forks
from typer.testing import CliRunner

from samplewise.cli.main import app

HEALTHY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=20, shuffle=True)
    return loader, loader


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)
"""
WITH_BATCH_NORM = HEALTHY.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")


def command(*arguments):
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def process(*arguments, code=None, new=False):
    """Run a command in another process. `new`: in a new interpreter, which imports everything itself."""
    start = ["-c", code] if code else ["-m", "samplewise.cli.main"]
    run = subprocess.run if new else forks.run
    return run([sys.executable, *start, *map(str, arguments)], capture_output=True, text=True, timeout=600)


def one_line(result):
    """The text on standard error, which must be the only output and a single line."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()
