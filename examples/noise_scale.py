"""Accuracy of the gradient noise scale: estimates from random batches compared with the true value over all digits.

    python examples/noise_scale.py                     # 50 batches of each size, a few seconds
    python examples/noise_scale.py --batches 10000     # table of docs/diagnostics-measurements.md

The digits are the whole population: G is the mean of their gradients and tr Σ the total variance. Batches are drawn
with replacement, so that the estimates of |G|² and tr Σ are unbiased. Needs scikit-learn.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import samplewise as sw

DECAY = 0.99
HEAD = f"{'batch':>5}{'trace':>16}{'signal':>16}{'below 0':>10}{'scale: median, 80 %':>24}{'running':>16}"


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> sw.Gradients:
    return sw.gradients(F.cross_entropy(model(x), y, reduction="none"), model)


def truth(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return tr Σ and |G|², computed from all per-sample gradients."""
    rows = torch.cat([rows.flatten(1) for rows in gradients(model, x, y).full().values()], 1)
    mean = rows.mean(0)
    return (rows - mean).square().sum(1).mean().item(), mean.square().sum().item()


def estimates(model: nn.Module, x: Tensor, y: Tensor, size: int, batches: int) -> Iterator[tuple[float, float, float]]:
    """Yield trace and signal of each batch, and the running estimate of the scale after it."""
    running, generator = sw.NoiseScale(decay=DECAY), torch.Generator().manual_seed(size)
    for _ in range(batches):
        some = torch.randint(len(y), (size,), generator=generator)
        g = gradients(model, x[some], y[some])
        noise = sw.noise_scale(g)
        yield noise.trace, noise.signal, running.add(g).scale


def line(found: Tensor, trace: float, signal: float) -> str:
    """Format one row; values are multiples of the true values."""
    traces, signals, running = found[:, 0] / trace, found[:, 1] / signal, found[:, 2] / (trace / signal)
    low, middle, high = (traces / signals).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    below, settled = (signals < 0).double().mean(), running[len(found) // 2 :]  # second half: after warm-up
    ratio = f"{middle:.2f}, {low:.2f} to {high:.2f}"
    return f"{spread(traces):>16}{spread(signals):>16}{below:10.1%}{ratio:>24}{spread(settled):>16}"


def spread(values: Tensor) -> str:
    return f"{values.mean():.3f} ± {values.std():.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help a network of this size
    torch.set_default_dtype(torch.float64)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), samples=64)
    for epoch in range(21):
        if epoch in (0, 5, 20):
            trace, signal = truth(model, x, y)
            print(f"\nafter {epoch} epochs: tr Σ {trace:.3g}, |G|² {signal:.3g}, scale {trace / signal:.0f}")
            print(HEAD)
            for size in (16, 64, 256):
                found = torch.tensor(list(estimates(model, x, y, size, options.batches)))
                print(f"{size:5}{line(found, trace, signal)}")
        order = torch.randperm(len(y))
        step.run([(x[order], y[order])])


if __name__ == "__main__":
    main()
