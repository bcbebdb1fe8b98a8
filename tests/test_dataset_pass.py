"""Passes over a dataset: what is accepted as a loader."""

import pytest
import torch
from plain_loop import batches, loss_fn, make
from torch import nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.attribution import ProjectedStore, evaluate, margin

MODEL, X, Y = make()
DATASET = TensorDataset(X, Y)
LOADER = batches(X, Y, 4)


def new_step(loss_fn=loss_fn):
    model = make()[0]
    return sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)


def project(directory):
    store = ProjectedStore(directory, 4)
    store.fill(MODEL, loss_fn, LOADER)
    store.project(MODEL, loss_fn, DATASET)


PASSES = {
    "over": lambda _: next(new_step().over(DATASET)),
    "fit": lambda _: sw.Trainer(new_step(), None).fit(DATASET, epochs=1),
    "evaluate": lambda _: sw.Trainer(new_step(), None).evaluate(DATASET),
    "predict": lambda _: sw.Trainer(new_step(), None).predict(DATASET),
    "scan": lambda _: sw.scan(MODEL, loss_fn, DATASET),
    "suspects": lambda _: sw.suspects(MODEL, loss_fn, DATASET),
    "suspects with ids": lambda _: sw.suspects(MODEL, loss_fn, DATASET, ids=2),
    "fisher": lambda _: sw.fisher(MODEL, loss_fn, DATASET),
    "influence of train": lambda _: sw.influence(MODEL, loss_fn, DATASET, LOADER),
    "influence on queries": lambda _: sw.influence(MODEL, loss_fn, LOADER, DATASET),
    "trak of train": lambda _: sw.trak(MODEL, margin, DATASET, LOADER, 4),
    "trak on queries": lambda _: sw.trak(MODEL, margin, LOADER, DATASET, 4),
    "ekfac": lambda _: sw.ekfac(MODEL, loss_fn, DATASET),
    "hessian": lambda _: sw.attribution.hessian(MODEL, loss_fn, DATASET),
    "store.fill": lambda tmp: ProjectedStore(tmp, 4).fill(MODEL, loss_fn, DATASET),
    "store.project": project,
    "baselines": lambda _: evaluate.baselines(MODEL, loss_fn, LOADER, DATASET),
    "retrain": lambda tmp: evaluate.retrain(new_step, DATASET, [torch.arange(6)], DATASET, tmp, epochs=1),
    "removal": lambda tmp: evaluate.removal(torch.ones(2, 12), 3, new_step, DATASET, DATASET, tmp, epochs=1),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_dataset_in_place_of_a_loader(name, tmp_path):
    message = r"^a loader must be an iterable of batches; found a TensorDataset, whose items are single samples"
    with pytest.raises(sw.BatchError, match=message):
        PASSES[name](tmp_path)


@pytest.mark.parametrize("batch", [DATASET, iter(LOADER)], ids=["dataset", "iterator"])
def test_check_takes_one_batch(batch):
    with pytest.raises(TypeError, match=r"must be one batch; found a (TensorDataset|list_iterator)\. Pass next\(iter"):
        sw.check(MODEL, loss_fn, batch)


def squared_error(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square()


SAMPLES = {
    "tensors": [(x, y) for x, y in zip(X, Y, strict=True)],
    "numbers": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "lists": [(x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)],
    "vectors": [(x, y[None]) for x, y in zip(X, Y, strict=True)],
}


@pytest.mark.parametrize("losses", [squared_error, nn.CrossEntropyLoss()], ids=["function", "criterion"])
@pytest.mark.parametrize("samples", SAMPLES)
def test_single_samples_in_place_of_batches(samples, losses):
    shape = r"\(1,\)" if samples == "vectors" else r"\(\)"
    message = (
        rf"must yield batches, .* entries of shape \(5,\) and {shape}, which look like a single sample, and \w+ in"
    )
    for consume in (
        lambda data: next(new_step(losses).over(data)),
        lambda data: next(sw.scan(MODEL, losses, data)),
        lambda data: sw.Trainer(new_step(losses), None).evaluate(data),
    ):
        with pytest.raises(sw.BatchError, match=message):
            consume(iter(SAMPLES[samples]))


def test_other_errors_of_a_loss_function_stay():
    def fails(model, batch):
        raise TypeError("my own")

    for batch in (
        (X, Y),
        (X, Y, 0.5),  # a constant beside samples
        {"nodes": X, "edges": torch.ones(2, 7), "labels": Y[:3]},
        X,
    ):
        with pytest.raises(TypeError, match=r"^my own$"):
            next(sw.scan(MODEL, fails, [batch]))
