"""Intervals in updates, epochs and samples, also over a resume and with skipped updates."""

import json

import pytest
import torch
from small import X, Y, loader, log, loss_fn, make
from torch import nn

import samplewise as sw
from samplewise.loop.callbacks import LRMonitor, ModelCheckpoint
from samplewise.loop.stopping import Duration, interval


class Saves:
    """Numbers of updates at which checkpoints are saved."""

    def __init__(self):
        self.done = 0
        self.updates = []

    def on_update(self, update):
        self.done = update.index + 1

    def state_dict(self):
        self.updates.append(self.done)
        return {}

    def load_state_dict(self, state): ...


def ends(length, samples, updates):
    """Numbers of updates after which a multiple of `length` samples is reached or passed."""
    totals = [samples * k for k in range(updates + 1)]
    return [k for k in range(1, updates + 1) if any(totals[k - 1] < m <= totals[k] for m in range(0, 999, length))]


@pytest.mark.sweep(2 / 5)
@pytest.mark.parametrize("every", [1, 10, 25, 30, 70])
def test_samples(tmp_path, every):
    saves = Saves()
    callbacks = [saves, LRMonitor(f"{every}samples"), ModelCheckpoint(f"{every}samples")]
    make(tmp_path, callbacks, log_every=f"{every}samples").fit(loader(), updates=12)
    expected = ends(every, 10, 12)
    lines = log(tmp_path)
    assert [line["update"] for line in lines if line["kind"] == "lr"] == expected
    assert [line["update"] for line in lines if line["kind"] == "layers"] == expected
    trained = [line["update"] for line in lines if line["kind"] == "train"]
    assert trained == sorted({*expected, 3, 6, 9, 12})  # one more at the end of each epoch
    assert [k for k in saves.updates[1:] if k != 12] == [k for k in expected if k != 12]  # the first one is a check
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["log_every"] == f"{every}samples"


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("every", ["25samples", "4up"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7, 8])
def test_a_resumed_run_continues_the_interval(tmp_path, every, stop):
    def fit(run, updates):
        callbacks = [LRMonitor(every), sw.NoiseScale(), ModelCheckpoint(every)]
        make(run, callbacks, log_every=every).fit(loader(shuffle=True), updates=updates, resume=True)

    fit(tmp_path / "whole", 12)
    fit(tmp_path / "parts", stop)
    fit(tmp_path / "parts", 12)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")


def test_samples_of_skipped_updates_count(tmp_path):
    x = X.clone()
    x[12] = torch.nan  # in the second update of each epoch
    step = sw.Step(nn.Linear(6, 3), sw.sgd(0.1), loss_fn, samples=10, on_nonfinite="skip")
    trainer = sw.Trainer(step, tmp_path, [LRMonitor("20samples")], log_every="20samples", progress=False, device="cpu")
    trainer.fit([(x, Y)], epochs=2)
    lines = [(line["kind"], line["update"]) for line in log(tmp_path) if line["kind"] in ("train", "lr", "layers")]
    # Updates of 10 samples end at 10, 20 (skipped), 30 | 40, 50 (skipped), 60; a line of kind "train" ends an epoch.
    assert [line for line in lines if line[0] == "lr"] == [("lr", 1), ("lr", 3), ("lr", 4)]
    assert [line for line in lines if line[0] == "train"] == [("train", 1), ("train", 2), ("train", 3), ("train", 4)]
    assert [line for line in lines if line[0] == "layers"] == [("layers", 3), ("layers", 4)]


@pytest.mark.parametrize(("text", "number", "unit"), [("50up", 50, "up"), ("1ep", 1, "ep"), ("7samples", 7, "samples")])
def test_a_duration_is_written_as_it_is_read(text, number, unit):
    assert interval("every", text) == Duration(number, unit) and str(Duration(number, unit)) == text


def test_a_number_counts_updates():
    assert interval("every", 50) == Duration(50, "up")


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("stop", [None, 3, 5])
def test_learning_rates_at_the_end_of_epochs(tmp_path, stop):
    """Epochs have three updates; the rate falls with each. A run that is stopped and resumed writes the same lines."""

    def run(resume, **until):
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = sw.Step(model, optimizer, loss_fn, samples=10, scheduler=scheduler)
        trainer = sw.Trainer(step, tmp_path, [LRMonitor("2ep")], progress=False, device="cpu")
        trainer.fit(loader(), resume=resume, **until)

    if stop is not None:
        run(resume=False, updates=stop)
    run(resume=stop is not None, epochs=4)
    lines = [(line["update"], line["rates"]) for line in log(tmp_path) if line["kind"] == "lr"]
    assert lines == [(6, [0.5**5]), (12, [0.5**11])]
