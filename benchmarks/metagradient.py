"""Metagradients of an MLP of 2,410 parameters on digits: LDS beside other methods, and time in trainings.

    python benchmarks/metagradient.py            table of docs/attribution-measurements.md, about ten minutes

Outcomes are losses of queries after retraining without 5 % or 50 % of the samples, with the same initial parameters,
order and denominators: weight 0 for the samples that are left out. "other seeds": the same with other initial
parameters and another order, which no score of one training can predict completely.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import evaluate

TRAIN, QUERIES, EPOCHS, BATCH, SUBSETS = 1000, 50, 20, 50, 40
RATE, MOMENTUM = 0.05, 0.9
SEEDS = (0, 1)

digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32)
Y = torch.tensor(digits.target)
DATA = TensorDataset(X[:TRAIN], Y[:TRAIN])
LOADER = DataLoader(sw.Indexed(DATA), batch_size=BATCH, shuffle=True)
TEST = X[-QUERIES:], Y[-QUERIES:]


def make_step(seed: int, *transforms: Any) -> sw.Step:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return sw.Step(model, optimizer, nn.CrossEntropyLoss(), transforms=transforms)


def train(seed: int, run: Path | None = None, weights: Tensor | None = None) -> nn.Module:
    step = make_step(seed, *([] if weights is None else [sw.weight(weights, index="id")]))
    sw.Trainer(step, run, seed=seed, progress=False, device="cpu").fit(LOADER, epochs=EPOCHS)
    return step.model


def losses(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model.eval()(TEST[0]), TEST[1], reduction="none")


def outcomes(subsets: Tensor, seed: int, fresh: bool) -> Tensor:
    """Minus the losses of the queries, (subsets, queries)."""
    rows = []
    for k, subset in enumerate(subsets):
        weights = torch.zeros(TRAIN)
        weights[subset] = 1
        rows.append(-losses(train(1000 + 1000 * seed + k if fresh else seed, weights=weights)))
    return torch.stack(rows)


def scores(seed: int, run: Path) -> dict[str, Tensor]:
    """Scores (queries, samples), positive for a sample that lowers the loss."""
    model = train(seed, run)
    batches, queries = list(DataLoader(DATA, batch_size=100)), [TEST]
    loss = nn.CrossEntropyLoss()
    damping = (1 - MOMENTUM) / (RATE * EPOCHS * TRAIN / BATCH)
    exact = sw.attribution.hessian(model, loss, batches)
    ekfac = sw.ekfac(model, loss, batches)
    return {
        "dot product": sw.influence(model, loss, batches, queries),
        "EK-FAC": sw.influence(model, loss, batches, queries, curvature=ekfac),
        "metagradient": -sw.metagradient(run, lambda: make_step(seed), LOADER, queries, device="cpu"),
    }


def seconds(run: Path) -> None:
    """Print the time of metagradients in trainings, interleaved."""
    times: dict[str, list[float]] = {}
    train(0, run)
    for _ in range(5):
        for name, call in {
            "training": lambda: train(0),
            "1 query": lambda: sw.metagradient(run, lambda: make_step(0), LOADER, [(TEST[0][:1], TEST[1][:1])], device="cpu"),
            "50 queries": lambda: sw.metagradient(run, lambda: make_step(0), LOADER, [TEST], device="cpu"),
            "50 queries, snapshots": lambda: sw.metagradient(
                run, lambda: make_step(0), LOADER, [TEST], every=20, device="cpu"
            ),
        }.items():
            began = time.perf_counter()
            call()
            times.setdefault(name, []).append(time.perf_counter() - began)
    base = median(times["training"])
    for name, values in times.items():
        print(f"{name:24} {median(values):6.2f} s  {median(values) / base:5.2f} trainings", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        seconds(Path(folder) / "time")
