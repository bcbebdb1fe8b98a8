"""Checkpoints without frozen parameters: save="trained"."""

import pytest
import torch
from safetensors.torch import load_file
from small import loader, loss_fn
from torch import nn

import samplewise as sw
from samplewise.errors import CheckpointError
from samplewise.loop.callbacks import ModelCheckpoint


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank, added to it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x):
        return torch.tanh(x * self.weight + self.offset)


def lora(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(LoRA(nn.Linear(6, 8)), Scale(), LoRA(nn.Linear(8, 3)))
    model[2].tied = model[2].base
    return model


BASE = {f"{layer}.{name}" for layer in ("0.base", "2.base", "2.tied") for name in ("weight", "bias")}
TRAINED = {"0.a", "0.b", "2.a", "2.b", "1.weight"}
BUFFERS = {"1.offset"}


def make(run, model=None, callbacks=(), save="trained", trained=False):
    model = lora() if model is None else model
    parameters = [p for p in model.parameters() if p.requires_grad] if trained else model.parameters()
    step = sw.Step(model, torch.optim.AdamW(parameters, lr=0.05), loss_fn, samples=10)
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu", save=save)


def vector(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("trained", [True, False], ids=["trained parameters", "all parameters"])
def test_the_base_is_left_out_and_the_run_goes_on_bit_for_bit(tmp_path, trained):
    """Whether or not the optimizer was given the frozen parameters, too."""
    whole = make(tmp_path / "whole", save="all", trained=trained)
    whole.fit(loader(), epochs=3)
    best = ModelCheckpoint(best=1)
    make(tmp_path / "run", callbacks=[best], trained=trained).fit(loader(), epochs=1)
    state = sw.load_checkpoint(tmp_path / "run")
    assert set(state["model"]) == TRAINED | BUFFERS and set(state["frozen"]) == BASE
    for checkpoint in (best.best_models[0], max((tmp_path / "run" / "checkpoints").iterdir())):
        assert set(load_file(checkpoint / "model.safetensors")) == TRAINED | BUFFERS
    for epochs in (2, 3):
        trainer = make(tmp_path / "run", trained=trained)
        trainer.fit(loader(), epochs=epochs, resume=True)
    assert torch.equal(vector(trainer), vector(whole))


def test_plain_torch_loads_it_into_the_same_base(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(loader(), epochs=1)
    model = lora()
    missing, unexpected = model.load_state_dict(sw.load_checkpoint(tmp_path)["model"], strict=False)
    assert set(missing) == BASE and not unexpected
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("change", ["values", "dtype", "gone"])
def test_another_base_is_refused(tmp_path, change):
    make(tmp_path).fit(loader(), epochs=1)
    model = lora()
    if change == "values":
        model[2].base.weight.data[0, 0] += 1e-6
    elif change == "dtype":
        model[2].base.weight.data = model[2].base.weight.data.double()
    else:
        del model[2].tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name, found = (
        ("2.tied.weight", "is not in this model") if change == "gone" else ("2.base.weight", "has other values")
    )
    with pytest.raises(CheckpointError) as error:
        make(tmp_path, model).fit(loader(), epochs=2, resume=True)
    assert str(error.value).startswith(
        "a checkpoint without frozen parameters (save='trained') must be resumed with the base model that the run was "
        f"started with; found that '{name}' {found}"
    )
    assert str(error.value).endswith("Load that base model before fit, or start a new run directory.")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_parameters_that_change_are_saved(tmp_path):
    """A teacher that follows the student, without autograd's knowledge: it is no base."""

    class Follows:
        def on_update(self, model):
            model[0].base.weight.data.mul_(0.9)

    expected = make(tmp_path / "whole", callbacks=[Follows()], save="all")
    expected.fit(loader(), epochs=3)
    for epochs in (1, 2, 3):
        trainer = make(tmp_path / "run", callbacks=[Follows()])
        trainer.fit(loader(), epochs=epochs, resume=True)
    assert set(sw.load_checkpoint(tmp_path / "run")["frozen"]) == BASE - {"0.base.weight"}
    assert torch.equal(vector(trainer), vector(expected))


def test_parameters_that_are_unfrozen_are_saved(tmp_path):
    class Unfreezes:
        def on_epoch_start(self, model, epoch):
            model[0].base.weight.requires_grad_(epoch > 0)

    trainer = make(tmp_path, callbacks=[Unfreezes()])
    trainer.fit(loader(), epochs=1)
    assert "0.base.weight" in sw.load_checkpoint(tmp_path)["frozen"]
    trainer.fit(loader(), epochs=2)
    state = sw.load_checkpoint(tmp_path)
    assert torch.equal(state["model"]["0.base.weight"], trainer.model[0].base.weight)
    again = make(tmp_path, callbacks=[Unfreezes()])
    again.fit(loader(), epochs=2, resume=True)
    assert torch.equal(vector(again), vector(trainer))


def test_from_a_whole_checkpoint_with_another_base(tmp_path):
    """The base of the checkpoint is not that of the script: it is saved from then on."""
    first = make(tmp_path, lora(seed=1), save="all")
    first.fit(loader(), epochs=1)
    make(tmp_path).fit(loader(), epochs=2, resume=True)
    state = sw.load_checkpoint(tmp_path)
    assert state["frozen"] == {} and set(state["model"]) >= BASE
    assert torch.equal(state["model"]["0.base.weight"], first.model[0].base.weight)
    make(tmp_path / "b", save="all").fit(loader(), epochs=1)
    make(tmp_path / "b").fit(loader(), epochs=2, resume=True)
    assert set(sw.load_checkpoint(tmp_path / "b")["frozen"]) == BASE
    make(tmp_path / "b", save="all").fit(loader(), epochs=3, resume=True)
    assert sw.load_checkpoint(tmp_path / "b")["frozen"] == {}


def test_after_a_test_run(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(loader(), epochs=1, fast_dev_run=True)
    trainer.fit(loader(), epochs=2)
    assert set(sw.load_checkpoint(tmp_path)["frozen"]) == BASE


@pytest.mark.parametrize("save", ["some", None, True])
def test_what_save_can_be(save):
    with pytest.raises(ValueError, match=f"^save must be 'all' or 'trained'; found {save!r}.$"):
        make(None, save=save)
