"""`samplewise demo`: a tenth of the labels is wrong; which?

Digits that ship inside scikit-learn, a small net, a minute. Then what no other library shows: the samples whose
gradients stand out, how many of the wrong labels are among them, and what it costs to know.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.loop.metrics import accuracy

SHARE, EPOCHS, BATCH = 0.1, 12, 64
Batch = tuple[Tensor, Tensor]


def demo() -> None:
    """Find wrong labels by their gradients.

    Trains a small net on digits of which a tenth have a wrong label, and shows which ones stand out and what it costs
    to know. Takes less than a minute, on data that ship inside scikit-learn. The run is kept under runs/.
    """
    torch.manual_seed(0)
    x, y, wrong, held_out = digits()
    print(f"Training on {len(y)} digits of 8×8 pixels, {int(wrong.sum())} of which have a wrong label.\n")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    run = free(Path("runs"), "demo")
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn, samples=BATCH)
    trainer = sw.Trainer(step, run, metrics={"accuracy": accuracy}, log_every=10)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    trainer.fit(loader, validate=DataLoader(TensorDataset(*held_out), batch_size=256), epochs=EPOCHS)

    model.eval()
    losses, norms = measured(model, x, y)
    show_unusual(y, wrong, losses, norms)
    show_found(wrong, losses, norms)
    show_price(model, x, y)
    show_report(run)


def digits() -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Pixels, labels of which some are wrong, which ones; and a clean fifth for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the demo needs scikit-learn: pip install 'samplewise[demo]'") from None
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    held_out, n = (x[:360], y[:360]), len(y) - 360
    x, y = x[360:], y[360:].clone()
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n)[: round(SHARE * n)]] = True
    y[wrong] = (y[wrong] + torch.randint(1, 10, (int(wrong.sum()),))) % 10
    return x, y, wrong, held_out


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm of every sample."""
    losses = loss_fn(model, (x, y))
    return losses.detach(), sw.gradients(losses, model).norms()


def show_unusual(y: Tensor, wrong: Tensor, losses: Tensor, norms: Tensor) -> None:
    print("\nThe samples whose gradients stand out")
    print("  sample  label   norm   loss")
    for i in norms.argsort(descending=True)[:8].tolist():
        mark = "  wrong label" if wrong[i] else ""
        print(f"{i:8}{int(y[i]):7}{norms[i].item():7.2f}{losses[i].item():7.2f}{mark}")


def show_found(wrong: Tensor, losses: Tensor, norms: Tensor) -> None:
    print("\nHow many of the first k have a wrong label")
    print("       k   by norm   by loss   by chance")
    for k in (20, 50, int(wrong.sum())):
        by_norm, by_loss = (wrong[by.argsort(descending=True)[:k]].float().mean() for by in (norms, losses))
        print(f"{k:8}{by_norm:10.0%}{by_loss:10.0%}{wrong.float().mean():12.0%}")


def show_price(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Updates with and without the norm of every sample, taking turns."""
    batch = (x[:512], y[:512])
    steps = [
        sw.Step(twin, sw.sgd(1e-3), loss_fn, record=record, audit=False)
        for twin, record in ((copy.deepcopy(model).train(), ()), (copy.deepcopy(model).train(), ("norms",)))
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(30):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
    plain, known = map(min, seconds)  # whatever else this machine does, it did least of it then
    print(
        f"\nAn update of 512 samples takes {plain * 1e3:.1f} ms; with the norm of each {known / plain:.2f} times that "
        "(`make bench` measures larger nets)."
    )


def show_report(run: Path) -> None:
    try:
        from samplewise.report.page import write_report

        print(f"The curves of this run: {write_report(run)}")
    except ImportError as missing:
        print(missing)


def free(directory: Path, name: str) -> Path:
    """The first of name, name-2, name-3, ... that is not taken."""
    number = 1
    while (path := directory / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


if __name__ == "__main__":
    demo()
