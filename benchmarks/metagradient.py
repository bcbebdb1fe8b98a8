"""Metagradients of an MLP of 2,410 parameters on digits: LDS beside other methods, and time in trainings.

    python benchmarks/metagradient.py            tables of docs/attribution-measurements.md, about ten minutes

Outcomes are losses of queries after retraining without 5 % or 50 % of the samples, with the same initial parameters,
order and denominators: weight 0 for the samples that are left out. "other seeds": the same with other initial
parameters and another order, which no score of one training can predict completely.
"""

from __future__ import annotations

import tempfile
import time
import warnings
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


def outcomes(subsets: Tensor, seeds: list[int]) -> Tensor:
    """Minus the losses of the queries, (subsets, queries). seeds: of each training."""
    rows = []
    for seed, subset in zip(seeds, subsets, strict=True):
        weights = torch.zeros(TRAIN)
        weights[subset] = 1
        rows.append(-losses(train(seed, weights=weights)))
    return torch.stack(rows)


def scores(seed: int, run: Path) -> dict[str, Tensor]:
    """Scores (queries, samples), positive for a sample that lowers the loss."""
    model = train(seed, run)
    batches, queries = list(DataLoader(DATA, batch_size=100)), [TEST]
    loss = nn.CrossEntropyLoss()
    ekfac = sw.ekfac(model, loss, batches)
    return {
        "dot product": sw.influence(model, loss, batches, queries),
        "EK-FAC": sw.influence(model, loss, batches, queries, curvature=ekfac),
        "metagradient": -sw.metagradient(run, lambda: make_step(seed), LOADER, queries, device="cpu"),
    }


def quality(folder: Path) -> None:
    """Print the LDS of each method, for outcomes with the same seed and with other seeds."""
    by_seed = [scores(seed, folder / f"run-{seed}") for seed in SEEDS]
    for left_out in (0.05, 0.5):
        subsets = evaluate.subsets(TRAIN, SUBSETS, fraction=1 - left_out, seed=0)
        fresh = [outcomes(subsets, [first + k for k in range(SUBSETS)]) for first in (1000, 2000)]
        targets = {f"seed {seed}": outcomes(subsets, [seed] * SUBSETS) for seed in SEEDS}
        for name in by_seed[0]:
            for seed, methods in zip(SEEDS, by_seed, strict=True):
                same = evaluate.lds(methods[name], subsets, targets[f"seed {seed}"])
                other = evaluate.lds(methods[name], subsets, torch.stack(fresh))
                print(
                    f"{left_out:4.0%} left out  {name:14} seed {seed}  same {same.mean:.3f} ± {same.standard_error:.3f}"
                    f"  other {other.mean:.3f} ± {other.standard_error:.3f}, ceiling {other.ceiling:.3f}",
                    flush=True,
                )


def seconds(run: Path) -> None:
    """Print the CPU time of metagradients in trainings, interleaved."""
    times: dict[str, list[float]] = {}
    train(0, run)

    def call(queries: int, every: int | None = None) -> Tensor:
        batch = TEST[0][:queries], TEST[1][:queries]
        return sw.metagradient(run, lambda: make_step(0), LOADER, [batch], every=every, device="cpu")

    calls = {
        "training": lambda: train(0),
        "1 query": lambda: call(1),
        "10 queries": lambda: call(10),
        "50 queries": lambda: call(50),
        "50 queries, snapshots": lambda: call(50, 20),
    }
    for _ in range(5):
        for name, function in calls.items():
            began = time.process_time()
            function()
            times.setdefault(name, []).append(time.process_time() - began)
    base = median(times["training"])
    for name, values in times.items():
        print(f"{name:24} {median(values):6.2f} s  {median(values) / base:5.2f} trainings", flush=True)


def smoothness(folder: Path) -> None:
    """Print the LDS at 5 % left out by learning rate, and the warning of sw.metagradient, if there is one."""
    global RATE, TEST
    TEST = X[TRAIN : TRAIN + QUERIES], Y[TRAIN : TRAIN + QUERIES]
    subsets = evaluate.subsets(TRAIN, 16, fraction=0.95, seed=9)
    for RATE in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        run = folder / f"rate-{RATE}"
        train(5, run)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = -sw.metagradient(run, lambda: make_step(5), LOADER, [TEST], device="cpu")
        factors = [str(warning.message).partition("grow by ")[2][:20] for warning in caught]
        found = evaluate.lds(values, subsets, outcomes(subsets, [5] * 16))
        print(f"learning rate {RATE}: LDS {found.mean:.3f}  {factors}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds(Path(folder) / "time")
        quality(Path(folder))
        smoothness(Path(folder))
