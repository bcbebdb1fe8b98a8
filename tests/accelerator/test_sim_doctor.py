"""samplewise doctor on the simulated accelerator."""

import pytest
from typer.testing import CliRunner

from samplewise.cli import zoo
from samplewise.cli.main import app

RECIPE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data():
    return DataLoader(TensorDataset(torch.randn(16, 5), torch.arange(16) % 3), batch_size=4)


def model():
    return nn.Linear(5, 3)
"""


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.slow
def test_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr("samplewise.diagnostics.profile.MAX_ROUNDS", 1)
    (tmp_path / "recipe.py").write_text(RECIPE)
    result = command("doctor", tmp_path / "recipe.py", "--device", "sim", "--verbose")
    assert result.exit_code == 0, result.output
    assert "No problems found: the recipe is ready for training." in result.output
    assert "not compiled: the batch is on sim:0; updates are compiled for the CPU only" in result.output


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_zoo(monkeypatch, dtype):
    monkeypatch.setattr(zoo, "CASES", dict(list(zoo.CASES.items())[:2]))
    result = command("doctor", "--zoo", "--device", "sim", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert "2 small models on sim" in result.output and "No problems found: 2 right." in result.output
