"""Find wrong labels: rank images, some of which have a random other label, by every score of `sw.suspects`.

    python examples/find_wrong_labels.py                          # digits, one seed, a few seconds
    python examples/find_wrong_labels.py --seeds 5 --first 10     # tables of docs/diagnostics-measurements.md
    python examples/find_wrong_labels.py --seeds 5 --first 10 --data fashion --samples 20000 --epochs 10

Needs scikit-learn, which contains the digits; `--data fashion` needs the package named in examples/fashion_mnist.py. If
cleanlab is installed, it is included in the comparison.
"""

import argparse
import copy
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from fashion_mnist import load
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

import samplewise as sw
from samplewise.diagnostics.scores import Score

try:
    from cleanlab.rank import get_label_quality_scores
except ImportError:
    get_label_quality_scores = None

SCORES: tuple[Score, ...] = ("loss", "margin", "el2n", "norm", "last_norm", "self_influence", "agreement")
VISITED: tuple[Score, ...] = ("loss", "norm", "margin", "el2n")  # scores of a table of visits
PAIRS: tuple[tuple[Score, ...], ...] = (("margin", "el2n"), ("loss", "margin"))  # scores whose ranks are averaged
BATCH, CHECKPOINTS, FOLDS = 64, 5, 5

Checkpoint = tuple[dict[str, Any], float]  # state_dict of the model, learning rate


def digits() -> tuple[Tensor, Tensor]:
    """Return pixels (1797, 64) in [0, 1] and labels (1797,)."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    return pixels.float() / 16, labels


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


DATA = {"digits": (digits, perceptron), "fashion": (load, cnn)}


def mislabeled(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Replace a share of the labels by random other classes; return the labels and a mask of the wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]] = True
    shift = torch.randint(1, 10, labels.shape, generator=generator)
    return torch.where(wrong, (labels + shift) % 10, labels), wrong


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def seen(model: nn.Module, logits: Tensor, losses: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Columns recorded for each sample during training."""
    right = F.one_hot(labels, 10)
    margin = (logits * right).sum(1) - logits.masked_fill(right.bool(), -torch.inf).amax(1)
    el2n = (logits.softmax(1) - right).norm(dim=1)
    return {"loss": losses, "margin": margin, "el2n": el2n, "norm": sw.gradients(losses, model).norms()}


def train(
    x: Tensor, y: Tensor, options: argparse.Namespace, watch: bool = False
) -> tuple[nn.Module, list[Checkpoint], dict[str, Tensor], float]:
    """Train; return the model, checkpoints, recorded visits (if `watch`) and the median CPU seconds of an epoch."""
    model = DATA[options.data][1]()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    checkpoints, visits, seconds = [], defaultdict(list), []
    for epoch in range(1, options.epochs + 1):
        start = time.process_time()
        for i in torch.randperm(len(y)).split(BATCH):
            logits = model(x[i])
            losses = F.cross_entropy(logits, y[i], reduction="none")
            if watch:
                for name, column in seen(model, logits, losses, y[i]).items():
                    visits[name].append(column.detach())
                visits["id"].append(i)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        seconds.append(time.process_time() - start)
        if epoch % max(1, options.epochs // CHECKPOINTS) == 0:
            checkpoints.append((copy.deepcopy(model.state_dict()), options.lr))
    return model, checkpoints, {name: torch.cat(parts) for name, parts in visits.items()}, median(seconds)


def rankings(x: Tensor, y: Tensor, options: argparse.Namespace) -> Iterator[tuple[str, Tensor, float]]:
    """Yield (name, score per sample, cost as a multiple of an epoch) for each method."""
    model, checkpoints, _, epoch = train(x, y, options)
    data = list(zip(x.split(256), y.split(256), strict=True))
    for when, at in (("at the end", None), (f"{CHECKPOINTS} checkpoints", checkpoints)):
        for score in (*SCORES, *PAIRS):
            start = time.process_time()
            found = sw.suspects(model, loss_fn, data, score=score, checkpoints=at)
            yield f"{when}: {' and '.join(found.score_names)}", found.score, (time.process_time() - start) / epoch
    _, _, visits, watched = train(x, y, options, watch=True)
    for score in (*VISITED, *PAIRS, VISITED[:2]):
        found = sw.suspects(visits, score=score)
        yield f"visits: {' and '.join(found.score_names)}", found.score[found.ids.argsort()], (watched - epoch) / epoch
    if get_label_quality_scores:
        start = time.process_time()
        quality = get_label_quality_scores(y.numpy(), held_out(x, y, options).numpy())
        yield f"cleanlab, {FOLDS} folds", -torch.tensor(quality), (time.process_time() - start) / epoch


def held_out(x: Tensor, y: Tensor, options: argparse.Namespace) -> Tensor:
    """(N, 10): what models say of samples that they were not trained on."""
    found = torch.zeros(len(y), 10)
    for part in torch.randperm(len(y)).chunk(FOLDS):
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[part] = False
        model = train(x[rest], y[rest], options)[0]
        found[part] = model(x[part]).softmax(1).detach()
    return found


def recall(wrong: Tensor, score: Tensor, share: float) -> float:
    """Share of the wrong labels that are in the first `share` of the ranking."""
    first = score.argsort(descending=True)[: round(share * len(wrong))]
    return (wrong[first].sum() / wrong.sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.1, 0.2))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--samples", type=int, help="use only the first SAMPLES samples")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help a network of this size
    x, labels = (column[: options.samples] for column in DATA[options.data][0]())
    for share in options.shares:
        table = defaultdict(list)
        for seed in range(options.first, options.first + options.seeds):
            torch.manual_seed(seed)
            y, wrong = mislabeled(labels, share, seed)
            for name, score, cost in rankings(x, y, options):
                quality = roc_auc_score(wrong, score), average_precision_score(wrong, score)
                table[name].append((*quality, recall(wrong, score, 0.1), recall(wrong, score, 0.2), cost))
            print(f"{share:.0%} wrong labels, seed {seed}: done", file=sys.stderr)
        print(f"\n{share:.0%} wrong labels, mean of {options.seeds} seeds; cost as a multiple of one training epoch")
        print(f"{'':32}{'AUC':>8}{'AP':>8}{'first 10%':>11}{'first 20%':>11}{'cost':>8}")
        for name, rows in table.items():
            *qualities, costs = zip(*rows, strict=True)
            auc, ap, tenth, fifth = map(mean, qualities)
            print(f"{name:32}{auc:8.3f}{ap:8.3f}{tenth:11.3f}{fifth:11.3f}{median(costs):8.2f}")


if __name__ == "__main__":
    main()
