"""State dicts of a checkpoint for plain PyTorch."""

import pytest
import torch
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
    content = newest.read_bytes()
    damaged = newest.with_name("update-000099999.ckpt")
    damaged.write_bytes(content[:-7])
    with pytest.warns(CheckpointWarning, match="Trying the previous checkpoint"):
        state = sw.load_checkpoint(trainer.run)
    assert same(state["model"], trainer.model.state_dict())
    assert damaged.read_bytes() == content[:-7]


def test_nothing_to_load(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="must have a checkpoint that can be read; found none"):
        sw.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        sw.load_checkpoint(tmp_path / "none.ckpt")


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
