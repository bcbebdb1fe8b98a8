"""Updates and samples to a given loss: eight fixed batch sizes, and sizes that follow the noise scale.

python benchmarks/batch_size.py [task ...] [--text FILE ...] [--results FILE] [--write DOCUMENT] [--picture FILE]

Tasks: fashion (MLP on Fashion-MNIST of 14 × 14 pixels, Debian's package dataset-fashion-mnist) and characters (MLP on
the last 8 characters of a text; by default the Markdown files of docs/). SGD without momentum and without a schedule.
For each size, the learning rate is the one of a grid that reaches the validation loss with the fewest samples, with
seed 0; the table has means over two other seeds. `follow` is sw.follow_noise(at_least=32, at_most=1024), with the
same grid; its other settings are the defaults. A run that is diverging, or too
long, counts as not finished. All runs are kept in the file of results: a second call continues there.

With S updates and E samples, the trade-off (S / Smin - 1)(E / Emin - 1) = 1 is fitted to the fixed sizes by least
squares of log S; Emin / Smin is the critical batch size. Errors are standard errors of the linearized fit. The noise
scale is the median over the updates of a run.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from tables import Table, processor, write
from torch import Tensor, nn

import samplewise as sw

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from fashion_mnist import load  # noqa: E402

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
FOLLOW = "follow"
SEEDS = (1, 2)  # of the table; the learning rates are chosen with seed 0
VALIDATION = 2000
EVERY = 2000  # samples between two evaluations
START = 0.2  # learning rate at which the search begins for the smallest size
CONTEXT = 8
Run = dict[str, Any]


@dataclass(frozen=True)
class Task:
    title: str
    x: Tensor
    y: Tensor
    make_model: Callable[[], nn.Module]
    goal: float  # mean of the last three validation losses
    rates: tuple[float, ...]
    most_samples: int
    most_updates: int


def fashion(texts: Sequence[Path]) -> Task:
    x, y = load()
    x = F.avg_pool2d(x - x.mean(), 2).flatten(1) * 2

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))

    rates = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    return Task("Fashion-MNIST", x, y, make_model, 0.40, rates, 1_000_000, 14_000)


def characters(texts: Sequence[Path]) -> Task:
    text = "".join(path.read_text() for path in texts)
    kinds = {kind: k for k, kind in enumerate(sorted(set(text)))}
    codes = torch.tensor([kinds[kind] for kind in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]

    def make_model() -> nn.Module:
        layers = nn.Embedding(len(kinds), 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh()
        return nn.Sequential(*layers, nn.Linear(64, len(kinds)))

    rates = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    return Task("characters", windows[:, :-1], windows[:, -1], make_model, 2.15, rates, 1_000_000, 14_000)


TASKS = {"fashion": fashion, "characters": characters}

# --- one run ----------------------------------------------------------------------------------------------------------


def train(task: Task, size: int | str, rate: float, seed: int) -> Run:
    """Train to the goal. `updates` and `samples` are None if it is not reached."""
    torch.manual_seed(seed)
    model = task.make_model()
    samples = sw.follow_noise(at_least=32, at_most=1024) if size == FOLLOW else size
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=rate), losses_of, samples, recheck=False)
    noise = sw.NoiseScale(decay=0.98) if seed else None  # runs that choose the learning rate need none
    if noise is not None:
        step.require(norms=True)
    validation = (task.x[:VALIDATION], task.y[:VALIDATION])
    losses: list[float] = []
    course = []
    next_evaluation = 0
    counters = step.counters
    for update in step.over(batches(task, seed)):
        if noise is not None:
            noise.on_update(update)
        if counters.samples < next_evaluation:
            continue
        next_evaluation = counters.samples + EVERY
        with torch.no_grad():
            losses.append(float(losses_of(model, validation).mean()))
        scale = None if noise is None else noise.value.scale
        course.append((counters.samples, update.samples, scale))
        if len(losses) > 2 and fmean(losses[-3:]) <= task.goal:
            return {"updates": counters.updates, "samples": counters.samples, "course": course}
        too_long = counters.samples > task.most_samples or counters.updates > task.most_updates
        if too_long or not losses[-1] < 3 * losses[0]:
            break
    return {"updates": None, "samples": None, "course": course}


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batches(task: Task, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled epochs without an end."""
    generator = torch.Generator().manual_seed(seed)
    x, y = task.x[VALIDATION:], task.y[VALIDATION:]
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(1024):
            yield x[rows], y[rows]


# --- all runs ---------------------------------------------------------------------------------------------------------


class Results:
    """Runs in a file, by task, size, learning rate and seed."""

    def __init__(self, path: Path):
        self._path = path
        self._runs: dict[str, Run] = json.loads(path.read_text()) if path.exists() else {}

    def run(self, name: str, task: Task, size: int | str, rate: float, seed: int) -> Run:
        key = f"{name} {size} {rate} {seed}"
        if key not in self._runs:
            self._runs[key] = train(task, size, rate, seed)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._runs))
            print(key, self._runs[key]["updates"], self._runs[key]["samples"], flush=True)
        return self._runs[key]


@dataclass(frozen=True)
class Row:
    """Means over the seeds for one size."""

    size: int | str
    rate: float
    updates: float
    samples: float
    scale: float  # median noise scale
    course: list[tuple[int, int, float]]  # of the first seed: samples, size, noise scale


def row_of(results: Results, name: str, task: Task, size: int | str, start: float) -> Row | None:
    """None if no learning rate reaches the goal, or a seed does not. `start`: where the search for the rate begins."""
    k = task.rates.index(start)
    costs: dict[int, float] = {}
    while True:  # to the learning rate whose neighbors need more samples
        near = [i for i in (k, k + 1, k - 1) if 0 <= i < len(task.rates)]
        costs |= {i: results.run(name, task, size, task.rates[i], 0)["samples"] or math.inf for i in near}
        best = min(near, key=lambda i: costs[i])
        if best == k:
            break
        k = best
    if costs[k] == math.inf:
        return None
    rate = task.rates[k]
    runs = [results.run(name, task, size, rate, seed) for seed in SEEDS]
    if any(run["samples"] is None for run in runs):
        return None
    scale = fmean(median(scale for *_, scale in run["course"]) for run in runs)
    updates = fmean(run["updates"] for run in runs)
    return Row(size, rate, updates, fmean(run["samples"] for run in runs), scale, runs[0]["course"])


@dataclass(frozen=True)
class Fit:
    """S = Smin (1 + B / size), by least squares of log S, with relative standard errors."""

    updates: float  # Smin
    critical: float  # B, the critical batch size
    updates_error: float
    samples_error: float
    critical_error: float

    @property
    def samples(self) -> float:
        """Emin."""
        return self.updates * self.critical


def fit(rows: Sequence[Row]) -> Fit:
    sizes = [float(row.size) for row in rows]

    def residuals(critical: float) -> tuple[list[float], float]:
        logs = [math.log(row.updates / (1 + critical / size)) for row, size in zip(rows, sizes, strict=True)]
        return [log - fmean(logs) for log in logs], math.exp(fmean(logs))

    candidates = [2 ** (k / 50) for k in range(800)]
    critical = min(candidates, key=lambda candidate: sum(r * r for r in residuals(candidate)[0]))
    left, updates = residuals(critical)
    # Linearized: d log S = d log Smin + slope · d log B, and log Emin = log Smin + log B.
    slopes = [critical / (size + critical) for size in sizes]
    slope = fmean(slopes)
    noise = math.sqrt(sum(r * r for r in left) / (len(rows) - 2))
    critical_error = noise / math.sqrt(sum((s - slope) ** 2 for s in slopes))
    updates_error = math.hypot(noise / math.sqrt(len(rows)), slope * critical_error)
    samples_error = math.hypot(noise / math.sqrt(len(rows)), (1 - slope) * critical_error)
    return Fit(updates, critical, updates_error, samples_error, critical_error)


# --- table and picture ------------------------------------------------------------------------------------------------


def table_of(name: str, task: Task, fixed: Sequence[Row], follow: Row | None) -> Table:
    header = ["samples per update", "learning rate", "updates", "samples", "noise scale"]
    body = [
        [str(row.size), f"{row.rate:g}", f"{row.updates:,.0f}", f"{row.samples:,.0f}", f"{row.scale:,.0f}"]
        for row in (*fixed, *([follow] if follow is not None else []))
    ]
    fitted = fit(fixed)
    best = min(fixed, key=lambda row: row.samples)
    cheap = min((row for row in fixed if row.samples <= 1.1 * best.samples), key=lambda row: row.updates)
    caption = (
        f"Validation loss {task.goal:.2f}; means of {len(SEEDS)} seeds; torch {torch.__version__}, one thread, "
        f"{processor()}. Fit: Smin = {fitted.updates:,.0f} updates ± {fitted.updates_error:.0%}, Emin = "
        f"{fitted.samples:,.0f} samples ± {fitted.samples_error:.0%}, critical batch size {fitted.critical:,.0f} ± "
        f"{fitted.critical_error:.0%}. Noise scale at the best fixed size, {best.size}: {best.scale:,.0f}, "
        f"{best.scale / fitted.critical:.2f} times the critical batch size."
    )
    if follow is not None:
        caption += (
            f" `follow` needs {follow.updates / best.updates:.0%} of the updates of the fixed size with the fewest "
            f"samples ({best.size}) and {follow.samples / best.samples:.2f} times its samples; "
            f"{follow.updates / cheap.updates:.0%} of the updates of the largest size within 1.1 times the fewest "
            f"samples ({cheap.size}), and {follow.samples / cheap.samples:.2f} times its samples."
        )
    return Table(name, task.title, [header, *body], caption)


def draw(pictures: Sequence[tuple[Task, Sequence[Row], Row | None]], path: Path) -> None:
    """For each task: updates against samples, and the size over time beside the noise scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    ink, blue, red = "#2b2b33", "#4878a8", "#d9562b"
    figure, axes = plt.subplots(len(pictures), 2, figsize=(9, 3.4 * len(pictures)), squeeze=False, layout="tight")
    for (trade, course), (task, fixed, follow) in zip(axes, pictures, strict=True):
        fitted = fit(fixed)
        sizes = [2 ** (k / 10) for k in range(20, 115)]
        updates = [fitted.updates * (1 + fitted.critical / size) for size in sizes]
        samples = [updates_of * size / 1000 for updates_of, size in zip(updates, sizes, strict=True)]
        trade.plot(samples, updates, color=blue, lw=1, label="fit")
        trade.plot(
            [row.samples / 1000 for row in fixed], [row.updates for row in fixed], "o", color=blue, label="fixed"
        )
        for row in fixed:
            trade.annotate(f" {row.size}", (row.samples / 1000, row.updates), fontsize=8, color=ink, va="bottom")
        if follow is not None:
            trade.plot([follow.samples / 1000], [follow.updates], "*", ms=13, color=red, label="follow_noise")
            seen = [samples / 1000 for samples, *_ in follow.course]
            course.plot(seen, [scale for *_, scale in follow.course], color=blue, label="noise scale")
            course.step(seen, [size for _, size, _ in follow.course], color=red, label="update size", where="post")
        trade.set(xscale="log", yscale="log", xlabel="thousand samples to the goal", ylabel="updates", title=task.title)
        course.set(yscale="log", xlabel="thousand samples seen", ylabel="samples", title="follow_noise")
        for axes_of in (trade, course):
            axes_of.legend(frameon=False, fontsize=8)
            axes_of.spines[["top", "right"]].set_visible(False)
        for axis, ticks in ((trade.xaxis, [50 * 2**k for k in range(5)]), (course.yaxis, [2**k for k in range(5, 12)])):
            low, high = axis.get_view_interval()
            axis.set_minor_formatter(NullFormatter())
            axis.set_ticks([tick for tick in ticks if low <= tick <= high])
            axis.set_major_formatter("{x:.0f}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="default: both")
    parser.add_argument("--text", nargs="+", type=Path, default=sorted((ROOT / "docs").glob("*.md")))
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "batch-size" / "results.json")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.results)
    pictures = []
    for name in options.tasks or TASKS:
        task = TASKS[name](options.text)
        fixed: list[Row] = []
        for size in SIZES:
            row = row_of(results, name, task, size, fixed[-1].rate if fixed else START)
            fixed += [] if row is None else [row]
        follow = row_of(results, name, task, FOLLOW, 2 * START)
        table = table_of(f"batch-size-{name}", task, fixed, follow)
        print(table)
        if options.write is not None:
            write(table, options.write)
        pictures.append((task, fixed, follow))
    if options.picture is not None:
        draw(pictures, options.picture)


if __name__ == "__main__":
    main()
