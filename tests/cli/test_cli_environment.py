"""samplewise doctor without a recipe."""

import os
import platform
import re

import pytest
import torch
import typer
from recipes import command

import samplewise
from samplewise.cli import environment
from samplewise.core import memory


def shown(name):
    """The value in the line of `name`."""
    result = command("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    (value,) = re.findall(rf"^{re.escape(name)} +(.*)$", result.stdout, re.MULTILINE)
    return value


def test_versions():
    assert shown("samplewise") == samplewise.__version__
    assert shown("torch") == torch.__version__
    assert shown("Python") == f"{platform.python_version()} ({platform.python_implementation()})"


def test_the_machine():
    assert shown("platform") == platform.platform()
    assert f", {os.cpu_count()} logical cores, " in shown("CPU")
    assert shown("threads") == f"{torch.get_num_threads()} (torch)"


@pytest.mark.parametrize("name", ["", "Processor of Windows"])
def test_a_system_without_proc(monkeypatch, tmp_path, name):
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.strip("/"))
    monkeypatch.setattr(platform, "processor", lambda: name)
    assert shown("CPU").startswith(name or platform.machine())


def test_optional_packages_by_extra(monkeypatch):
    assert shown("[cli]") == f"typer {typer.__version__}"
    monkeypatch.setattr(environment, "installed_version", lambda package="samplewise": "unknown")
    assert shown("[cli]") == "typer missing"
    assert sorted(environment._extras()["train"]) == ["rich", "safetensors"]
    assert {"demo", "dev"}.isdisjoint(environment._extras())


def test_a_source_tree_that_is_not_installed(monkeypatch):
    def requires(name):
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "requires", requires)
    assert "[cli]" not in command("doctor").stdout


def test_an_accelerator(monkeypatch):
    monkeypatch.setattr(environment, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(environment, "device_name", lambda device: f"{device}: Model 7")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert environment._device() == "2 × cuda:0: Model 7"


def test_variables_that_change_results(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("TORCH_HOME", "a path")
    assert shown("CUDA_VISIBLE_DEVICES") == "1"
    assert "a path" not in command("doctor").stdout
