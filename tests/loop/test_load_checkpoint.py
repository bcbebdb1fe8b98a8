"""State dicts of a checkpoint for plain PyTorch."""

import shutil

import pytest
import torch
from forging import write_directory
from small import loader, make

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


def test_nothing_to_load(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="must have a checkpoint that can be read; found none"):
        sw.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"none.ckpt must be readable; found: .*No such file or directory"):
        sw.load_checkpoint(tmp_path / "none.ckpt")


def test_an_empty_path_is_named():
    message = (
        r"^path must name a checkpoint or a run directory; found the empty path ''\. Pass for example 'runs/name'\.$"
    )
    with pytest.raises(CheckpointError, match=message):
        sw.load_checkpoint("")


def test_a_model_that_was_saved_by_name(trainer):
    path = trainer.save_model("mine")
    trainer.save_model("mine")  # replaces it
    state = sw.load_checkpoint(path)
    assert path == trainer.run / "mine.ckpt" and sorted(state) == ["model", "update"]
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
