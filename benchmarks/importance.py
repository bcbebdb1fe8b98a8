"""Updates to a given test accuracy with `sw.ImportanceSampler` and with uniform sampling, on digits and Fashion-MNIST.

python benchmarks/importance.py [--seeds 0 1 2] [--uniform]

Each run has the same data, weights, batch size and optimizer; the seed determines weights and draws. Test accuracy is
measured every EVERY updates; a run ends when it has reached the target or has made the largest number of updates. The
targets and learning rates were chosen with --seeds 100 --uniform, which trains with uniform sampling only. Times are
CPU seconds of updates and draws, on one thread, without evaluation. Fashion-MNIST: see examples/fashion_mnist.py.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fashion_mnist import load

EVERY = 10  # updates between two evaluations
SCORES = {
    "uniform": None,
    "gradient norms": "norms",
    "logit gradients": "logit_norm",
    "losses": "losses",
}
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # training x and y, test x and y


@dataclass
class Task:
    name: str
    data: Callable[[], Parts]
    model: Callable[[], nn.Module]
    lr: float
    batch_size: int
    targets: tuple[float, ...]
    updates: int  # at most


def digits() -> Parts:
    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1300], order[1300:]
    return pixels[train], labels[train], pixels[test], labels[test]


def fashion() -> Parts:
    x, y = load()
    test_x, test_y = load("t10k")
    return x[:10_000], y[:10_000], test_x[:5000], test_y[:5000]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


TASKS = [
    Task("digits", digits, mlp, 0.2, 16, (0.95, 0.97), 2500),
    Task("Fashion-MNIST", fashion, cnn, 0.05, 32, (0.8, 0.85), 5000),
]


def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch[0])
    gradients = logits.detach().softmax(1) - F.one_hot(batch[1], logits.shape[1])
    return F.cross_entropy(logits, batch[1], reduction="none"), {"logit_norm": gradients.norm(dim=1)}


def train(task: Task, parts: Parts, score: str | None, seed: int) -> tuple[list[tuple[int, float]], float]:
    """Updates and CPU seconds until each target, infinite if it was not reached; and the variance ratio."""
    x, y, test_x, test_y = parts
    torch.manual_seed(seed)
    data = TensorDataset(x, y)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    sampler = None
    if score is None:
        step = sw.Step(model, optimizer, loss_fn)
        loader = DataLoader(data, batch_size=task.batch_size, shuffle=True)
    else:
        sampler = sw.ImportanceSampler(data, task.batch_size, score=score, seed=seed)
        step = sw.Step(model, optimizer, loss_fn, transforms=[sw.weight("importance")])
        sampler.listen(step)
        loader = DataLoader(sw.Indexed(data), batch_sampler=sampler)
    reached: list[tuple[int, float]] = []
    seconds = 0.0
    updates = 0
    while updates < task.updates and len(reached) < len(task.targets):
        start = time.process_time()
        for update in step.over(loader):
            if sampler is not None:
                sampler.add(update)
            updates += 1
            if updates % EVERY == 0:
                seconds += time.process_time() - start
                with torch.no_grad():
                    accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
                while len(reached) < len(task.targets) and accuracy >= task.targets[len(reached)]:
                    reached.append((updates, seconds))
                if len(reached) == len(task.targets) or updates >= task.updates:
                    break
                start = time.process_time()
        else:
            seconds += time.process_time() - start
    reached += [(task.updates + 1, float("inf"))] * (len(task.targets) - len(reached))
    return reached, 1.0 if sampler is None else variance_ratio(model, x, y, sampler.probabilities)


def variance_ratio(model: nn.Module, x: Tensor, y: Tensor, probabilities: Tensor) -> float:
    """Variance of the gradient of a drawn sample, divided by that of a uniformly drawn one, at the end of a run."""
    norms = []
    total = torch.zeros(())
    for start in range(0, len(y), 1000):
        losses = F.cross_entropy(model(x[start : start + 1000]), y[start : start + 1000], reduction="none")
        g = sw.gradients(losses, model)
        norms.append(g.norms().double())
        total = total + torch.cat([part.flatten() for part in g.sum().values()]).double()
    squares = torch.cat(norms).square()
    mean_square = float((total / len(y)).square().sum())
    drawn = float((squares / probabilities).sum()) / len(y) ** 2
    return (drawn - mean_square) / (float(squares.mean()) - mean_square)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--uniform", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in TASKS:
        parts = task.data()
        print(f"\n{task.name}: {len(parts[0]):,} samples, batches of {task.batch_size}, seeds {options.seeds}\n")
        print("| score | " + " | ".join(f"updates to {t:.0%} | CPU s" for t in task.targets) + " | variance ratio |")
        print("|---|" + "---|" * (2 * len(task.targets) + 1), flush=True)
        names = ["uniform"] if options.uniform else list(SCORES)
        results: dict[str, list[Any]] = {name: [] for name in names}
        for seed in options.seeds:
            for name in names:  # interleaved, so that all have the same load of the machine
                results[name].append(train(task, parts, SCORES[name], seed))
        for name in names:
            cells = []
            for k in range(len(task.targets)):
                counts = [reached[k][0] for reached, _ in results[name]]
                seconds = statistics.median(reached[k][1] for reached, _ in results[name])
                cells += [" / ".join(map(str, counts)), f"{seconds:.2f}"]
            ratio = statistics.median(ratio for _, ratio in results[name])
            print(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
