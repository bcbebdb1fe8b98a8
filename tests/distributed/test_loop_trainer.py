"""`Trainer` on two and three ranks: what one process would do, to rounding; one log; all leave together."""

import json
import math
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise import ranks
from samplewise.loop.callbacks import EarlyStopping, ModelCheckpoint
from samplewise.loop.loggers import CSV

SAMPLES = 23


def data(samples=SAMPLES):
    own = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 5, generator=own, dtype=torch.float64), torch.randint(0, 3, (samples,), generator=own)
    )


def loader(samples=SAMPLES, **options):
    return DataLoader(data(samples), **{"batch_size": 4, "shuffle": True, **options})


def trainer(run=None, callbacks=(), *, samples=6, lr=0.3, transforms=(), seed=1, **options):
    torch.manual_seed(7 + ranks.rank())  # the ranks' models are made equal by the step
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=samples, transforms=transforms, strategy="ddp")
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=seed, **options)


def accuracy(outputs, batch):
    return outputs.argmax(1) == batch[1]


def parameters(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def log(run):
    """Without times."""
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    without = ("seconds", "samples_per_second", "phases", "memory")
    return [{name: value for name, value in line.items() if name not in without} for line in lines]


def close(found, expected):
    """The same things, and numbers to rounding."""
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == expected


# ------------------------------------------------------------------------------------------------------ what one would


class Largest:
    """A metric that knows nothing of ranks."""

    def __init__(self):
        self.reset()

    def update(self, outputs, target):
        self.found = max(self.found, float(outputs.max()))
        self.batches.append(len(target))

    def compute(self):
        return {"value": self.found, "samples": sum(self.batches)}

    def reset(self):
        self.found, self.batches = -math.inf, []


def fitted(run, samples=6, **options):
    import torchmetrics

    metrics = {
        "accuracy": accuracy,
        "largest": Largest(),
        "torchmetrics": torchmetrics.Accuracy(task="multiclass", num_classes=3),
    }
    made = trainer(run, [CSV()], samples=samples, metrics=metrics, log_every=2, **options)
    reason = made.fit(loader(), validate=loader(11, batch_size=3), epochs=3)
    return parameters(made), reason, made.evaluate(loader(7)), made.step.counters


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    return run, fitted(run)


@pytest.mark.parametrize("team", ["two", "three"])
def test_ranks_do_what_one_process_does(team, request, alone, tmp_path):
    run, (expected, reason, metrics, counters) = alone
    found = request.getfixturevalue(team).run(fitted, tmp_path / "run")
    for parameters, *rest in found:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(parameters, found[0][0])
        assert rest[0] == reason and close(rest[1], metrics)
        assert (rest[2].updates, rest[2].samples, rest[2].epochs) == (counters.updates, counters.samples, 3)
    assert close(log(tmp_path / "run"), log(run))
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert there == sorted(path.name for path in run.iterdir())
    assert len((tmp_path / "run" / "train.csv").read_text().splitlines()) == len(
        (run / "train.csv").read_text().splitlines()
    )


# ------------------------------------------------------------------------------------------------------- going on


class Order:
    """Which samples went into each update on this rank."""

    def __init__(self):
        self.seen, self.updates = [], []

    def on_update(self, update):
        self.updates.append(self.seen)
        self.seen = []


def going_on(run, until, resume=True, dropout=0.0, **options):
    """Trains until so many updates are made; says what the parameters are and which samples went into each update."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    order = Order()

    def loss_fn(model, batch):
        inputs, targets, ids = batch
        order.seen += ids.tolist() if model.training and torch.is_grad_enabled() else []
        return nn.functional.cross_entropy(model(inputs), targets, reduction="none")

    step = sw.Step(
        model, optimizer, loss_fn, 6, scheduler=scheduler, transforms=[sw.clip(1.0)], audit=False, strategy="ddp"
    )
    callbacks = [order, EarlyStopping("loss", patience=9), ModelCheckpoint(every="2up")]
    made = sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=1, log_every=2, **options)
    training, validation = (sw.Indexed(data(samples)) for samples in (SAMPLES, 11))
    training, validation = DataLoader(training, batch_size=4, shuffle=True), DataLoader(validation, batch_size=3)
    made.fit(training, validation, updates=until, resume=resume)
    return parameters(made), order.updates


def windows(found):
    """The samples of each update, of all ranks."""
    return [sorted(chain(*shares)) for shares in zip(*(updates for _, updates in found), strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return run, going_on(run, 12)


@pytest.mark.parametrize("stop", [2, 3, 4, 6])  # in an epoch of four updates, at its end, and in the next
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2), (2, 3)])
def test_others_go_on_where_ranks_have_left_off(before, after, stop, two, three, undisturbed, tmp_path):
    run, (expected, updates) = undisturbed
    start = {1: lambda *given: [going_on(*given)], 2: lambda *given: two.run(going_on, *given)}
    start[3] = lambda *given: three.run(going_on, *given)
    begun = start[before](tmp_path / "run", stop)
    ended = start[after](tmp_path / "run", 12)
    for found, _ in ended:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert windows(begun) + windows(ended) == windows([(expected, updates)])
    assert close(log(tmp_path / "run"), log(run))


def test_as_many_ranks_go_on_to_the_last_bit(two, tmp_path):
    whole = two.run(going_on, tmp_path / "whole", 12, True, 0.3)
    for stop in (3, 7):
        two.run(going_on, tmp_path / "parts", stop, True, 0.3)
    parts = two.run(going_on, tmp_path / "parts", 12, True, 0.3)
    assert all(torch.equal(found, expected) for (found, _), (expected, _) in zip(parts, whole, strict=True))
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert not torch.equal(whole[0][0], going_on(tmp_path / "alone", 12, True, 0.3)[0])  # dropout was there
