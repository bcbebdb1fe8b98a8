"""Find wrong labels: digits of which some have another's label, ranked by every score that `sw.suspects` has.

    python examples/find_wrong_labels.py                          # one seed, a few seconds
    python examples/find_wrong_labels.py --seeds 5 --first 10     # the table of docs/diagnostics.md

Needs scikit-learn, whose digits these are. Where cleanlab is installed, it is compared with.
"""

import argparse
import copy
import time
from collections import defaultdict
from statistics import mean, median

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import samplewise as sw

try:
    from cleanlab.rank import get_label_quality_scores
except ImportError:
    get_label_quality_scores = None

SCORES = ("loss", "margin", "el2n", "norm", "last_norm", "self_influence", "agreement")
BATCH, CHECKPOINTS, FOLDS = 64, 5, 5


def digits(share, seed):
    """Pixels, labels, and which of them are wrong."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]] = True
    shift = torch.randint(1, 10, labels.shape, generator=generator)
    return pixels.float() / 16, torch.where(wrong, (labels + shift) % 10, labels), wrong


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(x, y, options, watch=False):
    """The model, some checkpoints on the way, every visit if it is watched, and the seconds of an epoch."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    checkpoints, visits, seconds = [], defaultdict(list), []
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        for i in torch.randperm(len(y)).split(BATCH):
            logits = model(x[i])
            losses = F.cross_entropy(logits, y[i], reduction="none")
            if watch:
                others = logits.scatter(1, y[i, None], -torch.inf).amax(1)
                margin = logits.gather(1, y[i, None])[:, 0] - others
                found = {"id": i, "loss": losses, "margin": margin, "norm": sw.gradients(losses, model).norms()}
                for name, column in found.items():
                    visits[name].append(column.detach())
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
        if epoch % max(1, options.epochs // CHECKPOINTS) == 0:
            checkpoints.append((copy.deepcopy(model.state_dict()), options.lr))
    return model, checkpoints, {name: torch.cat(parts) for name, parts in visits.items()}, median(seconds)


def rankings(x, y, options):
    """(what, score per sample, seconds it took as a multiple of an epoch's) for all there is."""
    model, checkpoints, _, epoch = train(x, y, options)
    data = list(zip(x.split(256), y.split(256), strict=True))
    for when, at in (("at the end", None), (f"{CHECKPOINTS} checkpoints", checkpoints)):
        for by in (*SCORES, None):
            start = time.perf_counter()
            found = sw.suspects(model, loss_fn, data, by=by, checkpoints=at)
            yield f"{when}: {by or 'recommended'}", found.score, (time.perf_counter() - start) / epoch
    _, _, visits, watched = train(x, y, options, watch=True)
    for by in ("loss", "norm", ("loss", "norm"), "margin"):
        name = by if isinstance(by, str) else " and ".join(by)
        yield f"visits: {name}", sw.suspects(visits, by=by).score, (watched - epoch) / epoch
    if get_label_quality_scores:
        start = time.perf_counter()
        quality = get_label_quality_scores(y.numpy(), held_out(x, y, options).numpy())
        yield f"cleanlab, {FOLDS} folds", -torch.tensor(quality), (time.perf_counter() - start) / epoch


def held_out(x, y, options):
    """(N, 10): what models say of samples that they were not trained on."""
    found = torch.zeros(len(y), 10)
    for part in torch.randperm(len(y)).chunk(FOLDS):
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[part] = False
        model = train(x[rest], y[rest], options)[0]
        found[part] = model(x[part]).softmax(1).detach()
    return found


def recall(wrong, score, share):
    """How many of the wrong labels are among the first."""
    first = score.argsort(descending=True)[: round(share * len(wrong))]
    return (wrong[first].sum() / wrong.sum()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for a net of this size more of them only wait for each other
    for share in (0.1, 0.2):
        table = defaultdict(list)
        for seed in range(options.first, options.first + options.seeds):
            torch.manual_seed(seed)
            x, y, wrong = digits(share, seed)
            for name, score, cost in rankings(x, y, options):
                quality = roc_auc_score(wrong, score), average_precision_score(wrong, score)
                table[name].append((*quality, recall(wrong, score, 0.1), recall(wrong, score, 0.2), cost))
        print(f"\n{share:.0%} wrong labels, mean of {options.seeds} seeds; cost in epochs of training")
        print(f"{'':32}{'AUC':>8}{'AP':>8}{'first 10%':>11}{'first 20%':>11}{'cost':>8}")
        for name, rows in table.items():
            *quality, costs = zip(*rows, strict=True)
            auc, ap, tenth, fifth = map(mean, quality)
            print(f"{name:32}{auc:8.3f}{ap:8.3f}{tenth:11.3f}{fifth:11.3f}{median(costs):8.2f}")


if __name__ == "__main__":
    main()
