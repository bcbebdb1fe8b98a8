"""Sizes that change, and learning rates by samples, on two ranks: those of one process."""

import copy
from pathlib import Path

import pytest
import torch
from spread_models import data, flat, loss_fn, net, wrapped
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.parallel import collectives

SCHEDULES = {
    "ramp": lambda: sw.ramp({0: 4, 9: 7, 20: 5}),
    "noise": lambda: sw.follow_noise(at_least=2, at_most=8, patience=2, decay=0.5),
}


def step_of(kind, parallel, tail, **options):
    model, parallel = wrapped(net(), parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = sw.by_samples(CosineAnnealingLR, total=60, eta_min=0.01)
    options = {"scheduler": scheduler, "parallel": parallel, "tail": tail, "recheck": False, **options}
    return sw.Step(model, optimizer, loss_fn, SCHEDULES[kind](), **options)


def batches(size):
    """Batches of this rank: sample i is on rank i mod N."""
    own = [column[collectives.rank() :: collectives.size()] for column in data()]
    return [[column[k : k + size] for column in own] for k in range(0, len(own[0]), size)]


def numbers(step, epochs, size):
    found = []
    for _ in range(epochs):
        for update in step.over(batches(size)):
            found.append((update.samples, update.lr, round(update.loss, 9), step.samples))
    return found


def train(kind, parallel, tail, size, **options):
    step = step_of(kind, parallel, tail, **options)
    found = numbers(step, 3, size)
    step.flush()  # a rank counts its own samples of an open window
    return flat(step.model), found, copy.copy(step.counters.samples), step.optimizer.param_groups[0]["lr"]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("parallel", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("tail", ["update", "carry", "drop"])
def test_equal_to_one_process(two, kind, parallel, tail):
    alone = train(kind, "plain", tail, 5)
    assert len({samples for samples, *_ in alone[1]}) > 2
    for found in two.run(train, kind, parallel, tail, 2):
        torch.testing.assert_close(found[0], alone[0], rtol=1e-9, atol=1e-9)
        assert [row[0] for row in found[1]] == [row[0] for row in alone[1]]
        assert [row[3] for row in found[1]] == [row[3] for row in alone[1]]
        for row, expected in zip(found[1], alone[1], strict=True):
            assert row == pytest.approx(expected, rel=1e-8)
        assert found[2:] == alone[2:]


def test_ranks_of_unequal_length_and_a_skipped_update(two):
    alone = uneven()
    for found in two.run(uneven):
        assert [row[:2] for row in found] == [row[:2] for row in alone]


def uneven():
    """Rank 1 has no samples in the last windows; the loss of one sample is NaN."""

    def broken(model, batch):
        return torch.where(batch[2] == 6, torch.nan, loss_fn(model, batch))

    model, parallel = wrapped(net(), "plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = sw.Step(
        model, optimizer, broken, SCHEDULES["noise"](), on_nonfinite="skip", parallel=parallel, recheck=False
    )
    loader = batches(3)
    if collectives.size() > 1:
        loader = batches(2)[: 1 if collectives.rank() else None]
    else:  # the samples that the two ranks have
        keep = torch.tensor([i for i in range(17) if i % 2 == 0 or i < 4])
        columns = [column[keep] for column in data()]
        loader = [[column[k : k + 3] for column in columns] for k in range(0, len(keep), 3)]
    return [(update.samples, update.skipped) for update in step.over(loader)]


def fit(directory, kind, epochs, stop=None):
    class Stop:
        def on_update(self, trainer, update):
            if update.index == stop:
                trainer.stop("test")

    step = step_of(kind, "plain", "carry")
    if collectives.size() > 1:
        step = step_of(kind, "ddp", "carry")
    callbacks = [Stop(), sw.callbacks.ModelCheckpoint(every="1up")]
    trainer = sw.Trainer(step, Path(directory), callbacks, progress=False, device="cpu")
    trainer.fit(DataLoader(TensorDataset(*data()), batch_size=3), epochs=epochs, resume=True)
    return flat(trainer.model), step.counters.samples, step.optimizer.param_groups[0]["lr"], step.samples


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_resume_on_two_ranks_is_bit_identical(two, kind, tmp_path):
    whole = two.run(fit, str(tmp_path / "whole"), kind, 3)
    two.run(fit, str(tmp_path / "parts"), kind, 3, 3)
    two.run(fit, str(tmp_path / "parts"), kind, 2)  # with an open window at its end
    for found, expected in zip(two.run(fit, str(tmp_path / "parts"), kind, 3), whole, strict=True):
        assert torch.equal(found[0], expected[0])
        assert found[1:] == expected[1:]
    alone = fit(str(tmp_path / "alone"), kind, 3)
    assert alone[2:] == whole[0][2:]  # a rank counts its own samples of an open window
    torch.testing.assert_close(alone[0], whole[0][0], rtol=1e-9, atol=1e-9)
