"""`Trainer` on two and three ranks: what one process would do, to rounding; one log; all leave together."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise import ranks
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
        return math.isclose(found, expected, rel_tol=1e-9)
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
