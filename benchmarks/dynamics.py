"""Wrong labels found by the training dynamics in a ledger, beside cleanlab with five folds: tables of docs/dynamics.md.

python benchmarks/dynamics.py            # the table: digits, Fashion-MNIST, image segments (river); three seeds
python benchmarks/dynamics.py --choose   # the other datasets, on which the default score was chosen; no cleanlab

Needs scikit-learn, river and cleanlab. Fashion-MNIST: its first 5,000 images, to save time.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import samplewise as sw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

Data = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """Dataset, noise and training run."""

    data: str
    noise: str  # "uniform", or "class": each class is confused with one other class
    rate: float
    epochs: int
    lr: float = 1e-3
    width: int = 128
    batch: int = 64
    hidden: int = 1  # layers

    @property
    def name(self) -> str:
        return f"{self.data}, {self.noise} {self.rate:.0%}, {self.epochs} epochs"


TABLE = [
    Case("digits", "uniform", 0.2, 20),
    Case("digits", "class", 0.3, 20),
    Case("fashion", "uniform", 0.2, 10),
    Case("fashion", "class", 0.3, 10),
    Case("segments", "uniform", 0.2, 30),
    Case("segments", "class", 0.3, 30),
    Case("segments", "uniform", 0.2, 150, lr=3e-3, width=512),
    Case("segments", "uniform", 0.2, 120, width=256, hidden=3),  # memorizes half of the wrong labels
]
OTHER_DATA = "cancer, wine, phishing, bananas, mixture, shells, pictures, mixture of 10, 10 pictures".split(", ")
CHOICE = [
    Case(data, noise, rate, epochs, lr, width)
    for data in OTHER_DATA
    for noise, rate in (("uniform", 0.1), ("uniform", 0.25), ("class", 0.15), ("class", 0.3))
    for epochs, lr, width in ((20, 1e-3, 128), (100, 3e-3, 256))
]


# --- data -------------------------------------------------------------------------------------------------------------


def load(name: str) -> Data:
    """Inputs, standardized except for images, and class indices."""
    x, y = LOADERS[name]()
    x = np.asarray(x, dtype=np.float32)
    if x.ndim == 2:
        x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    classes = {value: k for k, value in enumerate(sorted(set(np.asarray(y).tolist())))}
    return torch.from_numpy(x), torch.tensor([classes[value] for value in np.asarray(y).tolist()])


def fashion() -> tuple[np.ndarray, np.ndarray]:
    from fashion_mnist import load

    x, y = load()
    return x[:5000].numpy(), y[:5000].numpy()


def of_river(name: str) -> tuple[np.ndarray, np.ndarray]:
    from river import datasets

    rows = list(getattr(datasets, name)())
    return np.array([list(x.values()) for x, _ in rows]), np.array([str(y) for _, y in rows])


def pictures(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """8×8 pictures: a smooth pattern, shifted and blended with another one, with noise."""
    rng = np.random.default_rng(0)
    patterns = np.stack([np.kron(rng.normal(size=(4, 4)), np.ones((2, 2))) for _ in range(classes)])
    y = rng.integers(0, classes, 2000)
    blend = rng.uniform(0, 0.45, (2000, 1, 1))
    x = (1 - blend) * patterns[y] + blend * patterns[rng.integers(0, classes, 2000)]
    x = np.stack([np.roll(picture, rng.integers(-1, 2, 2), (0, 1)) for picture in x])
    return (x + 0.4 * rng.normal(size=x.shape)).reshape(2000, 64), y


LOADERS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "fashion": fashion,
    "segments": lambda: of_river("ImageSegments"),
    "cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "phishing": lambda: of_river("Phishing"),
    "bananas": lambda: tuple(v[:2000] for v in of_river("Bananas")),
    "mixture": lambda: datasets.make_classification(
        2000, 20, n_informative=8, n_redundant=4, n_classes=5, n_clusters_per_class=2, class_sep=1.5, random_state=0
    ),
    "shells": lambda: datasets.make_gaussian_quantiles(n_samples=2000, n_features=6, n_classes=4, random_state=0),
    "mixture of 10": lambda: datasets.make_classification(
        3000, 30, n_informative=12, n_classes=10, n_clusters_per_class=1, class_sep=1.5, random_state=0
    ),
    "pictures": lambda: pictures(6),
    "10 pictures": lambda: pictures(10),
}


def with_noise(y: Tensor, noise: str, rate: float, seed: int) -> Tensor:
    """Labels of which a share is wrong: replaced by any other class, or by the class that follows in a random cycle."""
    generator = torch.Generator().manual_seed(1000 + seed)
    classes = int(y.max()) + 1
    cycle = torch.randperm(classes, generator=generator)
    following = torch.empty_like(cycle)
    following[cycle] = cycle.roll(-1)
    uniform = (y + torch.randint(1, classes, y.shape, generator=generator)) % classes
    other = uniform if noise == "uniform" else following[y]
    return torch.where(torch.rand(len(y), generator=generator) < rate, other, y)


# --- training ---------------------------------------------------------------------------------------------------------


def network(x: Tensor, classes: int, case: Case) -> nn.Module:
    if x.dim() == 4:
        first, second = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, classes))
    sizes = [x.shape[1], *[case.width] * case.hidden]
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(case.width, classes))


def batches(x: Tensor, y: Tensor, case: Case, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        yield [(x[i], y[i], i) for i in torch.randperm(len(y), generator=generator).split(case.batch)]


def record(case: Case, x: Tensor, y: Tensor, seed: int, run: Path, norms: bool = True) -> float:
    """Train with a ledger; returns seconds."""
    torch.manual_seed(seed)
    model = network(x, int(y.max()) + 1, case)
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=case.lr), nn.CrossEntropyLoss())
    ledger = sw.Ledger(run, id=2, norms=norms)
    ledger.listen(step)
    start = time.process_time()
    for epoch, part in enumerate(batches(x, y, case, seed)):
        for update in step.over(part):
            ledger.add(update, epoch=epoch)
    ledger.flush()
    return time.process_time() - start


def plain(case: Case, x: Tensor, y: Tensor, classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = network(x, classes, case)
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr)
    criterion = nn.CrossEntropyLoss()
    for part in batches(x, y, case, seed):
        for inputs, labels, _ in part:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
    return model


def held_out_probabilities(case: Case, x: Tensor, y: Tensor, seed: int) -> np.ndarray:
    """Probabilities (N, classes) of five models, each for the fold it was not trained on."""
    from sklearn.model_selection import StratifiedKFold

    classes = int(y.max()) + 1
    probabilities = torch.zeros(len(y), classes)
    for train, rest in StratifiedKFold(5, shuffle=True, random_state=seed).split(x, y):
        model = plain(case, x[train], y[train], classes, seed)
        with torch.no_grad():
            probabilities[rest] = model(x[rest]).softmax(1)
    return probabilities.double().numpy()


def cleanlab_scores(case: Case, x: Tensor, y: Tensor, seed: int) -> tuple[np.ndarray, float]:
    """Label quality by cleanlab's default, and the seconds of the five trainings."""
    from cleanlab.rank import get_label_quality_scores

    start = time.process_time()
    scores = get_label_quality_scores(y.numpy(), held_out_probabilities(case, x, y, seed))
    return scores, time.process_time() - start


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = {  # title -> column of the dynamics, and the sign that is suspicious
    "default": ("suspicion", 1),
    "margin (AUM)": ("aum", -1),
    "loss": ("loss", 1),
    "confidence": ("confidence", -1),
    "EL2N": ("el2n", 1),
    "EL2N, first epochs": ("early_el2n", 1),
    "GraNd": ("grand", 1),
    "norm": ("norm", 1),
    "self-influence": ("self_influence", 1),
}


def precisions(case: Case, seed: int, with_cleanlab: bool) -> dict[str, float]:
    """Average precision of each score, and the costs of recording and of cleanlab, in plain training runs."""
    x, clean = load(case.data)
    y = with_noise(clean, case.noise, case.rate, seed)
    wrong = (y != clean).numpy()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        seconds = record(case, x, y, seed, run)
        without_norms = record(case, x, y, seed, Path(directory) / "without", norms=False)
        dynamics = sw.dynamics(run)
        influence = sw.suspects(run, score="self_influence")
    assert torch.equal(influence.ids, dynamics.ids)
    scores = {**dynamics.columns, "self_influence": influence.score}
    of_ids = wrong[dynamics.ids.numpy()]
    result = {
        title: average_precision_score(of_ids, sign * scores[name].numpy()) for title, (name, sign) in COLUMNS.items()
    }
    if with_cleanlab:
        start = time.process_time()
        plain(case, x, y, int(y.max()) + 1, seed)
        once = time.process_time() - start
        quality, folds = cleanlab_scores(case, x, y, seed)
        result["cleanlab, 5 folds"] = average_precision_score(wrong, -quality)
        result["cost of the ledger"] = seconds / once - 1
        result["without norms"] = without_norms / once - 1
        result["cost of cleanlab"] = folds / once
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    means: dict[Case, dict[str, float]] = {}
    for case in CHOICE if options.choose else TABLE:
        results = [precisions(case, seed, not options.choose) for seed in range(options.seeds)]
        means[case] = {title: float(np.mean([result[title] for result in results])) for title in results[0]}
        if len(means) == 1:
            print("| |", " | ".join(means[case]), "|")
            print("|---|" + "---|" * len(means[case]))
        print(f"| {case.name} |", " | ".join(f"{value:.3f}" for value in means[case].values()), "|", flush=True)
    singles = [title for title in COLUMNS if title != "default"]
    for title in COLUMNS:
        gaps = [max(mean[name] for name in singles) - mean[title] for mean in means.values()]
        within = sum(gap <= 0.01 for gap in gaps)
        print(f"{title}: within 0.01 of the best single score in {within} of {len(gaps)}; largest gap {max(gaps):.3f}")


if __name__ == "__main__":
    main()
