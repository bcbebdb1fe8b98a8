"""Cost of the features of TRAK in plain epochs, and time and disk space of a search among 60,000 samples.

    python benchmarks/attribution_store.py

An MLP 784-128-64-10, 5,000 samples, one thread. A plain epoch has batches of 64 and SGD with momentum.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved
from torch import nn

import samplewise as sw

DIM, SAMPLES, ROUNDS = 512, 5000, 7
STORED, QUERIES = 60_000, 500


def features() -> None:
    """Print the ratio of `store.fill` and a plain epoch, for several batch sizes."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 784), torch.randint(10, (SAMPLES,))
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def batches(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(x.split(size), y.split(size), strict=True))

    def epoch() -> None:
        for inputs, labels in batches(64):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    def fill(size: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            sw.attribution.ProjectedStore(directory, DIM).fill(
                model, sw.attribution.margin, batches(size), returns="outputs"
            )

    calls = {size: lambda size=size: fill(size) for size in (64, 250, 500, 1000)}
    for call in (epoch, *calls.values()):
        call()
    for size, series in interleaved("features", epoch, calls, ROUNDS).items():
        print(f"features, batches of {size:4}: {series.ratio:.1f} plain epochs ({series.median:.2f} s)")


def search() -> None:
    """Print the time of an exact search, and the size of the store."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(QUERIES, DIM, generator=generator)
    with tempfile.TemporaryDirectory() as directory:
        store = sw.attribution.ProjectedStore(directory, DIM)
        for _ in range(10):
            store.add(torch.randn(STORED // 10, DIM, generator=generator))
        store.search(queries[:1], damping=0.1)  # keeps X^T X beside the rows
        for name, options in {"plain": {}, "cosine": {"cosine": True}, "damped": {"damping": 0.1}}.items():
            start = time.perf_counter()
            store.search(queries, k=10, **options)
            print(f"top 10 of {QUERIES} queries in {STORED} rows, {name:6}: {time.perf_counter() - start:.2f} s")
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        print(f"store of {STORED} rows with {DIM} numbers: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    features()
    search()
