"""Choice of the defaults of curvature: LDS on four small tasks that no published table uses.

    python benchmarks/attribution_curvature.py [task ...] [--directory DIRECTORY] [--write DOCUMENT]

Networks with two hidden layers, trained with SGD and momentum: on two datasets of scikit-learn, wine and breast cancer
(cancer), and on two synthetic ones, eight overlapping normal distributions (clusters) and Friedman's regression
(regression). 100 models are trained twice on random halves of the training data. The scores are those of one model
trained on all samples, except those of "10 models", on other halves or on all samples with other seeds. Takes ten
minutes; what is in the directory is not computed again.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from sklearn import datasets
from tables import Table, processor, write
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.attribution import evaluate
from samplewise.attribution.run_damping import RunDamping

SUBSETS = 100
MODELS = 10
BATCH = 20
MOMENTUM = 0.9
RATE = 0.05
SEEDS = range(5)
ITERATIONS = 20


class Task(NamedTuple):
    data: Callable[[], tuple[Tensor, Tensor]]
    samples: int
    width: int
    outputs: int
    epochs: int


def table_of(load: Callable) -> tuple[Tensor, Tensor]:
    data = load()
    return torch.tensor(data.data).float(), torch.tensor(data.target)


def clusters() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(8, (900,), generator=generator)
    centers = torch.randn(8, 20, generator=generator)
    return 1.2 * torch.randn(900, 20, generator=generator) + centers[y], y


def regression() -> tuple[Tensor, Tensor]:
    x, y = datasets.make_friedman1(700, 10, noise=1.0, random_state=3)
    return torch.tensor(x).float(), torch.tensor((y - y.mean()) / y.std()).float()[:, None]


TASKS = {
    "wine": Task(partial(table_of, datasets.load_wine), 120, 16, 3, 60),
    "cancer": Task(partial(table_of, datasets.load_breast_cancer), 400, 32, 2, 60),
    "clusters": Task(clusters, 600, 48, 8, 40),
    "regression": Task(regression, 500, 32, 1, 60),
}


class Study:
    """Retrained models of a task, and a model on all of its samples."""

    def __init__(self, name: str, directory: Path):
        self.task = TASKS[name]
        self.directory = directory / name
        x, y = self.task.data()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        x, y = ((x - x.mean(0)) / x.std(0))[order], y[order]
        self.inputs = x.shape[1]
        self.loss_fn = nn.CrossEntropyLoss() if self.task.outputs > 1 else nn.MSELoss()
        n = self.task.samples
        self.data = TensorDataset(x[:n], y[:n])
        self.train = list(zip(x[:n].split(100), y[:n].split(100), strict=True))
        self.queries = [(x[n:], y[n:])]
        self.subsets = evaluate.subsets(n, SUBSETS, seed=0)
        self.outcomes = self._retrain(self.subsets, "lds", repeats=2)
        self.model = self._trained_on_all()
        updates = self.task.epochs * -(-n // BATCH)
        self.rule = RunDamping(RATE, updates, MOMENTUM).value

    def make_step(self) -> sw.Step:
        width = self.task.width
        hidden = nn.Linear(self.inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        model = nn.Sequential(*hidden, nn.Linear(width, self.task.outputs))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        return sw.Step(model, optimizer, self.loss_fn)

    def output_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Margin, or minus the squared error."""
        if self.task.outputs > 1:
            return sw.attribution.margin(model, batch)
        outputs = -(model(batch[0]) - batch[1]).square().mean(1)
        return outputs, torch.ones_like(outputs)

    def _retrain(self, subsets: Tensor, name: str, **options: object) -> Tensor:
        return evaluate.retrain(
            *(self.make_step, self.data, subsets, self.queries, self.directory / name),
            epochs=self.task.epochs,
            batch_size=BATCH,
            output_fn=self.output_fn,
            **options,
        )

    def _trained_on_all(self) -> nn.Module:
        torch.manual_seed(0)
        step = self.make_step()
        x, y = self.data.tensors
        for _ in range(self.task.epochs):
            step.run([(x[rows], y[rows]) for rows in torch.randperm(len(x)).split(BATCH)])
        return step.model

    # --- methods -----------------------------------------------------------------------------------------------------

    def lds(self, model: object, **options: object) -> evaluate.LDS:
        scores = sw.influence(model, self.loss_fn, self.train, self.queries, **options)
        return evaluate.lds(scores, self.subsets, self.outcomes)

    def ekfac(self, model: nn.Module, **options: object) -> sw.attribution.EKFAC:
        return sw.ekfac(model, self.loss_fn, self.train, **options)

    def rows(self) -> dict[str, str]:
        """LDS of each method, as text."""
        plain = self.lds(self.model)
        sampled = [self.lds(self.model, curvature=self.ekfac(self.model, labels="sampled", seed=s)).mean for s in SEEDS]
        expected = self.ekfac(self.model)
        rule = self.rule / expected.mean_eigenvalue
        rows = {
            "dot product": _text(plain),
            "EK-FAC, sampled labels, 5 seeds": f"{mean(sampled):.3f} ({min(sampled):.3f} to {max(sampled):.3f})",
            "EK-FAC, labels of the data": _text(self.lds(self.model, curvature=self.ekfac(self.model, labels="data"))),
            "EK-FAC": _text(self.lds(self.model, curvature=expected)),
            "EK-FAC, damping of the run": _text(self.lds(self.model, curvature=expected, damping=rule)),
        }
        for multiple in (0.1, 1.0, 10.0, 100.0):
            found = self.lds(self.model, curvature=expected, refine=ITERATIONS, damping=multiple)
            rows[f"refine={ITERATIONS}, damping {multiple:g}"] = _text(found)
        found = self.lds(self.model, curvature=expected, refine=ITERATIONS, damping=rule)
        rows[f"refine={ITERATIONS}, damping of the run"] = _text(found)
        rows["Hessian"] = _text(
            self.lds(self.model, curvature=sw.attribution.hessian(self.model, self.loss_fn, self.train))
        )
        rows |= self.rows_of_models("halves", evaluate.subsets(self.task.samples, MODELS, seed=1))
        rows |= self.rows_of_models("all samples", torch.arange(self.task.samples).repeat(MODELS, 1))
        rows["damping of the run, multiple of the mean"] = f"{rule:.2g}"
        rows["ceiling"] = f"{plain.ceiling:.2f}"
        return rows

    def rows_of_models(self, name: str, subsets: Tensor) -> dict[str, str]:
        """LDS of scores that are averaged over models trained on subsets."""
        self._retrain(subsets, name, seed=1, keep_models=True)

        def models() -> Iterator[nn.Module]:
            return evaluate.models(self.make_step, self.directory / name)

        curvatures = [self.ekfac(model) for model in models()]
        plain = self.lds(models(), curvature=curvatures)
        refined = self.lds(models(), curvature=curvatures, refine=ITERATIONS)
        return {
            f"EK-FAC, {MODELS} models of {name}": _text(plain),
            f"refine={ITERATIONS}, damping 10, {MODELS} models of {name}": _text(refined),
        }


def _text(lds: evaluate.LDS) -> str:
    return f"{lds.mean:.3f} ± {lds.standard_error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="task", help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--directory", type=Path, default=Path("build/attribution-curvature"))
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="replace the table in this document")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = {name: Study(name, arguments.directory).rows() for name in arguments.tasks or TASKS}
    methods = next(iter(columns.values()))
    body = [[method, *(column[method] for column in columns.values())] for method in methods]
    caption = f"{SUBSETS} random halves, LDS ± standard error. torch {torch.__version__}, 1 thread; {processor()}."
    table = Table("lds-curvature", "Curvature", [["method", *columns], *body], caption)
    print(table.markdown)
    if arguments.write is not None:
        write(table, arguments.write)


if __name__ == "__main__":
    main()
