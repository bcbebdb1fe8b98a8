"""Table of online learning: `learn_one` per second and progressive accuracy, next to deep-river.

Both train the same network from the same weights, with the same optimizer, learning rate and scaled features: dicts of
river.datasets in their original order, each sample predicted before it is learned. Speed: blocks of updates of both
take turns in one process, with one thread; compilation is over before. If deep-river cannot be imported, the plain loop
takes its place: zero_grad, backward, optimizer.step on a tensor that is made of the dict.

It needs river 0.25 or newer. deep-river 0.3.4 also needs pandas, sortedcontainers and pytest, and is installed with
--no-deps beside river 0.25. python online.py [BLOCKS] prints the table; no other process should run.
"""

import copy
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from river import datasets, preprocessing
from torch import nn

import samplewise as sw
from samplewise.online import Online

try:
    from deep_river.classification import Classifier
except ImportError:
    Classifier = None

BLOCK = 250  # updates
WARM_UP = 1500  # updates before the measurement, in which updates are compiled
RATES = {"Phishing": 0.01, "Bananas": 0.01}
HIDDEN = 16

Sample = tuple[dict[str, float], bool]


class Net(nn.Module):
    """Network of both libraries; deep-river needs a class with keyword arguments."""

    def __init__(self, n_features: int = 2, **settings: Any):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class PlainLoop:
    """One update of the plain loop."""

    def __init__(self, module: nn.Module, lr: float):
        self.module = module
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.criterion = nn.CrossEntropyLoss()

    def learn_one(self, x: dict[str, float], y: bool) -> None:
        row = torch.tensor([[x[name] for name in sorted(x)]], dtype=torch.float32)
        self.optimizer.zero_grad()
        self.criterion(self.module(row), torch.tensor([int(y)])).backward()
        self.optimizer.step()

    def predict_one(self, x: dict[str, float]) -> bool:
        with torch.inference_mode():
            row = torch.tensor([[x[name] for name in sorted(x)]], dtype=torch.float32)
            return bool(self.module(row).argmax(1).item())


def samplewise(module: nn.Module, lr: float) -> Online:
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    return Online(sw.Step(module, optimizer, nn.CrossEntropyLoss(), samples=1, compile=True), classes=[False, True])


def deep_river(module: nn.Module, lr: float) -> Any:
    if Classifier is None:
        return PlainLoop(module, lr)
    return Classifier(module=module, loss_fn="cross_entropy", optimizer_fn="adam", lr=lr, seed=0)


def scaled(name: str) -> list[Sample]:
    """Samples of a dataset, each scaled with the mean and variance of those up to it."""
    scaler = preprocessing.StandardScaler()
    samples = []
    for x, y in getattr(datasets, name)():
        scaler.learn_one(x)
        samples.append((scaler.transform_one(x), bool(y)))
    return samples


def network(samples: list[Sample]) -> Net:
    torch.manual_seed(0)
    return Net(n_features=len(samples[0][0]))


def accuracy(model: Any, samples: list[Sample]) -> float:
    correct = 0
    for x, y in samples:
        correct += model.predict_one(x) == y
        model.learn_one(x, y)
    return correct / len(samples)


def endless(samples: list[Any]) -> Iterator[Any]:
    while True:
        yield from samples


def seconds(learn: Callable[[Any, bool], Any], block: list[Any]) -> float:
    started = perf_counter()
    for x, y in block:
        learn(x, y)
    return (perf_counter() - started) / len(block)


def measure(name: str, blocks: int) -> tuple[list[str], str]:
    """Row of a dataset, and the state of compilation."""
    samples = scaled(name)
    module = network(samples)
    models = [samplewise(copy.deepcopy(module), RATES[name]), deep_river(copy.deepcopy(module), RATES[name])]
    correct = [accuracy(model, samples) for model in models]
    by_row = samplewise(copy.deepcopy(module), RATES[name])
    rows = [(torch.tensor(list(x.values()), dtype=torch.float32), y) for x, y in samples]
    contenders = [(models[0], endless(samples)), (by_row, endless(rows)), (models[1], endless(samples))]
    times: list[list[float]] = [[], [], []]
    for model, stream in contenders:
        seconds(model.learn_one, [next(stream) for _ in range(WARM_UP)])
    for _ in range(blocks):
        for (model, stream), measured in zip(contenders, times, strict=True):
            measured.append(seconds(model.learn_one, [next(stream) for _ in range(BLOCK)]))
    rates = [f"{1 / statistics.median(measured):,.0f}" for measured in times]
    ratio = statistics.median(other / own for own, other in zip(times[0], times[2], strict=True))
    row_ratio = statistics.median(other / own for own, other in zip(times[1], times[2], strict=True))
    percents = [f"{100 * share:.2f} %" for share in correct]
    return [name, *rates, f"{ratio:.1f}", f"{row_ratio:.1f}", *percents], models[0].step.compiled


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    other = "plain loop" if Classifier is None else "deep-river"
    header = ["dataset", "learn_one/s, dicts", "learn_one/s, tensors", f"{other}, dicts", "times", "times, tensors"]
    print(" | ".join([*header, "accuracy", f"accuracy, {other}"]))
    for name in RATES:
        row, compiled = measure(name, blocks)
        print(" | ".join(row), f"({compiled})", flush=True)


if __name__ == "__main__":
    main()
