"""Cost of a ledger: training on Fashion-MNIST with and without one, interleaved, each with its own step.

python benchmarks/ledger.py [--rounds 200] [--visits 5000] [--batch 64] [--random]

200 rounds of 5,000 visits are one million visits. CPU time on one thread, which depends less on other load. Batches are
prepared in advance, so that the time of a data loader does not hide the cost of the ledger. --random: random images of
the same size, which need no download.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fashion_mnist import load

Batches = list[tuple[Tensor, Tensor, Tensor]]
Train = Callable[[Batches], None]


def cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def training(make: Callable[[], nn.Module], norms: bool, place: Path | None) -> tuple[Train, sw.Ledger | None]:
    """A step and, if a directory is given, its ledger."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = sw.Step(model, optimizer, loss_fn, record=("norms",) if norms else ())
    ledger = None if place is None else sw.Ledger(place, id=2, norms=norms)
    if ledger is not None:
        ledger.listen(step)

    def train(batches: Batches) -> None:
        for update in step.over(batches):
            if ledger is not None:
                ledger.add(update)

    return train, ledger


def batches_of(x: Tensor, y: Tensor, visits: int, size: int) -> Batches:
    """Random samples, split into batches before timing starts."""
    ids = torch.cat([torch.randperm(len(y)) for _ in range(-(-visits // len(y)))])[:visits]
    return [(x[i], y[i], i) for i in ids.split(size)]


def seconds(train: Train, batches: Batches) -> float:
    start = time.process_time()
    train(batches)
    return time.process_time() - start


def line(name: str, make: Callable[[], nn.Module], norms: bool, options: argparse.Namespace) -> str:
    print(name, file=sys.stderr)
    x, y = (torch.rand(10_000, 1, 28, 28), torch.randint(10, (10_000,))) if options.random else load()
    with tempfile.TemporaryDirectory() as directory:
        without, _ = training(make, norms, None)
        recorded, ledger = training(make, norms, Path(directory))
        assert ledger is not None
        plain, extra = [], []
        for number in range(options.rounds):
            batches = batches_of(x, y, options.visits, options.batch)
            turns = (without, recorded) if number % 2 else (recorded, without)
            times = {train: seconds(train, batches) for train in turns}
            plain.append(times[without])
            extra.append(times[recorded] - times[without])
        extra.append(seconds(lambda _: ledger.flush(), []))
        size = sum(path.stat().st_size for path in Path(directory).rglob("*.parquet"))
        visits = ledger.read().num_rows
    cost, doubt = sum(extra) / sum(plain), statistics.stdev(extra) * len(extra) ** 0.5 / sum(plain)
    own = f"{cost:.1%} ± {doubt:.1%} | {sum(extra) / visits * 1e6:.2f}"
    return f"| {name} | {visits:,} | {sum(plain):.1f} | {own} | {size / 1e6:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--visits", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"\n### Cost of a ledger in training on Fashion-MNIST, batches of {options.batch}\n")
    print("| | visits | training, s | added by the ledger | µs per visit | MB |\n|---|---|---|---|---|---|")
    for name, make in {"CNN": cnn, "MLP": mlp}.items():
        for norms in (False, True):
            print(line(f"{name}, {'norms in both' if norms else 'no norms'}", make, norms, options), flush=True)


if __name__ == "__main__":
    main()
