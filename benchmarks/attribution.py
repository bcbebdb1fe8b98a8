"""Quality of attribution methods: linear datamodeling score (LDS), seconds and megabytes of each.

python benchmarks/attribution.py [task ...] [--directory DIRECTORY] [--small] [--threads 1] [--write DOCUMENT]

Tasks (see attribution_tasks.py): lr, mlp, transformer. For each, 100 models are trained twice on random halves of the
training data, with different seeds; 50 further models on other halves are those of TRAK, and one model on all samples,
with 5 checkpoints, is that of the other methods. Everything is kept in the directory: a second call computes only what
is missing, and a call that was interrupted continues. The first call takes about an hour.

  random                  normal random numbers
  neighbors, loss        `samplewise.attribution.evaluate.baselines`, without gradients
  gradient dot, cosine    sw.influence at the last checkpoint
  TracIn                  sw.influence over 5 checkpoints
  influence, Hessian      sw.influence with curvature=sw.attribution.hessian (logistic regression)
  EK-FAC                  sw.influence with curvature=sw.ekfac
  TRAK-k                  sw.trak with k models, 512 dimensions each

LDS is the agreement with the mean output of two trainings on each subset; "one training" uses the first only, as
published numbers of other libraries do. The ceiling is what a perfect prediction would reach.
Damping was not tuned on the retrained models: it is the default, 0.1, and 1 for the Hessian.
Seconds: of the scores of all queries, without training, and with the fit of the curvature. MB: what is kept on disk or
in memory between fit and queries.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from attribution_tasks import TASKS, Task
from tables import Table, plural, processor, write
from torch import Tensor, nn

import samplewise as sw
from samplewise.attribution import evaluate

CHECKPOINTS = 5
REPEATS = 2
DIM = 512
BATCH = 500  # of passes without training
HESSIAN_DAMPING = 1.0  # chosen on other logistic regressions
MEGABYTE = 1e6


@dataclass(frozen=True)
class Scored:
    """Scores (queries, samples) of one method, and what they cost."""

    scores: Tensor
    seconds: float
    megabytes: float


class Study:
    """One task: retrained models, a model on all samples, and the scores of all methods."""

    def __init__(self, task: Task, directory: Path):
        self.task = task
        self.directory = directory / task.name
        self.data, self.asked = task.data()
        self.train = self._batches(self.data)
        self.queries = self._batches(self.asked)

    @staticmethod
    def _batches(dataset: Any) -> list[tuple[Tensor, ...]]:
        return list(zip(*(t.split(BATCH) for t in dataset.tensors), strict=True))

    # --- retraining ------------------------------------------------------------------------------------------------

    @property
    def subsets(self) -> Tensor:
        return evaluate.subsets(self.task.samples, self.task.subsets, seed=0)

    def outcomes(self) -> Tensor:
        """Outputs (repeats, subsets, queries) of the retrained models."""
        return self._retrain(self.subsets, "lds", repeats=REPEATS)

    def ensemble(self, count: int) -> Iterator[nn.Module]:
        """Models of TRAK, trained on other subsets."""
        others = evaluate.subsets(self.task.samples, self.task.models, seed=1)
        self._retrain(others, "trak", seed=1, keep_models=True)
        return islice(evaluate.models(self.task.make_step, self.directory / "trak"), count)

    def _retrain(self, subsets: Tensor, name: str, **options: Any) -> Tensor:
        task = self.task
        return evaluate.retrain(
            task.make_step,
            self.data,
            subsets,
            self.queries,
            self.directory / name,
            epochs=task.epochs,
            batch_size=task.batch_size,
            output_fn=task.output_fn,
            **options,
        )

    # --- the model on all samples ----------------------------------------------------------------------------------

    def checkpoints(self) -> list[dict[str, Tensor]]:
        """Parameters at equal distances in the training on all samples; the last ones are at its end."""
        path = self.directory / "checkpoints.pt"
        if not path.exists():
            torch.save(self._trained_on_all(), path)
        return torch.load(path, weights_only=True)

    def _trained_on_all(self) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        step = self.task.make_step()
        every = max(1, self.task.epochs // CHECKPOINTS)
        states = []
        for epoch in range(self.task.epochs):
            order = torch.randperm(self.task.samples).split(self.task.batch_size)
            step.run([tuple(t[part] for t in self.data.tensors) for part in order])
            if (epoch + 1) % every == 0:
                states.append(copy.deepcopy(step.model.state_dict()))
        return states[-CHECKPOINTS:]

    def model(self) -> nn.Module:
        model = self.task.make_model()
        model.load_state_dict(self.checkpoints()[-1])
        return model

    # --- methods ---------------------------------------------------------------------------------------------------

    def methods(self) -> dict[str, Callable[[], tuple[Tensor, float]]]:
        """Name -> function that returns scores and megabytes."""
        methods = {
            "gradient dot": lambda: self._influence(self.checkpoints()[-1:]),
            "gradient cosine": lambda: self._influence(self.checkpoints()[-1:], cosine=True),
            f"TracIn, {CHECKPOINTS} checkpoints": lambda: self._influence(self.checkpoints()),
            "influence, Hessian": self._with_hessian,
            "EK-FAC": self._with_ekfac,
        }
        if self.task.name != "lr":
            del methods["influence, Hessian"]
        for count in (1, 10, self.task.models):
            if count <= self.task.models:
                methods[f"TRAK-{count}"] = lambda count=count: self._trak(count, DIM)
        methods[f"TRAK-{self.task.models}, {2 * DIM} dimensions"] = lambda: self._trak(self.task.models, 2 * DIM)
        return methods

    def _influence(self, states: list[dict[str, Tensor]], **options: Any) -> tuple[Tensor, float]:
        checkpoints = [(state, self.task.lr) for state in states]
        model = self.task.make_model()
        scores = sw.influence(model, self.task.loss_fn, self.train, self.queries, checkpoints, **options)
        return scores, sum(_size(state.values()) for state in states)

    def _with_hessian(self) -> tuple[Tensor, float]:
        model = self.model()
        curvature = sw.attribution.hessian(model, self.task.loss_fn, self.train)
        scores = sw.influence(
            model, self.task.loss_fn, self.train, self.queries, curvature=curvature, damping=HESSIAN_DAMPING
        )
        return scores, 8 * sum(p.numel() for p in model.parameters()) ** 2 / MEGABYTE

    def _with_ekfac(self) -> tuple[Tensor, float]:
        model = self.model()
        curvature = sw.ekfac(model, self.task.loss_fn, self.train)
        path = self.directory / "ekfac"
        curvature.save(path)
        scores = sw.influence(model, self.task.loss_fn, self.train, self.queries, curvature=curvature)
        return scores, path.stat().st_size / MEGABYTE

    def _trak(self, count: int, dim: int) -> tuple[Tensor, float]:
        store = self.directory / f"store-{count}-{dim}"
        scores = sw.trak(self.ensemble(count), self.task.output_fn, self.train, self.queries, dim, directory=store)
        return scores, sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) / MEGABYTE

    def scored(self, name: str) -> Scored:
        """Scores of a method, computed now or read from the directory."""
        path = self.directory / f"{name.replace(' ', '-').replace(',', '')}.pt"
        if not path.exists():
            self.ensemble(0)  # training is not part of the time
            self.checkpoints()
            start = time.perf_counter()
            scores, megabytes = self.methods()[name]()
            seconds = time.perf_counter() - start
            torch.save({"scores": scores, "seconds": seconds, "megabytes": megabytes}, path)
        return Scored(**torch.load(path, weights_only=True))

    # --- table -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[list[str]]:
        outcomes = self.outcomes()
        rows = []
        for name, scored in {**self._baselines(), **self._all_scored()}.items():
            found = evaluate.lds(scored.scores, self.subsets, outcomes)
            single = evaluate.lds(scored.scores, self.subsets, outcomes[0], bootstraps=2)
            numbers = [f"{found.mean:.3f}", f"{found.standard_error:.3f}", f"{single.mean:.3f}"]
            cost = [f"{scored.seconds:.1f}", f"{scored.megabytes:.1f}"] if scored.seconds else ["", ""]
            rows.append([name, *numbers, *cost])
        assert found.agreement is not None
        rows.append(["ceiling", f"{found.ceiling:.2f}", "", f"{max(found.agreement, 0) ** 0.5:.2f}", "", ""])
        return rows

    def _baselines(self) -> dict[str, Scored]:
        found = evaluate.baselines(self.model(), self.task.loss_fn, self.train, self.queries)
        random = torch.randn(self.task.queries, self.task.samples, generator=torch.Generator().manual_seed(0))
        return {name: Scored(scores, 0.0, 0.0) for name, scores in {"random": random, **found}.items()}

    def _all_scored(self) -> dict[str, Scored]:
        found = {}
        for name in self.methods():
            print(f"{self.task.name}: {name}", flush=True)
            found[name] = self.scored(name)
        return found


def _size(tensors: Any) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / MEGABYTE


def table(study: Study, threads: int) -> Table:
    task = study.task
    sizes = (
        f"{task.samples:,} training samples, {task.queries} queries, {task.subsets} random halves, {task.epochs} epochs"
    )
    machine = f"torch {torch.__version__}, {plural(threads, 'thread')}; {processor()}"
    header = ["method", "LDS", "± standard error", "LDS, one training", "seconds", "MB"]
    damping = f"damping 0.1, that of the Hessian {HESSIAN_DAMPING:g}" if task.name == "lr" else "damping 0.1"
    caption = f"{sizes}; TRAK with {DIM} dimensions, if no other number is given; {damping}. {machine}."
    return Table(f"lds-{task.name}", f"Attribution: {task.name}", [header, *study.rows()], caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="task", choices=[*TASKS, []], help="default: all")
    parser.add_argument("--directory", type=Path, default=Path("build/attribution"))
    parser.add_argument("--small", action="store_true", help="few samples and models, to test the benchmark")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="document whose tables are replaced")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.tasks or TASKS:
        task = TASKS[name].small() if arguments.small else TASKS[name]
        found = table(Study(task, arguments.directory), arguments.threads)
        print(found, flush=True)
        if arguments.write:
            write(found, arguments.write)


if __name__ == "__main__":
    main()
