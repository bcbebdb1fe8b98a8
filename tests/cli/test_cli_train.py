"""samplewise train."""

import json
from pathlib import Path

import pytest
import torch
from recipes import HEALTHY, WITH_BATCH_NORM, command, one_line, process
from torch import nn

import samplewise as sw
from samplewise.cli import training
from samplewise.errors import TrainingWarning
from samplewise.loop.checkpoint.directory import Checkpoints
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
    costs = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")
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

    monkeypatch.setattr(training, "Step", Recorded)
    assert command("train", recipe(HEALTHY), *option).exit_code == 0
    assert modes == [mode]


def test_warning_if_updates_cannot_be_compiled(recipe):
    """Microbatches of an automatic size cannot be compiled."""
    said = "updates stay uncompiled: the size of microbatches is automatic. Training"
    with pytest.warns(TrainingWarning, match=said):
        result = command("train", recipe(HEALTHY), "--compile", "--microbatch", "auto")
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
        "checkpoints in runs/recipe. Pass --exists resume to continue that run, --exists overwrite to remove it, or "
        "--exists new for the next free name."
    )
    assert result.exit_code == 2
    Path("runs/recipe/privacy.jsonl").touch()
    assert one_line(command("train", name)).endswith("continue that run, or --exists new for the next free name.")


def test_what_to_do_with_an_existing_run(recipe):
    name = recipe(HEALTHY)
    command("train", name, "--run", "a")
    result = command("train", name, "--run", "a", "--epochs", 2, "--exists", "resume")
    assert result.stdout.startswith("2 epochs are done: 6 updates in all\n")
    result = command("train", name, "--run", "a", "--exists", "new")
    assert result.stdout == (
        "1 epoch is done: 3 updates in all\nlog          a-2/log.jsonl\ncheckpoints  a-2/checkpoints\n"
    )
    result = command("train", name, "--run", "a", "--exists", "overwrite")
    assert result.stdout.startswith("1 epoch is done: 3 updates in all\nlog          a/log.jsonl\n")
    assert log("a") == log("a-2")
    result = command("train", name, "--exists", "resume")
    assert result.stderr.startswith("No checkpoint was found in runs/recipe: a new run is started.\n")


def test_values_of_exists(recipe):
    result = command("train", recipe(HEALTHY), "--exists", "delete")
    assert "--exists" in one_line(result)
    assert one_line(result).endswith("'delete' is not one of 'error', 'resume', 'overwrite', 'new'.")
    result = command("train", recipe(HEALTHY), "--exists", "new", "--resume")
    assert one_line(result) == (
        "samplewise: Invalid value for --exists: --resume continues the run, --exists new starts another one; found "
        "both."
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
        (["--xyzzy"], "No such option: --xyzzy. See samplewise train --help."),
        (["--epochs"], "Option '--epochs' requires an argument. See samplewise train --help."),
        (["--ledger=loss"], "Invalid value for --ledger: must be norms or losses; found 'loss'."),
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


# ------------------------------------------------------------- scheduler, transforms, callbacks, --ledger

ALL = """
import samplewise as sw


class Counted:
    def on_fit_end(self, step):
        print("rate", step.optimizer.param_groups[0]["lr"])


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def transforms():
    return [sw.clip(0.25)]


def callbacks():
    return [Counted()]
"""


def test_scheduler_transforms_and_callbacks(recipe):
    """The same training as with --clip and a learning rate that is halved after each update."""
    result = command("train", recipe(HEALTHY + ALL), "--run", "here")
    assert result.stdout.startswith("rate 0.0625\n1 epoch is done: 3 updates in all\n")
    assert "clip(0.25)" in json.loads(Path("here/run.json").read_text())["settings"]["transforms"]
    halved = HEALTHY.replace("def optimizer", "def _sgd") + "\n\ndef optimizer(model):\n    return sgd(model)\n"
    by_hand = """
def sgd(model):
    optimizer = _sgd(model)
    step = optimizer.step

    def halving(*arguments):
        step(*arguments)
        optimizer.param_groups[0]["lr"] /= 2

    optimizer.step = halving
    return optimizer
"""
    command("train", recipe(halved + by_hand), "--run", "there", "--clip", 0.25)
    assert weights("here") == weights("there")


def test_clip_and_transforms(recipe):
    result = command("train", recipe(HEALTHY + ALL), "--clip", 1)
    assert one_line(result) == (
        "samplewise: Invalid value for --clip: give one of --clip and transforms() in the recipe; found both. Put "
        "sw.clip(1) into the list that transforms() returns, where its place among the others counts."
    )
    assert result.exit_code == 2
    assert not Path("runs").exists()


def test_one_update_is_singular(recipe):
    assert command("train", recipe(HEALTHY), "--updates", 1).stdout.startswith("1 update is done: 1 update in all\n")


FUNCTION = """

def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")
"""
MODULE = """

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs) * self.scale, targets, reduction="none")


loss = Loss()


def optimizer(model):
    return torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5)
"""
LOSS = """

def loss(model, batch):
    return nn.functional.cross_entropy(model({x}), {y}, reduction="none")
"""
COLLATED = """

def _collate(items):
    x, y = zip(*items)
    return {form}


def _data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    return DataLoader(dataset, batch_size=20, shuffle=True, collate_fn=_collate), None


data = _data
"""
COLLATE = COLLATED + LOSS
PAIR = "from collections import namedtuple\n\nPair = namedtuple('Pair', 'x y')\n"
FORMS = {
    "default loss": "",
    "function": FUNCTION,
    "module": MODULE,
    "dict": COLLATE.format(form='{"x": torch.stack(x), "y": torch.stack(y)}', x='batch["x"]', y='batch["y"]'),
    "named tuple": PAIR + COLLATE.format(form="Pair(torch.stack(x), torch.stack(y))", x="batch.x", y="batch.y"),
    "named tuple, default loss": PAIR + COLLATED.format(form="Pair(torch.stack(x), torch.stack(y))"),
    "tensor": COLLATE.format(
        form="torch.cat([torch.stack(x), torch.stack(y)[:, None]], 1)", x="batch[:, :6]", y="batch[:, 6].long()"
    ),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("form", FORMS)
def test_ledger_of_a_plain_loader(recipe, form):
    """Every sample is recorded under its index, and the training is the same as without --ledger."""
    name = recipe(HEALTHY + FORMS[form])
    options = ("--epochs", 2, "--samples", 7, "--clip", 0.5)
    result = command("train", name, *options, "--run", "with", "--ledger")
    assert result.exit_code == 0, result.stderr
    command("train", name, *options, "--run", "without")
    assert weights("with") == weights("without")
    assert log("with") == log("without")
    visits = sw.read_ledger("with")
    assert sorted(visits["id"].to_pylist()) == sorted([*range(60)] * 2)
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    first = {row["id"]: row["loss"] for row in visits.slice(0, 7).to_pylist()}
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    assert first == pytest.approx({i: losses[i].item() for i in first}, rel=1e-5)
    assert [path.name for path in Path("with").rglob("previews.json")] == ["previews.json"]


def test_ledger_of_losses_with_batch_norm(recipe):
    """--ledger is refused and names --ledger losses, which trains as without a ledger. The recipe may come last."""
    name = recipe(WITH_BATCH_NORM)
    result = command("train", "--run", "norms", "--ledger", name)
    assert "sw.Ledger(norms=False), on the command line --ledger losses, records the losses and trains" in result.stderr
    assert result.exit_code == 1
    result = command("train", "--run", "losses", "--ledger", "losses", name)
    assert result.exit_code == 0, result.stderr
    command("train", name, "--run", "without")
    assert weights("losses") == weights("without")
    visits = sw.read_ledger("losses")
    assert sorted(visits["id"].to_pylist()) == list(range(60))
    assert all(torch.tensor(visits["loss"].to_pylist()).isfinite())
    assert all(torch.tensor(visits["norm"].to_pylist()).isnan())


WEIGHTED = """
import samplewise as sw


def data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1), x[:, 0].abs()), batch_size=20)


def loss(model, batch):
    inputs, targets, _ = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def transforms():
    return [sw.weight({key}), sw.clip(9.0)]  # needs norms, as the ledger does
"""


@pytest.mark.parametrize("key", [2, -1, "lambda batch: batch[-1]"])
def test_transforms_read_the_same_columns_with_and_without_a_ledger(recipe, key):
    name = recipe(HEALTHY + WEIGHTED.format(key=key))
    assert command("train", name, "--run", "with", "--ledger").exit_code == 0
    assert command("train", name, "--run", "without").exit_code == 0
    assert weights("with") == weights("without")


OWN = """
import samplewise as sw


def data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(sw.Indexed(TensorDataset(x, x[:, :3].argmax(1))), batch_size=20)
"""


def test_ledger_of_a_loader_with_ids(recipe):
    assert command("train", recipe(HEALTHY + OWN), "--ledger").exit_code == 0
    assert sw.read_ledger("runs/recipe")["id"].to_pylist() == [*range(60)]
    keyed = HEALTHY + FORMS["dict"].replace('"y": torch.stack(y)', '"y": torch.stack(y), "id": torch.stack(y) + 100')
    assert command("train", recipe(keyed), "--ledger", "--run", "keyed").exit_code == 0
    assert set(sw.read_ledger("keyed")["id"].to_pylist()) == {100, 101, 102}


def test_ledger_of_the_recipe_is_not_doubled(recipe):
    result = command("train", recipe(HEALTHY + OWN + "\n\ndef callbacks():\n    return [sw.Ledger()]\n"), "--ledger")
    assert result.exit_code == 0
    assert len(sw.read_ledger("runs/recipe")) == 60


def test_ledger_of_a_loader_to_which_no_ids_can_be_added(recipe):
    listed = HEALTHY.replace("return loader, loader", "return list(loader)")
    result = command("train", recipe(listed), "--ledger")
    assert one_line(result).startswith(
        "BatchError: --ledger needs the id of each sample. It adds ids to the batches of a DataLoader with a map-style "
        "dataset; batches of other loaders must hold them, as those of sw.Indexed do: "
    )
    assert result.exit_code == 1


def test_resume_without_a_checkpoint_is_refused(recipe):
    result = command("train", recipe(HEALTHY), "--resume", "--run", "typo")
    assert result.stderr.startswith("No checkpoint was found in typo: a new run is started.\n")
    assert result.exit_code == 0


def test_ledger_and_resume(recipe):
    name = recipe(HEALTHY)
    command("train", name, "--ledger", "--updates", 4)
    result = command("train", name, "--ledger", "--epochs", 2, "--resume")
    assert result.exit_code == 0, result.stderr
    assert sorted(sw.read_ledger("runs/recipe")["id"].to_pylist()) == sorted([*range(60)] * 2)


@pytest.mark.slow
def test_a_model_of_transformers(recipe, tmp_path):
    """The batches are dicts, to which --ledger adds the ids."""
    text = """
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def model():
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    return BertForSequenceClassification(BertConfig(num_labels=3, **sizes))


def data():
    samples = [{"input_ids": torch.randint(1, 20, (5,)), "labels": k % 3} for k in range(12)]
    return DataLoader(samples, batch_size=4)
"""
    result = command("train", recipe(text), "--run", tmp_path / "run", "--epochs", "2", "--ledger", "--clip", "1")
    assert result.exit_code == 0, result.output
    table = sw.read_ledger(tmp_path / "run")
    assert sorted(table["id"].to_pylist()) == sorted(2 * list(range(12)))
    assert sorted(set(table["label"].to_pylist())) == [0, 1, 2]
