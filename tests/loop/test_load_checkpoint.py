"""State dicts of a checkpoint for plain PyTorch."""

import shutil

import pytest
import torch
from forging import write_directory
from safetensors.torch import load_file
from small import X, Y, loader, make, parameters

import samplewise as sw
from samplewise.errors import CheckpointError, CheckpointWarning


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a) and list(a) == list(b)


@pytest.fixture
def trainer(tmp_path):
    trainer = make(tmp_path / "run")
    trainer.fit(loader(), epochs=2)
    return trainer


def test_from_a_run_directory(trainer):
    state = sw.load_checkpoint(trainer.run)
    assert same(state["model"], trainer.model.state_dict())
    assert state["optimizer"]["param_groups"][0]["lr"] == trainer.step.optimizer.param_groups[0]["lr"]
    model = make(None).model
    model.load_state_dict(state["model"])


def test_plain_torch_loads_every_part(tmp_path):
    """Model, optimizer and schedule go on by hand as the trainer's do."""

    def made():
        trainer = make(
            tmp_path / "run",
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        )
        trainer.model[2].p = 0.0  # no dropout: the plain loop has other random numbers
        return trainer

    trainer = made()
    trainer.fit(loader(), epochs=2)
    state = sw.load_checkpoint(trainer.run)
    whole = made()
    step = whole.step
    whole.model.load_state_dict(state["model"])
    step.optimizer.load_state_dict(state["optimizer"])
    step.scheduler.load_state_dict(state["scheduler"])
    for first in range(0, 30, 10):
        step.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(whole.model(X[first : first + 10]), Y[first : first + 10]).backward()
        step.optimizer.step()
        step.scheduler.step()
    trainer.fit(loader(), epochs=3)
    torch.testing.assert_close(parameters(trainer), parameters(whole))
    assert step.optimizer.param_groups[0]["lr"] == trainer.step.optimizer.param_groups[0]["lr"]


def test_other_tools_read_the_model(trainer):
    """From a checkpoint and from a saved model, without this library."""
    for checkpoint in (max((trainer.run / "checkpoints").iterdir()), trainer.save_model("mine")):
        stored = load_file(checkpoint / "model.safetensors")
        assert set(stored) == {"0.weight", "0.bias", "3.weight", "3.bias"}
        make(None).model.load_state_dict(stored)
        assert all(torch.equal(stored[name], value) for name, value in trainer.model.state_dict().items())


def test_from_one_checkpoint(trainer):
    newest = max((trainer.run / "checkpoints").iterdir())
    assert same(sw.load_checkpoint(str(newest))["model"], trainer.model.state_dict())


def test_a_damaged_checkpoint_is_passed_over(trainer):
    newest = max((trainer.run / "checkpoints").iterdir())
    shutil.copytree(newest, newest.with_name("update-000099999.ckpt"))
    damaged = newest.with_name("update-000099999.ckpt") / "rank-0.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-7])
    with pytest.warns(CheckpointWarning, match="Trying the previous checkpoint"):
        state = sw.load_checkpoint(trainer.run)
    assert same(state["model"], trainer.model.state_dict())
    assert damaged.read_bytes() == content[:-7]


def test_from_the_folder_of_checkpoints(trainer):
    assert same(sw.load_checkpoint(trainer.run / "checkpoints")["model"], trainer.model.state_dict())


def no_checkpoint(message, path):
    with pytest.raises(CheckpointError) as error:
        sw.load_checkpoint(path)
    assert str(error.value) == message


def test_paths_without_a_checkpoint(tmp_path):
    remedy = (
        "Pass the path of a checkpoint such as 'runs/name/checkpoints/update-000000100.ckpt', or of a run directory."
    )
    no_checkpoint(f"path must name a checkpoint or a run directory; found the empty path ''. {remedy}", "")
    no_checkpoint(f"path must name a checkpoint or a run directory; found None. {remedy}", None)
    no_checkpoint(f"path must name a checkpoint or a run directory; found {{'model': 1}}. {remedy}", {"model": 1})
    absent = tmp_path / "none.ckpt"
    no_checkpoint(
        f"{absent} must be a checkpoint or a run directory; found no such file or directory. {remedy}", absent
    )
    (tmp_path / "empty").mkdir()
    no_checkpoint(
        f"{tmp_path}/empty must be a checkpoint or a run directory; found a directory without state.json and without "
        f"checkpoints. {remedy}",
        tmp_path / "empty",
    )
    (tmp_path / "checkpoints").mkdir()
    no_checkpoint(
        f"{tmp_path} must have a checkpoint that can be read; found none in {tmp_path}/checkpoints. Give another run "
        "directory, or train with Trainer(..., run=...) first.",
        tmp_path,
    )


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "rank-0.safetensors"])
def test_a_file_inside_a_checkpoint_is_answered_with_its_directory(trainer, name):
    path = trainer.save_model("mine")
    no_checkpoint(
        f"path must name a checkpoint, which is a directory; found the file {path / name} inside one. Pass {path}.",
        path / name,
    )


def test_files_of_another_kind_are_named(trainer, tmp_path):
    torch.save({"a": 1}, tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", trainer.run / "log.jsonl", trainer.run / "run.json"):
        with pytest.raises(CheckpointError) as error:
            sw.load_checkpoint(path)
        message = f"{path} must be a checkpoint file written by samplewise; found a file that begins with "
        assert str(error.value).startswith(message)


def test_a_model_that_was_saved_by_name(trainer):
    path = trainer.save_model("mine")
    trainer.save_model("mine")  # replaces it
    state = sw.load_checkpoint(path)
    assert path == trainer.run / "mine.ckpt" and sorted(state) == ["frozen", "model", "update"]
    assert same(state["model"], trainer.model.state_dict())
    assert not list(trainer.run.glob(".*"))


def test_a_checkpoint_of_several_ranks(trainer, tmp_path):
    state = sw.load_checkpoint(trainer.run)
    write_directory(tmp_path / "three.ckpt", state, ranks=3)
    again = sw.load_checkpoint(tmp_path / "three.ckpt")
    assert same(again["model"], state["model"]) and list(again) == list(state)


@pytest.mark.parametrize("change", ["shape", "more", "fewer"])
def test_resuming_another_model_leaves_it_as_it_was(trainer, change):
    other = make(trainer.run)
    first = next(iter(other.model.named_parameters()))[0]
    module = other.model.get_submodule(first.rpartition(".")[0])
    if change == "shape":
        module.weight = torch.nn.Parameter(torch.zeros(3, 7, dtype=module.weight.dtype))
    elif change == "more":
        other.model.register_buffer("more", torch.zeros(2))
    else:
        del module.bias
        module.bias = None
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="must fit the model of the run that it is loaded into; found '"):
        other.fit(loader(), epochs=3, resume=True)
    assert same(before, other.model.state_dict())
