"""Cost of the features of TRAK in plain epochs; bytes, seconds and memory of stores; recall of FAISS.

    python benchmarks/attribution_store.py [--rows 100000 ...] [--dtypes int8 ...] [--directory PLACE]
                                           [--skip features scale faiss] [--write DOCUMENT]

features   an MLP 784-128-64-10, 5,000 samples; a plain epoch has batches of 64 and SGD with momentum
scale      stores of random rows; the time of a search does not depend on their values
faiss      projected gradients of an MLP on Fashion-MNIST; needs faiss-cpu

All with one thread, and times of the process, which other processes disturb less than the clock.
"""

import argparse
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tables import Table, processor, write
from timing import interleaved
from torch import nn

import samplewise as sw
from samplewise.attribution import FaissIndex, ProjectedStore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_mnist

DIM, SAMPLES, ROUNDS = 512, 5000, 7
QUERIES = 100
PART = 16_384  # rows of an append


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


def scale(counts: list[int], dtypes: list[str], directory: Path | None) -> Table:
    """Bytes, seconds and memory of stores of synthetic rows: normal random numbers, seeded."""
    header = ["rows", "dtype", "MB on disk", "append, s", "search, s", "with cosine, s", "cosine / dot", "memory, MB"]
    rows = [header]
    for count in counts:
        for dtype in dtypes:
            with tempfile.TemporaryDirectory(dir=directory) as folder, AnonymousMemory() as memory:
                store, appended = random_store(folder, dtype, count)
                queries = torch.randn(QUERIES, DIM, generator=torch.Generator().manual_seed(1))

                def dot(store: ProjectedStore = store, queries: torch.Tensor = queries) -> None:
                    store.search(queries, k=10)

                def cosine(store: ProjectedStore = store, queries: torch.Tensor = queries) -> None:
                    store.search(queries, k=10, cosine=True)

                dot()  # the file is in the page cache afterwards, if it fits
                rounds = 3 if count >= 10**6 else 7
                series = interleaved(f"{count} {dtype}", dot, {0: cosine}, rounds, time.process_time)[0]
                size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            plain = statistics.median(series.plain)
            seconds = [f"{value:.2f}" for value in (appended, plain, series.median, series.ratio)]
            rows.append([f"{count:,}", dtype, f"{size / 1e6:,.0f}", *seconds, f"{memory.peak / 1e6:.0f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    caption = (
        f"{DIM} numbers per row, exact top 10 of {QUERIES} queries, medians. Seconds of one thread (CPU time); "
        f"torch {torch.__version__}, {processor()}."
    )
    return Table("store", "Store", rows, caption)


def random_store(folder: str, dtype: str, count: int) -> tuple[ProjectedStore, float]:
    """Store of random rows, and the seconds of appending them."""
    generator = torch.Generator().manual_seed(0)
    store = ProjectedStore(folder, DIM, dtype=dtype)
    appended = 0.0
    for first in range(0, count, PART):
        rows = torch.randn(min(PART, count - first), DIM, generator=generator)
        start = time.process_time()
        store.add(rows)
        appended += time.process_time() - start
    return store, appended


class AnonymousMemory:
    """Peak of the resident memory above that at the start, without pages of mapped files. Linux only."""

    def __enter__(self) -> "AnonymousMemory":
        self.start = self._now()
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._now() - self.start)

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1])


def approximate() -> Table:
    """Recall and seconds of FAISS on projected gradients of an MLP, trained on all of Fashion-MNIST for an epoch."""
    torch.manual_seed(0)
    (x, y), (asked, answers) = (
        (pixels.flatten(1), labels) for pixels, labels in map(fashion_mnist.load, ("train", "t10k"))
    )
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    loss_fn = nn.CrossEntropyLoss()
    table = [
        ["score", "probes", "recall of stored rows", "recall of 500 test images", "build, s", "search, s", "exact, s"]
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = ProjectedStore(Path(folder, "store"), DIM, dtype="int8")
        store.fill(model, loss_fn, list(zip(x.split(500), y.split(500), strict=True)))
        queries = store.project(model, loss_fn, [(asked[:500], answers[:500])])
        for cosine in (False, True):
            for probes in (5, 15, 60):
                start = time.process_time()
                index = FaissIndex(store, Path(folder, f"{cosine}-{probes}"), cosine=cosine, probes=probes)
                built = time.process_time() - start
                calls = {0: lambda index=index: index.search(queries)}
                series = interleaved(
                    "faiss", lambda cosine=cosine: store.search(queries, cosine=cosine), calls, 5, time.process_time
                )[0]
                recalls = [f"{recall:.2f}" for recall in (index.recall, index.recall_of(queries))]
                seconds = [f"{value:.2f}" for value in (built, series.median, statistics.median(series.plain))]
                table.append(["cosine" if cosine else "dot product", str(probes), *recalls, *seconds])
                print(table[-1], file=sys.stderr, flush=True)
    caption = f"{len(x):,} int8 rows of {DIM} numbers, {index.factory}, top 10 of 500 queries; seconds of one thread."
    return Table("store-faiss", "Approximate search", table, caption)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[10**5, 10**6, 10**7])
    parser.add_argument("--dtypes", nargs="*", default=["int8", "float16"])
    parser.add_argument("--directory", type=Path, help="place of the stores: 16 GB for 10,000,000 rows")
    parser.add_argument("--write", type=Path, help="document whose tables are replaced")
    parser.add_argument("--skip", nargs="*", default=[], choices=["features", "scale", "faiss"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "features" not in arguments.skip:
        features()
    tables = []
    if "scale" not in arguments.skip:
        tables.append(scale(arguments.rows, arguments.dtypes, arguments.directory))
    if "faiss" not in arguments.skip:
        tables.append(approximate())
    for table in tables:
        print(table)
        if arguments.write:
            write(table, arguments.write)
