"""samplewise doctor --zoo."""

import re
import sys
from unittest import mock

import pytest
import torch
import typer
from plain_pytorch import not_run_reason
from recipes import HEALTHY, command, one_line, process
from torch import nn
from zoo import CASES

from samplewise.cli import zoo
from samplewise.core import text as progress
from samplewise.engine.rules import RULES, Rule, broadcast
from samplewise.testing.case import Case, noise, squared_loss
from samplewise.testing.runner import PRECISIONS

FEW = ("linear_on_vectors", "conv1d", "lstm_batch_first", "batch_mean_subtracted")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(zoo, "CASES", {name: CASES[name] for name in FEW})


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("dtype", "words"), [("fp64", "float64."), ("fp32", "float32."), ("bf16", "float32 under bf16 autocast.")]
)
def test_a_few_models_in_every_precision(dtype, words, record_property):
    """A case that PyTorch cannot run on this machine (bf16 LSTM on AVX2) is named with PyTorch's reason."""
    reasons = {name: not_run_reason(CASES[name], PRECISIONS[dtype]) for name in FEW}
    not_run = [f"not run: {name}: {reason}" for name, reason in reasons.items() if reason]
    if not_run:
        record_property("not run", "; ".join(not_run))
    result = command("doctor", "--zoo", "--device", "cpu", "--dtype", dtype)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith(f"Zoo: 4 small models on cpu, {words}\n")
    outcomes = [re.search(rf"^{name} +(\w+( \w+)?)$", result.stdout, re.M).group(1) for name in FEW]
    assert outcomes == ["not run" if reasons[name] else "right" for name in FEW[:3]] + ["refused"]
    assert [line for line in result.stdout.splitlines() if line.startswith("not run: ")] == not_run
    counts = f"{3 - len(not_run)} right, 1 refused" + (f", {len(not_run)} not run" if not_run else "")
    assert result.stdout.endswith(f"\nNo problems found: {counts}.\n")


@pytest.mark.usefixtures("few")
def test_fp64_is_the_default():
    assert "on cpu, float64.\n" in command("doctor", "--zoo", "--device", "cpu").stdout


@pytest.mark.usefixtures("few")
def test_a_broken_rule():
    off = Rule(lambda use: broadcast.summed(use, 1.5 * use.gradient))
    with mock.patch.dict(RULES, {("Addmm", 0): off}):
        result = command("doctor", "--zoo", "--device", "cpu")
    assert result.exit_code == 1
    assert re.search(r"^linear_on_vectors +wrong$", result.stdout, re.M)
    assert re.search(r"^wrong: linear_on_vectors: norms: off by \S+, allowed \S+$", result.stdout, re.M)
    assert "Wrong gradients found: " in result.stdout.splitlines()[-1]


UNFIT = Case("unfit", lambda B: (nn.Linear(6, 3), noise(B, 5)), squared_loss)


def test_models_that_pytorch_cannot_run_are_listed_and_not_an_error(few, monkeypatch):
    monkeypatch.setitem(zoo.CASES, "unfit", UNFIT)
    result = command("doctor", "--zoo", "--device", "cpu")
    assert result.exit_code == 0
    assert "not run: unfit: RuntimeError: " in result.stdout
    assert "mat1 and mat2 shapes cannot be multiplied" in result.stdout
    assert result.stdout.endswith("No problems found: 3 right, 1 refused, 1 not run.\n")


def test_failure_if_nothing_could_be_compared(monkeypatch):
    monkeypatch.setattr(zoo, "CASES", {"unfit": UNFIT})
    result = command("doctor", "--zoo", "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout.endswith("Nothing was compared: 1 not run. Choose another device or precision.\n")


@pytest.mark.usefixtures("few")
def test_progress_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    lines = "models: 1 of 4\nmodels: 2 of 4\nmodels: 3 of 4\nmodels: 4 of 4\n"
    assert command("doctor", "--zoo", "--device", "cpu").stderr == lines


@pytest.mark.usefixtures("few")
def test_progress_bar_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert zoo.run_zoo(zoo.PRECISIONS["fp64"], torch.device("cpu"))
    captured = capsys.readouterr()
    assert "4/4" in captured.err
    assert captured.out.endswith("No problems found: 3 right, 1 refused.\n")


@pytest.mark.usefixtures("few")
def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        command("doctor", "--zoo", "--device", "cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (
            ["--dtype", "fp32"],
            "Invalid value for --dtype: can only be used with --zoo; found neither --zoo nor",
        ),
        (["recipe.py", "--zoo"], "Invalid value for RECIPE: give one of RECIPE and --zoo; found both."),
        (["recipe.py", "--dtype", "fp32"], "Invalid value for --dtype: can only be used with --zoo; found a recipe,"),
        (["--zoo", "--dtype", "fp16"], "Invalid value for --dtype: must be one of fp64, fp32, bf16; found 'fp16'."),
        (["--zoo", "--device", "abacus"], "Invalid value for --device: must be a device that torch can use; found"),
        (
            ["--zoo", "--device", "meta", "--dtype", "bf16"],
            "that the device supports; found bf16 on meta, which has no",
        ),
    ],
)
def test_bad_arguments_get_one_line(recipe, arguments, output):
    recipe(HEALTHY)
    result = command("doctor", *arguments)
    assert output in one_line(result)
    assert result.exit_code == 2


def test_a_device_without_float64(monkeypatch):
    monkeypatch.setattr(zoo, "has_float64", lambda device: False)
    device = torch.device("mps")
    assert zoo.precision_named(None, device) is zoo.PRECISIONS["fp32"]
    message = r"must be a precision that the device supports; found fp64 on mps\. Use fp32\."
    with pytest.raises(typer.BadParameter, match=message):
        zoo.precision_named("fp64", device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_the_whole_zoo_as_a_process(dtype):
    result = process("doctor", "--zoo", "--device", "cpu", "--dtype", dtype, new=True)
    assert result.returncode == 0, result.stdout
    assert "No problems found: " in result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_whole_zoo_on_a_machine_without_avx512(monkeypatch):
    """oneDNN limited to AVX2 has no bf16 LSTM: cases with one are not run, all others are compared."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    result = process("doctor", "--zoo", "--device", "cpu", "--dtype", "bf16", new=True)
    assert result.returncode == 0, result.stdout
    not_run = re.findall(r"^not run: (\w+): (.*)$", result.stdout, re.M)
    assert all(
        "LSTM forward propagation primitive" in reason for name, reason in not_run if CASES[name].traits.autocast
    )
    assert "No problems found: " in result.stdout.splitlines()[-1]
