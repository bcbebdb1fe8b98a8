"""Quality of attribution methods: linear datamodeling score (LDS), seconds and megabytes of each.

python benchmarks/attribution.py [task ...] [--directory DIRECTORY] [--small] [--write DOCUMENT]

Tasks (see attribution_tasks.py): lr, mlp, cnn, transformer. For each, 50 models are trained twice on random halves of
the training data, with different seeds; 10 or 50 further models on other halves are those of TRAK, and a run on all
samples, with 5 checkpoints, is that of the other methods. Everything is kept in the directory: a second call computes
only what is missing, and a call that was interrupted continues. The first call takes about an hour.

  random                  normal random numbers
  neighbors, loss         `samplewise.attribution.evaluate.baselines`, without gradients
  BM25                    overlap of rare words, for text
  gradient dot, cosine    sw.influence at the last checkpoint
  TracIn                  sw.influence over 5 checkpoints
  influence, Hessian      sw.influence with curvature=sw.attribution.hessian (logistic regression)
  EK-FAC                  sw.influence with curvature=sw.ekfac
  EK-FAC + CG             sw.influence with refine=20, damping 10; "of the run": damping 1 / (learning rate · updates)
  metagradient            sw.metagradient of the run on all samples
  mean of 5 runs          scores of 5 runs on all samples with different seeds, with the one of the other methods
  mean of 10 models       scores of 10 models of TRAK
  TRAK-k                  sw.trak with k models, 512 dimensions each
  kronfluence EK-FAC      with sampled labels and the damping of samplewise; if kronfluence is installed
  bergson EK-FAC          with its settings (linear layers without bias, sampled labels); for the transformer
  dattri TRAK-k           with the models, outputs and dimensions of TRAK-k; if dattri is installed

Conjugate gradients and metagradients are computed for the first queries only. The table has a column for each number of
queries, in which all methods are compared.
A second table leaves 5 % of the samples out of the very run whose model is explained: the same initial parameters and
order, and weight 0. Its ceiling is the agreement with the same retraining with weights of 1 - 1e-6 for the others,
which is 1 unless the run is chaotic.

LDS is the agreement with the mean output of two trainings on each subset; "one training" uses the first only, as
published numbers of other libraries do. The ceiling is what a perfect prediction would reach.
Damping was not tuned on the retrained models: it is the default, and 1 for the Hessian.
Seconds: CPU time of the scores of all queries, without training, and with the fit of the curvature. MB: what is kept on
disk or in memory between fit and queries.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attribution_peers import of_bergson, of_dattri, of_kronfluence
from attribution_tasks import TASKS, LanguageModel, Task
from tables import Table, plural, processor, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import evaluate

CHECKPOINTS = 5
AVERAGED = 10  # models of TRAK, in means of EK-FAC
ITERATIONS = 20  # of conjugate gradients, at most
LEFT_OUT = 0.05
PERTURBATION = 1e-6  # of the weights of samples that stay in
REPEATS = 2
PEERS = ("bergson", "dattri", "kronfluence")
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


class Recorder:
    """Callback that keeps the samples of each update, and the parameters every few epochs."""

    def __init__(self, every: int):
        self.every = every
        self.order: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: sw.Trainer) -> None:
        trainer.step.require(columns={"id": "id"})

    def on_update(self, update: sw.Update) -> None:
        self.order.append(torch.as_tensor(update.columns["id"]))

    def on_epoch_end(self, trainer: sw.Trainer) -> None:
        if trainer.step.counters.epochs % self.every == 0:
            self.states.append(copy.deepcopy(trainer.model.state_dict()))


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

    @property
    def loader(self) -> DataLoader:
        return DataLoader(sw.Indexed(self.data), batch_size=self.task.batch_size, shuffle=True)

    def checkpoints(self) -> list[dict[str, Tensor]]:
        """Parameters at equal distances in the run on all samples; the last ones are at its end."""
        return self._run_on_all()["states"][-CHECKPOINTS:]

    def _run_on_all(self, seed: int = 0) -> dict[str, list]:
        """`states` and `order` of the run of a trainer in the directory `run(seed)`, which is made if it is missing."""
        path = self.run(seed).with_suffix(".pt")
        if not path.exists():
            recorder = Recorder(max(1, self.task.epochs // CHECKPOINTS))
            torch.manual_seed(seed)
            step = self.task.make_step()
            options = {"seed": seed, "progress": False, "device": "cpu", "exists": "overwrite"}
            sw.Trainer(step, self.run(seed), [recorder], **options).fit(self.loader, epochs=self.task.epochs)
            torch.save({"states": recorder.states, "order": recorder.order}, path)
        return torch.load(path, weights_only=True)

    def run(self, seed: int = 0) -> Path:
        return self.directory / f"run-{seed}"

    def model(self, seed: int = 0) -> nn.Module:
        """Model after the run."""
        model = self.task.make_model()
        model.load_state_dict(self._run_on_all(seed)["states"][-1])
        return model

    # --- the same run without some samples -------------------------------------------------------------------------

    @property
    def removals(self) -> Tensor:
        """Samples that stay in."""
        return evaluate.subsets(self.task.samples, self.task.removals, fraction=1 - LEFT_OUT, seed=2)

    def outcomes_of_removals(self) -> Tensor:
        """Outputs (2, subsets, queries) after the run without some samples, and the same with perturbed weights."""
        rows = []
        for weight in (1, 1 - PERTURBATION):
            for number, subset in enumerate(self.removals):
                path = self.directory / f"removal-{number:03}-{weight}.pt"
                if not path.exists():
                    weights = torch.zeros(self.task.samples)
                    weights[subset] = weight
                    torch.save(self._outputs(self._repeat_run(weights)), path)
                rows.append(torch.load(path, weights_only=True))
        return torch.stack(rows).unflatten(0, (2, -1))

    def _repeat_run(self, weights: Tensor) -> nn.Module:
        """Model after the run, in which each sample has a weight."""
        torch.manual_seed(0)
        step = self.task.make_step(sw.weight(2))
        columns = *self.data.tensors, weights
        step.run(tuple(column[ids] for column in columns) for ids in self._run_on_all()["order"])
        return step.model

    def _outputs(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            outputs = [self.task.output_fn(model.eval(), batch) for batch in self.queries]
        return torch.cat([part[0] if isinstance(part, tuple) else part for part in outputs])

    # --- methods ---------------------------------------------------------------------------------------------------

    def methods(self) -> dict[str, Callable[[], tuple[Tensor, float]]]:
        """Name -> function that returns scores and megabytes."""
        task = self.task
        refined, differentiated = task.refined_queries, task.metagradient_queries
        averaged, runs = min(AVERAGED, task.models), range(task.runs)
        methods = {
            "gradient dot": lambda: self._influence(self.checkpoints()[-1:]),
            "gradient cosine": lambda: self._influence(self.checkpoints()[-1:], cosine=True),
            f"TracIn, {CHECKPOINTS} checkpoints": lambda: self._influence(self.checkpoints()),
            "influence, Hessian": self._with_hessian,
            "EK-FAC": lambda: self._with_ekfac([self.model()]),
            "EK-FAC + CG": lambda: self._with_ekfac([self.model()], refined, refine=ITERATIONS),
            "EK-FAC + CG, damping of the run": lambda: self._with_ekfac(
                [self.model()], refined, refine=ITERATIONS, run=self.run()
            ),
            "metagradient": lambda: self._metagradient(range(1), differentiated),
            f"EK-FAC, mean of {task.runs} runs": lambda: self._with_ekfac(map(self.model, runs)),
            f"metagradient, mean of {task.runs} runs": lambda: self._metagradient(runs, differentiated),
            f"EK-FAC, mean of {averaged} models": lambda: self._with_ekfac(self.ensemble(averaged)),
        }
        if task.name != "lr":
            del methods["influence, Hessian"]
        if task.runs == 1:
            del methods["EK-FAC, mean of 1 runs"], methods["metagradient, mean of 1 runs"]
        if not isinstance(task.make_step().optimizer, torch.optim.SGD):  # for which `run=` is refused
            del methods["EK-FAC + CG, damping of the run"]
        for count in sorted({1, averaged, task.models}):
            methods[f"TRAK-{count}"] = lambda count=count: self._trak(count, DIM)
        methods[f"TRAK-{task.models}, {2 * DIM} dimensions"] = lambda: self._trak(task.models, 2 * DIM)
        methods["kronfluence EK-FAC"] = self._of_kronfluence
        if task.make_model is LanguageModel:
            methods["bergson EK-FAC"] = self._of_bergson
        methods[f"dattri TRAK-{averaged}"] = lambda: self._of_dattri(averaged)
        return {name: method for name, method in methods.items() if self._is_available(name)}

    def _is_available(self, name: str) -> bool:
        """False for a method of a library that is not installed, unless the scores are in the directory."""
        library = name.split()[0]
        return library not in PEERS or find_spec(library) is not None or self._path(name).exists()

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

    def _with_ekfac(
        self, models: Iterable[nn.Module], count: int | None = None, **options: Any
    ) -> tuple[Tensor, float]:
        """Mean scores of the first queries, each model with a curvature of its own. count: default: all queries."""
        copies = [copy.deepcopy(model) for model in models]
        curvatures = [sw.ekfac(model, self.task.loss_fn, self.train) for model in copies]
        path = self.directory / "ekfac"
        curvatures[0].save(path)
        queries = self._first_queries(count)
        scores = sw.influence(copies, self.task.loss_fn, self.train, queries, curvature=curvatures, **options)
        return scores, len(copies) * path.stat().st_size / MEGABYTE

    def _metagradient(self, seeds: Iterable[int], count: int) -> tuple[Tensor, float]:
        """Mean scores of the first queries over runs."""
        rows, megabytes, queries = [], 0.0, self._first_queries(count)
        for run in map(self.run, seeds):
            rows.append(-sw.metagradient(run, self.task.make_step, self.loader, queries, device="cpu"))
            megabytes += _size_of_files(run)
        return torch.stack(rows).mean(0), megabytes

    def _first_queries(self, count: int | None) -> list[tuple[Tensor, ...]]:
        return self._batches(TensorDataset(*(t[:count] for t in self.asked.tensors)))

    def _trak(self, count: int, dim: int) -> tuple[Tensor, float]:
        store = self.directory / f"store-{count}-{dim}"
        scores = sw.trak(self.ensemble(count), self.task.output_fn, self.train, self.queries, dim, directory=store)
        return scores, _size_of_files(store)

    def _of_kronfluence(self) -> tuple[Tensor, float]:
        directory = self.directory / "kronfluence"
        scores, _, _ = of_kronfluence(self.model(), self.data, self.asked, "ekfac", directory)
        return scores, _size_of_files(directory)

    def _of_bergson(self) -> tuple[Tensor, float]:
        directory = self.directory / "bergson"
        scores = of_bergson(self.model(), self.data, self.asked, directory)
        return scores, _size_of_files(directory / "run")

    def _of_dattri(self, count: int) -> tuple[Tensor, float]:
        states = [copy.deepcopy(model.state_dict()) for model in self.ensemble(count)]
        scores = of_dattri(self.task.make_model(), states, self.task.output_fn, self.data, self.asked, DIM)
        return scores, _size([torch.empty(count, self.task.samples, DIM)])

    def scored(self, name: str) -> Scored:
        """Scores of a method, computed now or read from the directory."""
        path = self._path(name)
        if not path.exists():
            self.ensemble(0)  # training is not part of the time
            for seed in range(self.task.runs):
                self._run_on_all(seed)
            start = time.process_time()
            scores, megabytes = self.methods()[name]()
            seconds = time.process_time() - start
            torch.save({"scores": scores, "seconds": seconds, "megabytes": megabytes}, path)
        return Scored(**torch.load(path, weights_only=True))

    def _path(self, name: str) -> Path:
        return self.directory / f"{name.replace(' ', '-').replace(',', '')}.pt"

    # --- table -----------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        """Numbers of queries for which there are scores, the first ones of all."""
        task = self.task
        return sorted({min(n, task.queries) for n in (task.queries, task.refined_queries, task.metagradient_queries)})

    def rows(self) -> list[list[str]]:
        """Rows of the table of random halves, with the header."""
        outcomes = self.outcomes()
        counts = self.counts[::-1]
        header = ["method", *(f"LDS, {count} queries" for count in counts), "one training", "seconds", "MB"]
        rows = [header]
        for name, scored in {**self._baselines(), **self._all_scored()}.items():
            cells = [_lds(scored, self.subsets, outcomes, count) for count in counts]
            single = ""
            if len(scored.scores) == self.task.queries:
                single = f"{evaluate.lds(scored.scores, self.subsets, outcomes[0], bootstraps=2).mean:.3f}"
            cost = [f"{scored.seconds:.1f}", f"{scored.megabytes:.1f}"] if scored.seconds else ["", ""]
            rows.append([name, *cells, single, *cost])
        ceilings = [self._ceiling(outcomes[..., :count]) for count in counts]
        return [*rows, ["ceiling", *(f"{mean:.2f}" for mean, _ in ceilings), f"{ceilings[0][1]:.2f}", "", ""]]

    def rows_of_removals(self) -> list[list[str]]:
        """Rows of the table of removals from the run, with the header."""
        outcomes = self.outcomes_of_removals()
        counts = self.counts[::-1]
        rows = [["method", *(f"LDS, {count} queries" for count in counts)]]
        for name, scored in {**self._baselines(), **self._all_scored()}.items():
            rows.append([name, *(_lds(scored, self.removals, outcomes[0], count) for count in counts)])
        ceilings = [self._ceiling(outcomes[..., :count]) for count in counts]
        return [*rows, ["ceiling", *(f"{single:.2f}" for _, single in ceilings)]]

    @staticmethod
    def _ceiling(outcomes: Tensor) -> tuple[float, float]:
        """Ceilings of the mean of all trainings, and of a single training."""
        perfect = torch.zeros(outcomes.shape[2], 1)
        found = evaluate.lds(perfect, [torch.tensor([0])] * outcomes.shape[1], outcomes, bootstraps=2)
        assert found.agreement is not None and found.ceiling is not None
        return found.ceiling, max(found.agreement, 0) ** 0.5

    def _baselines(self) -> dict[str, Scored]:
        random = torch.randn(self.task.queries, self.task.samples, generator=torch.Generator().manual_seed(0))
        scores = {"random": random}
        scores |= evaluate.baselines(self.model(), self.task.loss_fn, self.train, self.queries)
        for name, words in self.task.words.items():
            scores[f"BM25, {name}"] = bm25(words(self.data), words(self.asked))
        return {name: Scored(values, 0.0, 0.0) for name, values in scores.items()}

    def _all_scored(self) -> dict[str, Scored]:
        found = {}
        for name in self.methods():
            print(f"{self.task.name}: {name}", flush=True)
            found[name] = self.scored(name)
        return found


def _lds(scored: Scored, subsets: Tensor, outcomes: Tensor, count: int) -> str:
    """LDS ± standard error of the first queries; empty if they have no scores."""
    if len(scored.scores) < count:
        return ""
    found = evaluate.lds(scored.scores[:count], subsets, outcomes[..., :count])
    return f"{found.mean:.3f} ± {found.standard_error:.3f}"


def bm25(documents: Tensor, queries: Tensor, saturation: float = 1.5) -> Tensor:
    """Scores (queries, documents) of words that both have, of which rare ones count more (Okapi BM25).

    Rows are the words of a document or query. All documents are of the same length, so that the factor of the length
    is 1.
    """
    words = F.one_hot(torch.cat([documents, queries])).sum(1).float()  # (documents and queries, words)
    counts, asked = words[: len(documents)], words[len(documents) :]
    containing = (counts > 0).sum(0)
    rarity = ((len(documents) - containing + 0.5) / (containing + 0.5) + 1).log()
    return asked @ (rarity * counts * (saturation + 1) / (counts + saturation)).T


def _size_of_files(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / MEGABYTE


def _size(tensors: Any) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / MEGABYTE


def tables(study: Study, threads: int) -> list[Table]:
    task = study.task
    data = f"{task.samples:,} training samples, {task.epochs} epochs"
    machine = f"torch {torch.__version__}, {plural(threads, 'thread')}; {processor()}"
    damping = "damping 0.1, with CG 10"
    damping += f", that of the Hessian {HESSIAN_DAMPING:g}" if task.name == "lr" else ""
    caption = (
        f"LDS ± standard error; {data}, {task.subsets} random halves. CPU seconds; those of CG are of "
        f"{task.refined_queries} queries, of metagradients of {task.metagradient_queries}. TRAK with {DIM} dimensions, "
        f"if no other number is given; {damping}. {machine}."
    )
    found = [Table(f"lds-{task.name}", f"Attribution: {task.name}", study.rows(), caption)]
    if task.removals:
        caption = f"LDS ± standard error; {data}, {task.removals} subsets without {LEFT_OUT:.0%} of the samples."
        title = f"Attribution: {task.name}, {LEFT_OUT:.0%} left out of the same run"
        found.append(Table(f"lds-{task.name}-run", title, study.rows_of_removals(), caption))
    return found


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
        for found in tables(Study(task, arguments.directory), arguments.threads):
            print(found, flush=True)
            if arguments.write:
                write(found, arguments.write)


if __name__ == "__main__":
    main()
