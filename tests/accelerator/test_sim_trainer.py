"""Trainer on the simulated accelerator: ledger, checkpoints, exact resume, evaluation and prediction."""

import pytest
import torch
from common import DEVICE, X, Y, assert_same_on_both, losses, network, weights
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw


def loader(shuffle=True):
    return DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=6, shuffle=shuffle)


def trainer_for(run, device=DEVICE, dropout=0.0, transforms=(), **settings):
    model = network(device, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = sw.Step(model, optimizer, losses, samples=5, transforms=[sw.clip(0.5), *transforms], **settings)
    return sw.Trainer(step, run, callbacks=[sw.Ledger(rows_per_file=10)], device=device, progress=False), model


def rows(run):
    return sw.read_ledger(run).sort_by([("id", "ascending"), ("update", "ascending")]).to_pydict()


def test_training_is_the_same_as_on_the_cpu(tmp_path):
    def fit(device):
        run = tmp_path / device
        trainer, model = trainer_for(run, device)
        trainer.fit(loader(), validate=loader(shuffle=False), epochs=1)
        columns = {name: values for name, values in rows(run).items() if name in ("id", "update", "loss", "norm")}
        evaluated = trainer.evaluate(loader(shuffle=False))
        return weights(model), columns, evaluated, trainer.predict([x[:1] for x in loader(shuffle=False)])

    assert_same_on_both(fit, 1e-6)


def test_the_accelerator_is_the_default(monkeypatch):
    model = network("cpu")
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses)
    assert sw.Trainer(step, progress=False).device.type == DEVICE
    monkeypatch.setattr(torch.sim, "present", False)
    assert sw.Trainer(step, progress=False).device.type == "cpu"


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("precision", [None, "16-mixed"])
def test_a_resumed_run_is_bit_identical(tmp_path, precision):
    """Dropout and noise draw from the generator of the device, whose state is in the checkpoint."""
    random = dict(dropout=0.5, transforms=[sw.noise(0.1)], precision=precision)
    trainer, expected = trainer_for(tmp_path / "whole", **random)
    trainer.fit(loader(), epochs=2)
    trainer_for(tmp_path / "cut", **random)[0].fit(loader(), updates=3)
    torch.manual_seed(99)
    trainer, model = trainer_for(tmp_path / "cut", **random)
    trainer.fit(loader(), epochs=2, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(expected), strict=True))
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_a_checkpoint_of_the_accelerator_is_read_without_one(tmp_path, monkeypatch):
    trainer, model = trainer_for(tmp_path)
    trainer.fit(loader(), epochs=1)
    state = sw.load_checkpoint(tmp_path)["model"]
    assert all(t.device.type == "cpu" for t in state.values())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), weights(model), strict=True))
    monkeypatch.setattr(torch.sim, "present", False)
    other, moved = trainer_for(tmp_path, "cpu")
    other.fit(loader(), epochs=2, resume=True)
    assert all(p.device.type == "cpu" for p in moved.parameters())


def test_batches_are_moved_without_a_host_wait(waits):
    from samplewise.core.batches import to_device

    moved = to_device({"x": X, "more": [Y]}, torch.device(DEVICE))
    assert moved["x"].device.type == moved["more"][0].device.type == DEVICE
    assert waits() == {}


def fused_run(run, device, **fit):
    """Fit with a NaN in two samples, whose updates the accelerator skips by itself."""
    x = X.clone()
    x[[4, -1]] = torch.nan
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    step = sw.Step(model, optimizer, losses, 5, transforms=[sw.clip(0.5)], scheduler=scheduler, on_nonfinite="skip")
    trainer = sw.Trainer(
        step, run, callbacks=[sw.Ledger(rows_per_file=10)], device=device, log_every="2up", progress=False
    )
    trainer.fit(DataLoader(sw.Indexed(TensorDataset(x, Y)), batch_size=6), **fit)
    columns = {name: rows(run)[name] for name in ("id", "update", "weight")}
    return weights(model), columns, vars(step.counters), scheduler.get_last_lr()


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("fit", [dict(epochs=2), dict(updates=1), dict(updates=5)], ids=str)
def test_updates_that_the_device_skips_are_those_of_the_cpu(tmp_path, fit):
    """The last update of an epoch, or the one that would be the last of the fit, is skipped."""
    assert_same_on_both(lambda device: fused_run(tmp_path / device, device, **fit), 1e-6)


def test_a_run_resumed_after_a_skipped_update_is_bit_identical(tmp_path):
    whole = fused_run(tmp_path / "whole", DEVICE, epochs=2)
    fused_run(tmp_path / "cut", DEVICE, epochs=1)
    found = fused_run(tmp_path / "cut", DEVICE, epochs=2, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(found[0], whole[0], strict=True))
    assert found[1:] == whole[1:]
