"""`samplewise demo`: find wrong labels in a small image dataset.

Trains a small model on the digits of scikit-learn, a tenth of them with a wrong label, in less than a minute. Then
prints the most suspicious samples, how many wrong labels are among them, the gradient noise scale beside the batch
size, and the cost of per-sample norms.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.diagnostics.profile import interleaved_seconds
from samplewise.loop.evaluation import accuracy

WRONG_SHARE = 0.1  # of labels that are made wrong
EPOCHS = 12
BATCH = 64
Batch = tuple[Tensor, Tensor]


def run_demo() -> None:
    """Train with a ledger and a noise scale, and print what they show."""
    torch.manual_seed(0)
    x, y, wrong, validation = digits()
    print(f"Training on {len(y)} digits of 8×8 pixels, {int(wrong.sum())} of which have a wrong label.\n")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    run = unused_directory(Path("runs"), "demo")
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss(), samples=BATCH)
    noise = sw.NoiseScale()
    trainer = sw.Trainer(step, run, [sw.Ledger(), noise], metrics={"accuracy": accuracy}, log_every="10up")
    loader = DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=BATCH, shuffle=True)
    trainer.fit(loader, validate=DataLoader(TensorDataset(*validation), batch_size=256), epochs=EPOCHS)

    visits = sw.read_ledger(run)
    print(f"\nLedger: {len(visits):,} visits with the columns {', '.join(visits.column_names)}. The last three:")
    last = visits.slice(len(visits) - 3).select(["id", "epoch", "loss", "norm", "margin"]).to_pylist()
    print("  sample  epoch   loss   norm  margin")
    for row in last:
        print(f"{row['id']:8}{row['epoch']:7}{row['loss']:7.2f}{row['norm']:7.2f}{row['margin']:8.2f}")
    suspects = sw.suspects(visits)
    print(f"\nMost suspicious samples by mean {' and '.join(suspects.score_names)} over all visits")
    print("  sample  label   loss   norm  margin")
    for row in suspects.order[:8].tolist():
        i = int(suspects.ids[row])
        scores = {name: s[row].item() for name, s in suspects.scores.items()}
        mark = "  wrong label" if wrong[i] else ""
        print(f"{i:8}{int(y[i]):7}{scores['loss']:7.2f}{scores['norm']:7.2f}{-scores['margin']:8.2f}{mark}")
    print("\nShare of wrong labels among the k most suspicious samples")
    print("       k   by margin   by norm   by loss   by chance")
    rankings = [wrong[suspects.ids[suspects.scores[by].argsort(descending=True)]] for by in ("margin", "norm", "loss")]
    for k in (20, 50, int(wrong.sum())):
        margin, norm, loss = (ranked[:k].float().mean() for ranked in rankings)
        print(f"{k:8}{margin:12.0%}{norm:10.0%}{loss:10.0%}{wrong.float().mean():12.0%}")
    estimate = noise.value
    text = f"{estimate.scale:,.0f} samples" if estimate.signal > 0 else "unknown, the noise hides the signal"
    print(f"\nGradient noise scale at the end: {text}; the batch size is {BATCH}.")
    show_cost(model, x, y)
    try:
        from samplewise.report.page import write_report

        print(f"Report with curves, samples and costs: {write_report(run)}")
    except ImportError as missing:
        print(missing)


def digits() -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Training images, labels (a tenth wrong), mask of the wrong labels, and a clean fifth of the data to validate."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the demo needs scikit-learn: pip install 'samplewise[demo]'") from None
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    validation = (x[:360], y[:360])
    n = len(y) - 360
    x = x[360:]
    y = y[360:].clone()
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n)[: round(WRONG_SHARE * n)]] = True
    y[wrong] = (y[wrong] + torch.randint(1, 10, (int(wrong.sum()),))) % 10
    return x, y, wrong, validation


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def show_cost(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Print the time of an update with and without per-sample norms, measured interleaved."""
    batch = (x[:512], y[:512])
    steps = [
        sw.Step(copy.deepcopy(model).train(), sw.sgd(1e-3), loss_fn, recheck=False),
        sw.Step(copy.deepcopy(model).train(), sw.sgd(1e-3), loss_fn, recheck=False, record="norms"),
    ]
    plain, with_norms = interleaved_seconds({step: partial(step, batch) for step in steps}).values()
    print(
        f"\nAn update of 512 samples takes {plain * 1e3:.1f} ms; with per-sample norms {with_norms / plain:.2f} times "
        "as long (`make bench` measures larger models)."
    )


def unused_directory(directory: Path, name: str) -> Path:
    """Path of the first of name, name-2, name-3, ... that does not exist in the directory."""
    number = 1
    while (path := directory / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


if __name__ == "__main__":
    run_demo()
