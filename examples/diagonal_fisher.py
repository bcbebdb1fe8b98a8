"""Diagonal of the empirical Fisher matrix of three small CNNs, compared with a loop over single samples.

    python examples/diagonal_fisher.py                                 # 256 images, a few seconds
    python examples/diagonal_fisher.py --samples 4096 --rounds 5       # table of docs/diagnostics-measurements.md

The images are Fashion-MNIST, or random noise of the same shape if it is not installed.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from fashion_mnist import load
from torch import Tensor, nn

import samplewise as sw


def strided() -> nn.Sequential:
    first, second = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def pooled(kernel: int, padding: int, side: int) -> nn.Sequential:
    """Two convolutions with max pooling. `side`: height and width of the input of the linear layer."""
    first, second = nn.Conv2d(1, 16, kernel, padding=padding), nn.Conv2d(16, 32, kernel, padding=padding)
    body = (first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * side**2, 10))


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "3×3, stride 2": strided,
    "5×5, pooling": lambda: pooled(5, 0, 4),
    "3×3, padding, pooling": lambda: pooled(3, 1, 7),
}


def pictures(samples: int) -> tuple[str, Tensor, Tensor]:
    try:
        x, y = load()
        return "Fashion-MNIST", x[:samples], y[:samples]
    except FileNotFoundError:
        return "noise", torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in zip(x.split(1), y.split(1), strict=True):
        model.zero_grad()
        loss_fn(model, batch).sum().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None  # for type checkers
            total[name] += p.grad**2 / len(y)
    return total


def epoch(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        model.zero_grad()
        loss_fn(model, batch).mean().backward()


def seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Largest relative error of any parameter, by norm."""
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in true.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name, x, y = pictures(options.samples)
    batches = list(zip(x.split(options.batch), y.split(options.batch), strict=True))
    print(f"{name}, {len(y)} images in batches of {options.batch}, one thread; CPU seconds")
    print(f"{'':24}{'epoch':>9}{'fisher':>9}{'loop':>9}{'loop/fisher':>13}{'error':>10}{'loop error':>13}")
    for name, make in NETS.items():
        model = make().eval()
        true = loop(copy.deepcopy(model).double(), x.double(), y)
        errors = error(sw.fisher(model, loss_fn, batches), true), error(loop(model, x, y), true)
        jobs = partial(epoch, model, batches), partial(sw.fisher, model, loss_fn, batches), partial(loop, model, x, y)
        times = [[seconds(job) for job in jobs] for _ in range(options.rounds)]
        plain, fisher, one = (median(column) for column in zip(*times, strict=True))
        print(f"{name:24}{plain:9.2f}{fisher:9.2f}{one:9.2f}{one / fisher:13.1f}{errors[0]:10.0e}{errors[1]:13.0e}")


if __name__ == "__main__":
    main()
