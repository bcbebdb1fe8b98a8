"""`attribute`: the training samples behind the predictions of a trained model, and the files of the results.

scores.parquet     query, sample, score: one row per query and training sample, for each query in descending order
attribution.html   each query with its training samples of highest and lowest scores
attribution.json   method, checkpoints, queries, and the checksum of scores.parquet; written last

Each file is written atomically.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from samplewise.attribution.methods import Rerun, Scores, method_named
from samplewise.attribution.ordered_samples import OrderedSamples
from samplewise.attribution.subject import Outcomes, Subject, check_queries
from samplewise.core.files import absolute, sha256, write_bytes, write_json
from samplewise.core.losses import LossFn
from samplewise.core.state import eval_mode
from samplewise.core.text import SHOWN, Table, Tabular, plural
from samplewise.dataset_pass import parameters_kept
from samplewise.ledger.files import load_pyarrow, write_parquet
from samplewise.ledger.previews import dataset_names
from samplewise.ledger.rows import array_from_tensor
from samplewise.loop.checkpoint.trained import read_runs
from samplewise.report.attribution import (
    MAX_QUERIES,
    AttributionPage,
    ShownQuery,
    ShownSample,
    Trust,
    attribution_page,
    read_trust,
)
from samplewise.report.previews import Previews, read_previews
from samplewise.step.step import Step

FORMAT = "samplewise attribution"
VERSION = 1
MAX_ROWS = 5_000_000  # of scores.parquet
KEPT = 1000  # highest and lowest scores of a query that are written if all of them would be more rows

Run = str | os.PathLike[str]


def attribute(
    model: nn.Module,
    loss_fn: LossFn,
    train: DataLoader[Any],
    validation: DataLoader[Any],
    run: Run | Sequence[Run],
    *,
    queries: str | Sequence[int] = "worst",
    limit: int = 10,
    method: Literal["influence", "trak", "ekfac", "metagradient"] = "influence",
    checkpoints: int | None = None,
    dim: int | None = None,
    damping: float | None = None,
    refine: int | None = None,
    top: int = 5,
    trust: Run | None = None,
    make_step: Callable[[], Step] | None = None,
) -> AttributionResults:
    """Find the training samples behind predictions of a trained model, from the checkpoints of its run.

    Every training sample gets a score for each query. Queries are samples of the validation loader. Samples are
    identified by their index in the dataset; the order of the loaders does not matter, and random augmentation is that
    of the first epoch. `samplewise attribute RECIPE` calls this function.

    model, loss_fn: as in the training; the parameters are those of the checkpoints, and both are restored
    train, validation: DataLoaders of map-style datasets
    run: run directory, or a checkpoint; a list of them is an ensemble, whose first run is that of the predictions
    queries: "worst" (default: the highest losses), "wrong" (misclassified samples, the highest losses first), a list of
        indices, or indices and ranges as text, such as "0,5,10-20"
    limit: largest number of queries with "worst" and "wrong"
    method: "influence" (default: TracIn), "trak", "ekfac" or "metagradient"
    checkpoints: number of newest checkpoints of each run; default all, 1 for "ekfac" and "metagradient"
    dim: for "trak"; default: a quarter of the number of training samples, at most 512
    damping: for "trak" and "ekfac", see `Curvature`; default 0.1, with `refine` that of the run, 1 / (learning rate *
        updates), or 10 if its optimizer is not SGD
    refine: for "ekfac": largest number of iterations of conjugate gradients, as in `influence`; default: none
    top: number of highest and of lowest scores of each query on the page
    trust: directory of lds.json, the measured quality of the scores; default: evaluate in the run directory
    make_step: for "metagradient", which also needs sw.Indexed around the training dataset: see `metagradient`
    """
    options = {"dim": dim, "damping": damping, "refine": refine}
    plan = AttributionPlan(run, queries, limit, method, options, checkpoints, top, trust)
    return plan.results(model, loss_fn, train, validation, None if make_step is None else Rerun(make_step, train))


@dataclass(frozen=True, repr=False)
class AttributionResults(Tabular):
    """Scores of an attribution.

    queries    indices of the queries in the validation dataset
    samples    indices of the training samples in their dataset
    scores     (queries, samples); positive if training on the sample helps the query
    settings   content of attribution.json: method, checkpoints, ...
    page       HTML page
    notes      remarks about the data and the quality of the scores, which the page shows as well; not saved
    """

    queries: list[int]
    samples: list[int]
    scores: Tensor
    settings: dict[str, Any]
    page: str
    notes: tuple[str, ...] = ()

    def _table(self) -> Table:
        rows = []
        for query, scores in zip(self.queries, self.scores, strict=True):
            order = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True)[:SHOWN].tolist()
            helpful = [f"{self.samples[k]} ({scores[k].item():.3g})" for k in order if not scores[k].isnan()]
            rows.append((str(query), ", ".join(helpful)))
        title = (
            f"training samples that help each query most, by {self.settings.get('method')}, of {len(self.samples):,}"
        )
        return Table(("query", "samples (scores)"), rows, title, self.notes)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write scores.parquet, attribution.html and attribution.json.

        With more than 5 million scores, only the 1000 highest and the 1000 lowest of each query are written.
        """
        directory = absolute(directory)
        parquet = _parquet(self.queries, self.samples, self.scores)
        content = {
            "format": FORMAT,
            "format_version": VERSION,
            **self.settings,
            "sha256": {"scores.parquet": sha256([parquet])},
        }
        directory.mkdir(parents=True, exist_ok=True)
        write_bytes(directory / "scores.parquet", parquet)
        page = self.page.encode(errors="replace")  # a name may hold a lone surrogate
        write_bytes(directory / "attribution.html", page)
        write_json(directory / "attribution.json", content)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> AttributionResults:
        """Read what `save` has written. Scores that were not written are NaN."""
        directory = absolute(directory)
        try:
            settings = json.loads((directory / "attribution.json").read_bytes())
            digest = settings.pop("sha256")["scores.parquet"]
            if (settings.pop("format"), settings.pop("format_version")) != (FORMAT, VERSION):
                raise ValueError
            parquet = (directory / "scores.parquet").read_bytes()
            page = (directory / "attribution.html").read_text(encoding="utf-8")
            queries = list(settings["queries"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            raise ValueError(
                f"{directory} must be a directory of AttributionResults.save, with attribution.json, scores.parquet "
                "and attribution.html; found other content. Pass the directory of the results."
            ) from why
        if sha256([parquet]) != digest:
            raise ValueError(
                f"scores.parquet in {directory} must be the one that attribution.json names; found another checksum. "
                "Compute the attribution again."
            )
        table = load_pyarrow("scores.parquet needs").parquet.read_table(BytesIO(parquet))
        query, sample = (torch.tensor(table[name].to_pylist()) for name in ("query", "sample"))
        dtype = torch.float64 if table.schema.field("score").type == "double" else torch.float32
        score = torch.tensor(table["score"].to_pylist(), dtype=dtype)
        samples, column = sample.unique(return_inverse=True)
        row = (query[:, None] == torch.tensor(queries)).int().argmax(1)
        scores = torch.full((len(queries), len(samples)), math.nan, dtype=dtype)
        scores[row, column] = score
        return cls(queries, samples.tolist(), scores, settings, page)


# --- plan -------------------------------------------------------------------------------------------------------------


class AttributionPlan:
    """Checked arguments of `attribute`, and the checkpoints: what fails, fails before the data are loaded.

    options: dim, damping and refine
    recipe: path of the recipe, for attribution.json; default: none
    """

    def __init__(
        self,
        run: Run | Sequence[Run],
        queries: str | Sequence[int],
        limit: int,
        method: str,
        options: Mapping[str, Any],
        checkpoints: int | None,
        top: int,
        trust: Run | None,
        recipe: str | None = None,
    ):
        damping = options["damping"]
        for name, number in {"limit": limit, "top": top, "checkpoints": checkpoints, **options}.items():
            if name != "damping" and number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")
        if damping is not None and not 0 < damping < math.inf:
            raise ValueError(f"damping must be a positive number; found {damping}.")
        self.queries = check_queries(queries)
        self.limit = limit
        self.top = top
        self.recipe = recipe
        self.here = absolute(".")  # paths on the page are relative to it
        self.method = method_named(method, **options)
        runs = [absolute(path) for path in ([run] if isinstance(run, (str, os.PathLike)) else run)]
        if self.method.models is not None:
            count = len(runs) * (checkpoints or 1)
            if count > self.method.models:
                name = "run" if len(runs) > 1 else "checkpoints"
                raise ValueError(
                    f"{name} must be one with method {method}; found {count}. Use method influence or trak for several."
                )
            checkpoints = 1
        load_pyarrow("scores.parquet needs")
        self.models = read_runs(runs, checkpoints)
        self.run = self.models[-1].run  # directory of the run whose predictions are explained
        self.seed = self.models[-1].seed  # of the run; set it before data that depend on it are drawn
        self.warnings: list[str] = []
        # Measured quality: lds.json in the directory `trust`, or in evaluate in the run directory, if there is one.
        directory = self.run / "evaluate" if trust is None else Path(trust)
        self.place = directory if directory.name == "lds.json" else directory / "lds.json"
        self.trust: Trust | None = None
        if trust is not None or self.place.is_file():
            try:
                self.trust = read_trust(self.place)
            except ValueError as why:
                if trust is not None:
                    raise ValueError(f"trust must be a directory with a measured quality: {why}") from why
                self.warnings.append(str(why))

    def results(
        self, model: nn.Module, loss_fn: Any, train: Any, validation: Any, rerun: Rerun | None = None
    ) -> AttributionResults:
        if self.method.repeats and rerun is None:
            raise ValueError(f"method {self.method.name} repeats the run and needs make_step; found none. Pass it.")
        modules = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]  # the loss may hold the model
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(parameters_kept(module))
            stack.enter_context(eval_mode(*modules))
            subject = Subject(model, loss_fn, train, validation, self.models)
            queries, outcomes = subject.queries(self.queries, self.limit)
            scores = subject.scores(self.method, queries, rerun)
            settings = self._settings(subject, queries, scores)
            page = _Page(self, subject, queries, outcomes, scores, settings).html()
        samples = list(subject.train.indices)
        return AttributionResults(queries, samples, scores.values.cpu(), settings, page, tuple(subject.notes))

    def _settings(self, subject: Subject, queries: list[int], scores: Scores) -> dict[str, Any]:
        """Settings in attribution.json."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "samplewise": version("samplewise"),
            "torch": torch.__version__,
            **({} if self.recipe is None else {"recipe": self.recipe}),
            "method": self.method.name,
            **scores.details,
            "checkpoints": [{"path": str(model.path), "sha256": model.checksum} for model in subject.models],
            "queries": queries,
            "training samples": len(subject.train),
            "lds": None if self.trust is None else self.trust._asdict(),
        }


def shown_path(path: Path, here: Path) -> str:
    """A path for people: relative to a directory if it is inside."""
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# --- page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Page:
    """Page of an attribution. outcomes: losses and predictions of the queries."""

    plan: AttributionPlan
    subject: Subject
    queries: list[int]
    outcomes: Outcomes
    scores: Scores
    settings: dict[str, Any]

    def html(self) -> str:
        top = self.plan.top
        samples, values = _in_descending_order(self.subject.train.indices, self.scores.values)
        count = values.shape[1]
        lowest = reversed(range(max(top, count - top), count))  # a sample is shown once, also if few exist
        places = [*range(min(top, count)), *lowest]
        indices = samples[:MAX_QUERIES, places].tolist()
        train = sorted({index for row in indices for index in row})
        train_losses = self.subject.outcomes(self.subject.train.batches(train)).losses
        losses = dict(zip(train, train_losses.tolist(), strict=True))
        checkpoints = ", ".join(shown_path(model.path, self.plan.here) for model in self.subject.models)
        settings = {name: value for name, value in self.settings.items() if name != "lds"}
        settings |= {"checkpoints": checkpoints, "queries": ", ".join(map(str, self.queries))}
        runs = dict.fromkeys(model.run.name for model in self.subject.models)
        models = plural(len(self.subject.models), "checkpoint")
        return attribution_page(
            AttributionPage(
                title=f"Attribution: {self.subject.run.name}",
                summary=f"{self.plan.method.title} at {models} of {', '.join(runs)}",
                method=self.plan.method.title,
                effect=self.scores.effect,
                shown=self._shown(indices, values[:, places].tolist(), losses),
                count=len(self.queries),
                samples=count,
                train=self._previews(self.subject.train, losses),
                queries=self._previews(self.subject.validation, self.queries[:MAX_QUERIES]),
                settings=settings,
                trust=self.plan.trust,
                place=shown_path(self.plan.place, self.plan.here),
                warnings=[*self.plan.warnings, *self.subject.notes],
            )
        )

    def _shown(self, samples: list[list[int]], values: list[list[float]], losses: dict[int, float]) -> list[ShownQuery]:
        """Queries of the page, from the indices and scores of their training samples, highest first, then lowest."""
        queries = []
        for row, indices in enumerate(samples):
            predictions = self.outcomes.predictions
            prediction = None if predictions is None else int(predictions[row])
            query = ShownSample(self.queries[row], float(self.outcomes.losses[row]), prediction=prediction)
            scored = [
                ShownSample(index, losses[index], score) for index, score in zip(indices, values[row], strict=True)
            ]
            queries.append(ShownQuery(query, scored[: self.plan.top], scored[self.plan.top :]))
        return queries

    def _previews(self, samples: OrderedSamples, indices: Iterable[int]) -> Previews:
        """Previews of samples, with the names of the classes that the datasets, the ledger or the model have."""
        names = dataset_names(samples.loader)
        classes = (
            names.classes
            or dataset_names(self.subject.train.loader).classes
            or read_previews(self.subject.run).classes
            or self.subject.class_names
        )
        entries = {str(index): self.subject.preview(samples, index, names.features) for index in indices}
        return Previews(entries, classes=classes)


# --- files ------------------------------------------------------------------------------------------------------------


def _in_descending_order(samples: Sequence[int], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of training samples and scores, both (queries, samples), by descending score of each query."""
    values, order = scores.cpu().sort(dim=1, descending=True, stable=True)
    return torch.tensor(samples)[order], values


def _parquet(queries: Sequence[int], indices: Sequence[int], scores: Tensor) -> bytes:
    """scores.parquet: all scores, or the highest and lowest of each query if there are more than MAX_ROWS."""
    samples, values = _in_descending_order(indices, scores)
    count = values.shape[1]
    if values.numel() > MAX_ROWS and count > 2 * KEPT:
        ends = torch.cat([torch.arange(KEPT), torch.arange(count - KEPT, count)])
        samples = samples[:, ends]
        values = values[:, ends]
    columns = {
        "query": torch.tensor(queries)[:, None].expand_as(samples).flatten(),
        "sample": samples.flatten(),
        "score": values.flatten().to(torch.float64 if values.dtype == torch.float64 else torch.float32),
    }
    table = load_pyarrow().table({name: array_from_tensor(column) for name, column in columns.items()})
    buffer = BytesIO()
    write_parquet(table, buffer, FORMAT, VERSION)
    return buffer.getvalue()
