"""Train an image classifier with differential privacy, and print its test accuracy with the epsilon that was spent.

    python examples/private_fashion_mnist.py                            # digits, a few seconds
    python examples/private_fashion_mnist.py --data fashion --seed 0    # settings of Tramèr and Boneh, arXiv:2011.11660
    python examples/private_fashion_mnist.py --data fashion --seed 0 --variant improved

Needs `pip install '.[privacy]'` and scikit-learn, which contains the digits; `--data fashion` needs the
package named in examples/fashion_mnist.py, and about four minutes on one free core. Without `--seed`, the key of
samples and noise comes from the operating system; with it, a run is reproducible and not private.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from fashion_mnist import load
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.privacy.privacy import Spent

Samples = tuple[Tensor, Tensor]  # pixels, labels


@dataclass(frozen=True)
class Settings:
    """Settings of one training. `batch` is the expected batch size; the size of a Poisson draw varies."""

    batch: int
    updates: int
    noise: float  # noise multiplier
    delta: float
    lr: float
    momentum: float = 0.9
    clip: float = 0.1
    mean: float = 0.0  # public constants: inputs are (pixel - mean) / std
    std: float = 1.0
    decay: float = 0.0  # last share of the updates, in which the learning rate falls linearly to 0
    average: float = 0.0  # decay of the exponential moving average of the parameters; 0 for the last parameters


def digits() -> tuple[Samples, Samples]:
    """Return pixels in [0, 1] and labels of 1,500 training and 297 test images of 8 × 8 pixels."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    pixels = pixels.float().view(-1, 1, 8, 8) / 16
    return (pixels[:1500], labels[:1500]), (pixels[1500:], labels[1500:])


def small_cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3)
    layers = first, nn.Tanh(), nn.MaxPool2d(2), second, nn.Tanh(), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*layers)


def fashion() -> tuple[Samples, Samples]:
    """Return pixels in [0, 1] and labels of 60,000 training and 10,000 test images of 28 × 28 pixels."""
    return load("train"), load("t10k")


def published_cnn(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    """CNN of Tramèr and Boneh for Fashion-MNIST: 26,010 parameters. channels_last halves the time of its pooling."""
    first, second = nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Conv2d(16, 32, 4, stride=2)
    features = first, activation(), nn.MaxPool2d(2, stride=1), second, activation(), nn.MaxPool2d(2, stride=1)
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(512, 32), activation(), nn.Linear(32, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types do not have it


DIGITS = Settings(batch=300, updates=150, noise=3.0, delta=1e-4, lr=4)
FASHION = Settings(batch=2048, updates=1172, noise=2.15, delta=1e-5, lr=4)
VARIANTS = {
    "published": {"digits": DIGITS, "fashion": FASHION},
    "improved": {
        "digits": replace(DIGITS, mean=0.31, std=0.38, decay=0.5, average=0.9),
        "fashion": replace(FASHION, mean=0.286, std=0.353, decay=0.3),
    },
}
DATA = {"digits": (digits, small_cnn), "fashion": (fashion, published_cnn)}


def plan(
    settings: Settings, samples: int, seed: int | None = None, accountant: Literal["pld", "rdp"] = "pld"
) -> sw.Privacy:
    return sw.Privacy(
        noise_multiplier=settings.noise,
        delta=settings.delta,
        updates=settings.updates,
        sample_rate=settings.batch / samples,
        clip=settings.clip,
        seed=seed,
        accountant=accountant,
    )


def train(model: nn.Module, data: Samples, settings: Settings, privacy: sw.Privacy) -> tuple[nn.Module, Spent]:
    """Train with privacy; return the model to use, which may have averaged parameters, and the privacy spent."""
    pixels, labels = data
    loader = privacy.loader(TensorDataset((pixels - settings.mean) / settings.std, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    falling = max(1, settings.decay * settings.updates)
    scheduler = LambdaLR(optimizer, lambda update: min(1, (settings.updates - update) / falling))
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, privacy=privacy)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.average))
    assert step.privacy is not None  # for type checkers: the step has privacy=
    while step.privacy.left:
        for _ in step.over(loader):  # one pass: 1 / sample_rate updates
            averaged.update_parameters(model)  # needs no further privacy: it uses what is already released
        print(f"{step.counters.updates} of {settings.updates} updates", file=sys.stderr)
    return averaged.module, step.privacy.spent()


@torch.no_grad()
def accuracy(model: nn.Module, data: Samples, settings: Settings) -> float:
    pixels, labels = data
    parts = ((pixels - settings.mean) / settings.std).split(1000)
    return (torch.cat([model(part).argmax(1) for part in parts]) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--variant", choices=VARIANTS, default="published")
    parser.add_argument("--seed", type=int, help="default: a secret key of the operating system")
    parser.add_argument("--updates", type=int, help="default: those of the variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    load_data, make_model = DATA[options.data]
    training, test = load_data()
    model = make_model()
    settings = VARIANTS[options.variant][options.data]
    settings = replace(settings, updates=options.updates or settings.updates)
    privacy = plan(settings, len(training[1]), options.seed)
    print(f"{settings}\n{privacy}")
    start = time.perf_counter()
    model, spent = train(model, training, settings, privacy)
    print(f"test accuracy {accuracy(model, test, settings):.2%} after {time.perf_counter() - start:.0f} s")
    by_rdp = plan(settings, len(training[1]), accountant="rdp").epsilon
    print(f"{spent}: epsilon {spent.epsilon:.4f} by PLD, {by_rdp:.4f} by RDP")


if __name__ == "__main__":
    main()
