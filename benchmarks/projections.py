"""Projections of gradients: cost for a transformer, and LDS of TRAK by method and number of dimensions.

    python benchmarks/projections.py cost
    python benchmarks/projections.py gpt2 plain|influence|trak
    python benchmarks/projections.py lds DIRECTORY
    python benchmarks/projections.py methods DIRECTORY

cost    GPT-2 small with random weights, 8 sequences of 128 tokens, one thread: projections in plain backward passes,
        interleaved with them, without the forward pass, in seconds of the processor
gpt2    the same model: seconds of the processor and peak memory per training sample, in a process of its own
lds     small tasks; TRAK with 5 models on random halves. Trained models are kept in DIRECTORY. Needs scikit-learn
methods the same tasks: TRAK and EK-FAC of one of these models, and their means over all five
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from attribution_tasks import TASKS, LanguageModel, log_likelihoods, sequence_losses
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.attribution import evaluate, margin
from samplewise.engine.gradients import project
from samplewise.engine.projection import Projection

ROUNDS, SEQUENCES, LENGTH = 2, 8, 128
MODELS, HALVES, REPEATS, PROJECTIONS = 5, 32, 2, 2
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)  # dim / n
SMALL = (("digits", 300), ("digits", 1200), ("cancer", 400), ("diabetes", 340), ("transformer", 1000))


def gpt2() -> tuple[nn.Module, Tensor]:
    """GPT-2 small with random weights, and random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    return model, torch.randint(model.config.vocab_size, (2 * SEQUENCES, LENGTH))


def text_losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Summed loss (b,) of the tokens of each sequence."""
    (tokens,) = batch
    logits = model(tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def cost_per_sample(what: str) -> None:
    """Print seconds and memory of a forward and backward pass, of influence for 8 queries, or of features of TRAK."""
    model, tokens = gpt2()
    train, queries = [(tokens[:SEQUENCES],)] * 2, [(tokens[SEQUENCES:],)]

    def run() -> None:
        if what == "plain":
            for batch in train:
                text_losses(model, batch).sum().backward()
        elif what == "influence":
            sw.influence(model, text_losses, train, queries)
        else:
            with tempfile.TemporaryDirectory() as directory:
                store = sw.attribution.ProjectedStore(directory, 4096, dtype="float32")
                store.fill(model, text_losses, train)

    text_losses(model, (tokens[:1],)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    run()
    seconds = (time.process_time() - start) / (2 * SEQUENCES)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{what}: {seconds:.2f} s per sample, peak {peak / 2**20:.1f} GB, {before / 2**20:.1f} GB before")


def cost() -> None:
    """Print the cost of each projection in plain backward passes."""
    model, tokens = gpt2()

    def seconds(backward: Callable[[Tensor], object]) -> float:
        losses = text_losses(model, (tokens[:SEQUENCES],))
        start = time.process_time()
        backward(losses)
        end = time.process_time()
        model.zero_grad()
        return end - start

    projections = {
        f"{method}, dim {dim}": Projection(dim, 0, method)
        for method, dims in (("factored", (512, 2048, 4096)), ("dense", (512,)))
        for dim in dims
    }
    ratios: dict[str, list[float]] = {name: [] for name in projections}
    for number in range(ROUNDS + 1):
        for name, projection in projections.items():
            plain = seconds(lambda losses: losses.sum().backward())
            series = seconds(
                lambda losses, projection=projection: project(sw.gradients(losses, model, strategy="twice"), projection)
            )
            if number:  # the first round draws the random signs
                ratios[name].append(series / plain)
    for name, values in ratios.items():
        print(f"{name:20} {statistics.median(values):.2f} backward passes", flush=True)


@dataclass(frozen=True)
class Small:
    """A small task. output_fn: (model, batch) -> outputs, or (outputs, weights)"""

    train: TensorDataset
    queries: TensorDataset
    make_step: Callable[[], sw.Step]
    output_fn: Callable
    epochs: int


def prediction(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Prediction of a regression, whose squared error has the derivative 2 (prediction - target)."""
    outputs = model(batch[0])[:, 0]
    return outputs, 2 * (batch[1][:, 0] - outputs.detach())


def task_of(name: str, samples: int) -> Small:
    """Task with this number of training samples."""
    if name == "transformer":
        data, more = TASKS["transformer"].make_data(samples, 100)

        def transformer() -> sw.Step:
            model = LanguageModel()
            return sw.Step(model, torch.optim.Adam(model.parameters(), lr=1e-3), sequence_losses, samples=50)

        return Small(data, more, transformer, log_likelihoods, 20)
    from sklearn import datasets
    from sklearn.preprocessing import StandardScaler

    bunch = getattr(
        datasets, {"digits": "load_digits", "diabetes": "load_diabetes", "cancer": "load_breast_cancer"}[name]
    )()
    regression = name == "diabetes"
    x = torch.tensor(StandardScaler().fit_transform(bunch.data)).float()
    y = torch.tensor(StandardScaler().fit_transform(bunch.target[:, None])).float() if regression else None
    y = torch.tensor(bunch.target) if y is None else y
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    classes = 1 if regression else int(y.max()) + 1

    def mlp() -> sw.Step:
        model = nn.Sequential(
            nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
        )
        loss = nn.MSELoss() if regression else nn.CrossEntropyLoss()
        return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, samples=32)

    train, queries = TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:][:100], y[samples:][:100])
    return Small(train, queries, mlp, prediction if regression else margin, 15)


@dataclass(frozen=True)
class Study:
    """A task with outcomes of models trained on random halves, and models trained on other halves."""

    task: Small
    outcomes: Tensor
    halves: Tensor
    directory: Path

    def models(self) -> Iterator[nn.Module]:
        return evaluate.models(self.task.make_step, self.directory / "models")

    def lds(self, scores: Tensor) -> evaluate.LDS:
        return evaluate.lds(scores, self.halves, self.outcomes)

    def trak(self, models: Iterable[nn.Module], dim: int, seed: int = 0, method: str = "factored") -> evaluate.LDS:
        train, queries = [self.task.train.tensors], [self.task.queries.tensors]
        return self.lds(sw.trak(models, self.task.output_fn, train, queries, dim, seed=seed, projection=method))

    def ekfac(self, models: Iterable[nn.Module]) -> evaluate.LDS:
        loss_fn, train = self.task.make_step().loss_fn, self.task.train.tensors
        batches = list(zip(*(column.split(100) for column in train), strict=True))
        scores = []
        for model in models:
            curvature = sw.ekfac(model, loss_fn, batches)
            scores.append(sw.influence(model, loss_fn, batches, [self.task.queries.tensors], curvature=curvature))
        return self.lds(torch.stack(scores).mean(0))


def study_of(name: str, samples: int, directory: Path) -> Study:
    task = task_of(name, samples)
    place = directory / f"{name}-{samples}"
    queries = [task.queries.tensors]
    options = {"epochs": task.epochs, "output_fn": task.output_fn}
    halves, others = evaluate.subsets(samples, HALVES, seed=0), evaluate.subsets(samples, MODELS, seed=1)
    outcomes = evaluate.retrain(task.make_step, task.train, halves, queries, place / "lds", repeats=REPEATS, **options)
    evaluate.retrain(task.make_step, task.train, others, queries, place / "models", keep_models=True, seed=1, **options)
    return Study(task, outcomes, halves, place)


def lds(directory: Path) -> None:
    """Print the LDS of TRAK for each task, method and number of dimensions."""
    for name, samples in SMALL:
        study = study_of(name, samples, directory)
        for fraction in FRACTIONS:
            dim = int(samples * fraction)
            cells = []
            for method in ("factored", "dense"):
                results = [study.trak(study.models(), dim, MODELS * seed, method) for seed in range(PROJECTIONS)]
                mean = statistics.mean(result.mean for result in results)
                cells.append(f"{mean:.3f} ± {results[0].standard_error:.3f}")
            row = (f"{name}, n = {samples}", f"{fraction:g} n", *cells, f"{results[0].ceiling:.2f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def methods(directory: Path) -> None:
    """Print the LDS of TRAK and EK-FAC, from one model and from several."""
    for name, samples in SMALL:
        if name == "diabetes":  # its outputs are predictions, which scores of losses do not predict
            continue
        study = study_of(name, samples, directory)
        dim = samples // 4
        results = [
            study.ekfac(islice(study.models(), 1)),
            study.trak(islice(study.models(), 1), dim),
            study.ekfac(study.models()),
            study.trak(study.models(), dim),
        ]
        cells = [f"{result.mean:.3f} ± {result.standard_error:.3f}" for result in results]
        print(f"| {name}, n = {samples} | {' | '.join(cells)} | {results[0].ceiling:.2f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "cost":
        cost()
    elif sys.argv[1] == "gpt2":
        cost_per_sample(sys.argv[2])
    else:
        {"lds": lds, "methods": methods}[sys.argv[1]](Path(sys.argv[2]))
