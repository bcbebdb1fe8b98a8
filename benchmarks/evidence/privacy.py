"""Differentially private training on Fashion-MNIST: the accuracies of two papers, and of three epsilons.

    python benchmarks/evidence/privacy.py --write docs/evidence.md    # an hour on one core; continues where it stopped
    python benchmarks/evidence/privacy.py --only epsilons             # one of its tables
    python benchmarks/evidence/privacy.py --kymatio                   # compare the scattering transform with kymatio's

Needs `pip install '.[privacy]'` and the data, Debian's package dataset-fashion-mnist; see examples/fashion_mnist.py.
The CNN, its settings and the training loop are those of examples/private_fashion_mnist.py. The scattering coefficients
are computed once (two minutes) and kept beside the results, 1.1 GB. `--kymatio` needs kymatio 0.3 and scipy below 1.17.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from private_fashion_mnist import (
    FASHION,
    Samples,
    Settings,
    accuracy,
    fashion,
    plan,
    published_cnn,
    train,
)
from record import Record, Table, Values, machine, parser, show

# ---------------------------------------------------------------------------------------- scattering transform
# Oyallon and Mallat (arXiv:1412.8659): 2 scales, 8 angles. An image of 28 × 28 pixels gets 1 + 16 + 64 channels: the
# image, the moduli of its 16 wavelet transforms, and the moduli of the 8 coarse wavelet transforms of each of the 8
# fine moduli. All are blurred and read at every fourth pixel: 7 × 7.

BORDER = 4  # reflected pixels on each side, of which nothing is left in the output
SIZE = 28 + 2 * BORDER
ANGLES = [(3 - k) * math.pi / 8 for k in range(8)]  # the order of kymatio: group norm groups neighboring channels


def periodic(values: Tensor) -> Tensor:
    """Sum of the copies of a filter that lie on a grid of five by five images."""
    return values.view(5, SIZE, 5, SIZE).sum((0, 2))


def wavelet(scale: int, angle: float) -> Tensor:
    """Fourier transform of a Morlet wavelet: a wave under a Gaussian, twice as long across, less its mean."""
    line = torch.arange(-2 * SIZE, 3 * SIZE, dtype=torch.float64)
    row, column = torch.meshgrid(line, line, indexing="ij")
    along = row * math.cos(angle) + column * math.sin(angle)
    across = column * math.cos(angle) - row * math.sin(angle)
    sigma = 0.8 * 2**scale
    gaussian = torch.exp(-(along**2 + (across / 2) ** 2) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
    wave = periodic(gaussian * torch.exp(0.75j * math.pi / 2**scale * along))
    envelope = periodic(gaussian)
    return torch.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real.float()


FINE, COARSE = (torch.stack([wavelet(scale, angle) for angle in ANGLES]) for scale in (0, 1))


def modulus(spectrum: Tensor, stride: int) -> Tensor:
    """Absolute values of every stride-th pixel of a signal: in its Fourier transform, the mean of stride² blocks."""
    *batch, height, width = spectrum.shape
    blocks = spectrum.view(*batch, stride, height // stride, stride, width // stride)
    return torch.fft.ifft2(blocks.mean((-4, -2))).abs()


def blur(signal: Tensor) -> Tensor:
    """Gaussian blur at the 7 × 7 pixels of the output. The Gaussian is a product, so that two matrices do it."""
    stride = SIZE // signal.shape[-1]
    distance = BORDER * torch.arange(1, 8)[:, None] - torch.arange(0, SIZE, stride)
    sigma = 1.6
    copies = (distance + SIZE * torch.arange(-2, 3)[:, None, None]).double()
    weights = torch.exp(-(copies**2) / (2 * sigma**2)).sum(0).float() * stride / (sigma * math.sqrt(2 * math.pi))
    return weights @ signal @ weights.T


def scatter(images: Tensor) -> Tensor:
    """Scattering coefficients (N, 81, 7, 7) of images (N, 1, 28, 28)."""
    framed = F.pad(images, (BORDER,) * 4, mode="reflect")
    spectrum = torch.fft.fft2(framed)
    fine = modulus(spectrum * FINE, 1)  # (N, 8, 36, 36)
    coarse = modulus(spectrum * COARSE, 2)  # (N, 8, 18, 18)
    both = [modulus(torch.fft.fft2(first) * COARSE, 2) for first in fine.split(1, dim=1)]
    return torch.cat([blur(signal) for signal in (framed, fine, coarse, *both)], dim=1)


def features(path: Path) -> tuple[Samples, Samples]:
    """Training and test set as scattering coefficients, each sample normalized by itself in 27 groups of channels.

    This is `nn.GroupNorm(27, 81, affine=False)`, the first layer of the models of the paper. It has no parameters and
    sees one sample at a time, so that it is computed once and costs no privacy.
    """
    sets = fashion()
    if not path.exists():
        normalized = [torch.cat([F.group_norm(scatter(part), 27) for part in pixels.split(50)]) for pixels, _ in sets]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(normalized, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    training, test = torch.load(path)
    return (training, sets[0][1]), (test, sets[1][1])


def kymatio_difference() -> Values:
    """Norm of the difference from kymatio's coefficients, relative to their norm, on 1,000 test images."""
    from kymatio.torch import Scattering2D

    images = fashion()[1][0][:1000]
    theirs = Scattering2D(J=2, shape=(28, 28))(images).squeeze(1)
    difference = (scatter(images) - theirs).transpose(0, 1).flatten(1)
    by_channel = difference.norm(dim=1) / theirs.transpose(0, 1).flatten(1).norm(dim=1)
    return {"largest of a channel": by_channel.max().item(), "median of channels": by_channel.median().item()}


# --------------------------------------------------------------------------------------------------- training runs


def scatter_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(81 * 7 * 7, 10))


def scatter_cnn() -> nn.Module:
    """CNN of Tramèr and Boneh on scattering coefficients: 33,066 parameters."""
    first, second = nn.Conv2d(81, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    layers = first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers)


LINEAR = replace(FASHION, batch=8192, updates=280, noise=4.05, lr=16)
SEEDS = 3  # of each row: 0, 1, 2
PUBLISHED: list[tuple[str, Callable[[], nn.Module], Settings, float]] = [
    ("ScatterNet + linear", scatter_linear, LINEAR, 89.7),
    ("ScatterNet + CNN", scatter_cnn, FASHION, 89.0),
    ("CNN", published_cnn, FASHION, 86.0),
]
RELU_RATES = (8, 4, 2)
EPSILONS = (1, 3, 8)
EPSILON_SEEDS = 5


class Runs:
    """Training runs, with at most `seeds` seeds for each row of a table. `recorded`: no new ones are made."""

    def __init__(self, record: Record, seeds: int, recorded: bool):
        self.record = record
        self.seeds = seeds
        self.recorded = recorded
        self.pixels = cache(fashion)
        self.coefficients = cache(lambda: features(record.path.with_name("scattering.pt")))

    def make(
        self, name: str, make_model: Callable[[], nn.Module], settings: Settings, seeds: int = SEEDS
    ) -> list[Values]:
        """One run per seed, with its values and CPU seconds."""
        keys = [f"{name}, seed {seed}" for seed in range(min(seeds, self.seeds))]
        for seed, key in enumerate(keys):
            if key not in self.record.runs and not self.recorded:  # load the data before the clock of the run starts
                data = self.coefficients() if name.startswith("ScatterNet") else self.pixels()
                self.record.run(key, partial(run, make_model, settings, data, seed))
        return [self.record.runs[key] for key in keys if key in self.record.runs]


def run(make_model: Callable[[], nn.Module], settings: Settings, data: tuple[Samples, Samples], seed: int) -> Values:
    torch.manual_seed(seed)
    training, test = data
    samples = len(training[1])
    model, spent = train(make_model(), training, settings, plan(settings, samples, seed))
    return {
        "accuracy": 100 * accuracy(model, test, settings),
        "epsilon": spent.epsilon,
        "epsilon by RDP": plan(settings, samples, seed, accountant="rdp").epsilon,
        "updates": spent.updates,
        "noise": settings.noise,
    }


# ---------------------------------------------------------------------------------------------------------- tables


def cells(runs: list[Values]) -> list[str]:
    """Accuracies in %, their mean and deviation, epsilon, and CPU seconds of a run."""
    if not runs:
        return ["not run yet", "", "", ""]
    values = [run["values"] for run in runs]
    accuracies = [value["accuracy"] for value in values]
    deviation = f" ± {stdev(accuracies):.2f}" if len(runs) > 1 else ""
    return [
        f"**{mean(accuracies):.2f}**{deviation}",
        ", ".join(f"{value:.2f}" for value in accuracies),
        f"{values[0]['epsilon']:.2f} ({values[0]['epsilon by RDP']:.2f})",
        f"{mean(run['cpu_seconds'] for run in runs):.0f}",
    ]


HEADER = ["accuracy, mean ± deviation", "seeds 0, 1, …", "epsilon by PLD (RDP)", "CPU seconds per run"]


def papers(runs: Runs) -> Table:
    """Row a: Tramèr and Boneh."""
    rows = [["model", "published", *HEADER]]
    for name, make_model, settings, published in PUBLISHED:
        rows.append([name, f"{published}", *cells(runs.make(name, make_model, settings))])
    return Table("evidence privacy papers", "Tramèr and Boneh, arXiv:2011.11660", rows, caption("papers"))


def activations(runs: Runs) -> Table:
    """Row b: Papernot et al. ReLU has several learning rates, one seed each; the best one has all seeds."""

    def relu(rate: float, seeds: int) -> list[Values]:
        model, settings = partial(published_cnn, nn.ReLU), replace(FASHION, lr=rate)
        return runs.make(f"CNN with ReLU, learning rate {rate}", model, settings, seeds)

    tanh = runs.make("CNN", published_cnn, FASHION)
    best = max(RELU_RATES, key=lambda rate: max((run["values"]["accuracy"] for run in relu(rate, 1)), default=0))
    rows = [["activation", "learning rate", "published", *HEADER]]
    for rate in RELU_RATES:
        published, seeds = ("81.9", SEEDS) if rate == best else ("", 1)
        rows.append(["ReLU", f"{rate}", published, *cells(relu(rate, seeds))])
    rows.append(["tanh", f"{FASHION.lr}", "86.1", *cells(tanh)])
    return Table("evidence privacy activations", "Papernot et al., arXiv:2007.14191", rows, caption("activations"))


def epsilons(runs: Runs) -> Table:
    """Row c: the linear model at three epsilons. The settings are those of the paper; only the noise changes."""
    rows = [["epsilon", "noise multiplier", *HEADER]]
    for epsilon in EPSILONS:
        planned = sw.Privacy(
            epsilon=epsilon,
            delta=LINEAR.delta,
            updates=LINEAR.updates,
            sample_rate=LINEAR.batch / 60_000,
            clip=LINEAR.clip,
            seed=0,
        )
        settings = replace(LINEAR, noise=planned.noise_multiplier)
        found = runs.make(f"ScatterNet + linear, epsilon {epsilon}", scatter_linear, settings, EPSILON_SEEDS)
        rows.append([f"{epsilon}", f"{settings.noise:.2f}", *cells(found)])
    return Table("evidence privacy epsilons", "ScatterNet + linear at three epsilons", rows, caption("epsilons"))


def caption(table: str) -> str:
    return f"`python benchmarks/evidence/privacy.py --only {table}`; {machine()}."


TABLES = {"papers": papers, "activations": activations, "epsilons": epsilons}


def main() -> None:
    arguments = parser(__doc__, "privacy")
    arguments.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="tables; default: all")
    arguments.add_argument("--seeds", type=int, default=EPSILON_SEEDS, help="largest number per row; default: all")
    arguments.add_argument("--recorded", action="store_true", help="show the recorded runs, and make no new ones")
    arguments.add_argument("--kymatio", action="store_true", help="compare the scattering transform with kymatio's")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.kymatio:
        print(kymatio_difference())
        return
    runs = Runs(Record(options.results), options.seeds, options.recorded)
    for name in options.only:
        show(TABLES[name](runs), options.write)


if __name__ == "__main__":
    main()
