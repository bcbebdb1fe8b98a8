"""samplewise train."""

import json
from pathlib import Path

import pytest
from recipes import HEALTHY, command, one_line, process

from samplewise.cli import train
from samplewise.errors import TrainingWarning
from samplewise.loop.checkpoint.store import Checkpoints
from samplewise.step.step import Step

ACCURACY = "\n\ndef metrics():\n    return {'accuracy': lambda out, batch: (out.argmax(1) == batch[1]).float()}\n"
TERMINATED = """

calls = 0


def loss(model, batch):
    global calls
    calls += 1
    if calls == 5:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""


def log(run):
    """Log lines without times and memory, which differ between runs."""
    lines = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    costs = ("seconds", "samples_per_second", "phases", "memory")
    return [{key: value for key, value in line.items() if key not in costs} for line in lines]


def weights(run):
    state, _ = Checkpoints(Path(run, "checkpoints")).latest()
    return {name: tensor.tolist() for name, tensor in state["model"].items()}


def test_train_prints_the_paths_of_its_files(recipe):
    result = command("train", recipe(HEALTHY + ACCURACY), "--epochs", 20, "--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "20 epochs are done: 60 updates in all",
        "log          runs/recipe/log.jsonl",
        "checkpoints  runs/recipe/checkpoints",
    ]
    found = [line for line in log("runs/recipe") if line["kind"] == "validation"]
    assert len(found) == 20
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]
    assert found[-1]["accuracy"] > 0.8


def test_default_options(recipe):
    plain = HEALTHY.split("def optimizer")[0].replace("return loader, loader", "return loader")
    result = command("train", recipe(plain))
    assert result.exit_code == 0
    assert result.stdout.startswith("1 epoch is done: 3 updates in all\n")


def test_samples_microbatch_clip_and_updates(recipe):
    options = ("--updates", 4, "--samples", 30, "--microbatch", 7, "--clip", 0.5, "--run", "here", "--seed", 3)
    result = command("train", recipe(HEALTHY), *options)
    assert result.exit_code == 0
    assert result.stdout.startswith("4 updates are done: 4 updates in all\n")
    settings = json.loads(Path("here/run.json").read_text())["settings"]
    assert (settings["samples"], settings["seed"]) == (30, 3)
    assert "clip(0.5)" in settings["transforms"]
    assert not Path("runs").exists()


def test_microbatch_auto(recipe):
    assert command("train", recipe(HEALTHY), "--microbatch", "auto").exit_code == 0


@pytest.mark.parametrize(("option", "mode"), [(["--compile"], True), (["--no-compile"], False), ([], False)])
def test_compile_option_is_passed_to_the_step(recipe, monkeypatch, option, mode):
    modes = []

    class Recorded(Step):
        def __init__(self, *arguments, compile, **options):
            modes.append(compile)
            super().__init__(*arguments, compile=False, **options)

    monkeypatch.setattr(train, "Step", Recorded)
    assert command("train", recipe(HEALTHY), *option).exit_code == 0
    assert modes == [mode]


def test_warning_if_updates_cannot_be_compiled(recipe):
    """Microbatches cannot be compiled."""
    with pytest.warns(TrainingWarning, match="updates stay uncompiled: a window is computed in microbatches. Training"):
        result = command("train", recipe(HEALTHY), "--compile", "--microbatch", 7)
    assert result.stdout.startswith("1 epoch is done: 3 updates in all\n")
    assert result.exit_code == 0


def test_the_seed_determines_the_run(recipe):
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        command("train", recipe(HEALTHY), "--run", run, "--seed", seed)
    assert weights("a") == weights("b") != weights("c")


def test_resume_is_bit_identical(recipe):
    name = recipe(HEALTHY)
    command("train", name, "--run", "whole", "--epochs", 3)
    assert command("train", name, "--run", "parts", "--updates", 4).exit_code == 0  # in the middle of an epoch
    result = command("train", name, "--run", "parts", "--epochs", 3, "--resume")
    assert result.stdout.startswith("3 epochs are done: 9 updates in all\n")
    assert weights("parts") == weights("whole")
    assert log("parts") == log("whole")


def test_a_run_is_not_overwritten(recipe):
    name = recipe(HEALTHY)
    command("train", name)
    result = command("train", name)
    assert one_line(result) == (
        "samplewise: Invalid value for --run: a new run must have a directory without checkpoints; found "
        "checkpoints in runs/recipe. Pass --resume to continue that run, or choose another directory."
    )
    assert result.exit_code == 2


def test_a_run_that_is_a_file(recipe):
    Path("taken").touch()
    result = command("train", recipe(HEALTHY), "--run", "taken")
    assert one_line(result) == "samplewise: Invalid value for --run: must be a directory; found a file, taken."
    assert result.exit_code == 2


def test_a_signal_saves_a_checkpoint_and_ends_the_training(recipe):
    result = process("train", recipe(HEALTHY + TERMINATED), "--epochs", 50)
    assert result.returncode == 128 + 15
    assert result.stdout.startswith("stopped by SIGTERM: ")
    assert result.stdout.endswith("continue     with --resume\n")
    with pytest.warns(TrainingWarning, match="loss: .* from now on, the run had"):
        result = command("train", recipe(HEALTHY), "--epochs", 4, "--resume")
    assert result.stdout.startswith("4 epochs are done: 12 updates in all\n")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--epochs", "many"], "Invalid value for '--epochs'"),
        (["--epochs", "1", "--updates", "1"], "give one of --epochs and --updates; found both."),
        (["--samples", "-1"], "Invalid value for '--samples'"),
        (["--microbatch", "0"], "Invalid value for --microbatch: must be a positive number or auto; found '0'."),
        (["--microbatch", "some"], "must be a positive number or auto; found 'some'."),
        (["--clip", "0"], "Invalid value for --clip: must be a positive number; found 0.0."),
        (["--clip", "nan"], "must be a positive number; found nan."),
        (["--device", "toaster"], "Invalid value for --device: must be a device that torch can use; found 'toaster'"),
        (["--colour"], "No such option: --colour"),
    ],
)
def test_bad_arguments_get_one_line(recipe, arguments, output):
    result = command("train", recipe(HEALTHY), *arguments)
    assert output in one_line(result)
    assert result.exit_code == 2
    assert not Path("runs").exists()


def test_warnings_of_samplewise_are_one_line(recipe):
    sleeping = HEALTHY.replace("nn.Linear(8, 3))", "nn.Linear(8, 3)).eval()")
    result = process("train", recipe(sleeping))
    assert result.stderr.startswith("warning: modules are in eval mode while training: the model. ")
    assert "samplewise/" not in result.stderr
    assert result.returncode == 0
