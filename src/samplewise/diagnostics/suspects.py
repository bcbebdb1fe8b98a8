"""`sw.suspects`: ranking of samples that are likely mislabeled or unusual."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from samplewise.core.batches import pick
from samplewise.core.losses import LossFn, as_loss_fn, per_sample, same_constants
from samplewise.core.microbatch import Microbatch
from samplewise.core.package import import_package
from samplewise.core.state import eval_mode
from samplewise.core.text import Table, Tabular, did_you_mean, plural
from samplewise.core.validate import refuse_keras
from samplewise.dataset_pass import Checkpoint, at_each, check_order, check_repeatable, parameters_kept
from samplewise.diagnostics.scores import SCORES, SUMMED_SCORES, ClassGradients, Score, ScoreInputs
from samplewise.engine.gradients import Gradients
from samplewise.errors import BatchError
from samplewise.ledger.aggregate import SCORES as VISIT_SCORES
from samplewise.ledger.aggregate import VisitAggregator, ranks, recommended_score, signed_scores, suspicion
from samplewise.ledger.files import load_pyarrow, parts
from samplewise.loop.checkpoint.trained import CheckpointSource, as_checkpoints
from samplewise.loop.evaluation import OutputRecorder, Target
from samplewise.scan import scan

RECOMMENDED = "margin"  # by the measurements in docs/diagnostics.md

Key = Hashable | Callable[[Any], Any]  # of an entry of a batch: a key, or a function of the batch
Ids = list[Any]  # integers or strings


@dataclass(frozen=True, repr=False)
class Suspects(Tabular):
    """Samples with their suspicion scores.

    ids          (N,) ids of the samples, in the order of the data; a list if they are strings
    score        (N,) score of the ranking; higher is more suspicious
    scores       name -> (N,), the individual scores; higher is more suspicious
    score_names  names of the scores that `score` is computed from
    unknown      ids of samples that are not ranked, because a table of visits has no finite score of them
    """

    ids: Tensor | Any  # Any: list[str]; a union of both would make every user check which it is
    score: Tensor
    scores: dict[str, Tensor]
    score_names: tuple[str, ...]
    unknown: list[Any] = field(default_factory=list)

    @property
    def order(self) -> Tensor:
        """Indices (N,) into `ids`, the most suspicious first."""
        return self.score.argsort(descending=True, stable=True)

    def top(self, k: int = 10) -> Tensor | Any:
        """Ids of the k most suspicious samples, the most suspicious first; a list if they are strings."""
        return ids_at(self.ids, self.order[:k])

    def to_pandas(self) -> Any:
        """Data frame with one row per sample, the most suspicious first: id, score and the individual scores."""
        pandas = import_package("pandas", "to_pandas")
        columns = {"score": self.score, **self.scores}
        ranked = {name: column[self.order].tolist() for name, column in columns.items()}
        return pandas.DataFrame({"id": self._names(len(self)), **ranked})

    def _names(self, k: int) -> list[Any]:
        """Ids of the k most suspicious samples as numbers or strings."""
        top = self.top(k)
        return top.tolist() if isinstance(top, Tensor) else list(top)

    def __len__(self) -> int:
        return len(self.ids)

    def _table(self) -> Table:
        rows = []
        for name, i in zip(self._names(10), self.order.tolist(), strict=False):
            rows.append((str(name), *(f"{s[i].item():.4g}" for s in self.scores.values())))
        unknown_note = f"; {len(self.unknown)} more have no finite score" if self.unknown else ""
        title = f"most suspicious of {plural(len(self), 'sample')}, by {' and '.join(self.score_names)}{unknown_note}"
        return Table(("sample", *self.scores), rows, title)


@overload
def suspects(
    source: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    score: Score | Sequence[Score] | None = None,
    also: Sequence[Score] = (),
    logits: Callable[[nn.Module, Any], Tensor] | None = None,
    labels: Key | None = None,
    ids: Key | None = None,
    checkpoints: CheckpointSource | None = None,
    microbatch: Microbatch = "auto",
) -> Suspects: ...
@overload
def suspects(source: object, *, score: Score | Sequence[Score] | None = None) -> Suspects: ...
def suspects(
    source: object,
    loss_fn: LossFn | None = None,
    loader: Iterable[Any] | None = None,
    *,
    score: Score | Sequence[Score] | None = None,
    also: Sequence[Score] = (),
    logits: Callable[[nn.Module, Any], Tensor] | None = None,
    labels: Key | None = None,
    ids: Key | None = None,
    checkpoints: CheckpointSource | None = None,
    microbatch: Microbatch = "auto",
) -> Suspects:
    """Rank samples that are likely mislabeled or unusual, from a model and a loader or from a ledger of a training run.

    A ledger is a run directory or a table of visits: the result of `sw.read_ledger(run)`, a data frame, or a mapping of
    columns. A table has one row per visit, the column id and some of loss, norm, margin (the label's logit minus the
    largest other) and el2n. The score of a sample is the mean over its visits with a finite value; for the margin this
    is the AUM.

    Samples of different lengths are compared by their means: if the loss function returns (losses, counts), or the
    table has a column count, the scores are those of loss / count.

    score: name of a score, or several names, whose ranks are averaged; default margin, or loss for a table without
        margin
    also: names of more scores to compute
    logits: function of (model, batch); default model(batch[0]) for batches (x, y, ...), otherwise the output of the
        model, or its entry `logits`, when `loss_fn` calls it
    labels: of a batch: a key, an index or a function of the batch; default: the entry named y, target, targets, label
        or labels, otherwise batch[1]
    ids: of the samples of a batch, integers or strings, given like `labels`; default: positions in the loader
    checkpoints: run directory, or list of (state_dict, lr), to average the scores over; default: the current
        parameters. Of a run, the checkpoints that it has kept, each with the learning rate of its last update
    microbatch: as in `sw.scan`

    Scores: loss, margin, el2n, norm, last_norm, self_influence, agreement. agreement needs two passes over the data and
    keeps one gradient per class in memory. The model is in evaluation mode.
    """
    if not isinstance(source, nn.Module):
        if loss_fn is not None or loader is not None or also or logits or ids is not None or checkpoints is not None:
            refuse_keras(source)
            raise TypeError(
                "a table of visits takes no other argument than score=; found arguments for a model, but "
                f"{type(source).__name__} in its place. Leave them out, or pass the model first."
            )
        return _rank_visits(source, score)
    if loss_fn is None or loader is None:
        raise TypeError(
            "suspects needs a model, a loss function and a loader, or a table of visits; found a model without loss "
            "function or loader. Pass both."
        )
    ranked_by = _as_names(score or RECOMMENDED)
    names = list(dict.fromkeys([*ranked_by, *also]))
    _check_names(names, SCORES)
    if ids is None:
        check_order(loader, "Pass ids=, or a loader with shuffle=False.")
    computation = _ScoreComputation(source, loss_fn, loader, names, microbatch, logits, labels, ids)
    sample_ids, scores = computation.compute(as_checkpoints(source, checkpoints))
    total = scores[ranked_by[0]]
    if len(ranked_by) > 1:
        total = torch.stack([_tensor(ranks(scores[name].tolist())) for name in ranked_by]).mean(0)
    return Suspects(as_ids(sample_ids), total, scores, ranked_by)


def _batch_entry(batch: Any, key: Key, name: str) -> Any:
    """Entry of a batch; `name` is the argument of `suspects` that an error message recommends."""
    try:
        return key(batch) if callable(key) else pick(batch, key)
    except BatchError as why:
        raise BatchError(f"{why} Or pass {name}=, a key or a function of the batch.") from None


# --- scores of a model -----------------------------------------------------------------------------------------------


@dataclass
class _ScoreComputation:
    """Computation of scores over a dataset."""

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any]
    names: list[str]
    microbatch: Microbatch
    logits: Callable[[nn.Module, Any], Tensor] | None
    labels: Key | None
    ids: Key | None

    def compute(self, checkpoints: Sequence[Checkpoint] | None) -> tuple[Ids, dict[str, Tensor]]:
        """Ids, and scores averaged or summed over checkpoints; rows are matched by id, because a loader may shuffle."""
        if checkpoints is not None or "agreement" in self.names:
            check_repeatable(self.loader, "loader")
        results = []
        with eval_mode(self.model), parameters_kept(self.model):
            for lr in at_each(self.model, checkpoints):
                results.append(self._at_current_parameters(lr))
        ids = results[0][0]
        positions = [_positions(ids, later_ids) for later_ids, _ in results]
        result = {}
        for name in self.names:
            aligned = [scores[name][position] for position, (_, scores) in zip(positions, results, strict=True)]
            total = torch.stack(aligned).sum(0)
            result[name] = total if name in SUMMED_SCORES else total / len(results)
        return ids, result

    def _at_current_parameters(self, lr: float) -> tuple[Ids, dict[str, Tensor]]:
        """Ids, and scores at the current parameters."""
        # The agreement needs the summed gradients of each class, in a pass of their own.
        classes = ClassGradients()
        if "agreement" in self.names:
            for batch, g in self._gradients():
                classes.add(g, torch.as_tensor(self._labels_of(batch), device=g.losses.device))
        ids: Ids = []
        columns: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for batch, g in self._gradients():
            inputs = ScoreInputs(g, lr, batch, self._logits_of, self._labels_of, classes)
            for name, column in columns.items():
                column.append(SCORES[name](inputs).detach().double().cpu())
            ids += range(len(ids), len(ids) + len(g)) if self.ids is None else self._ids_of(batch, len(g))
        if not ids:
            raise ValueError(
                "the loader must yield at least one batch; found none. Pass a loader or a list: an iterator is "
                "exhausted after one pass."
            )
        return ids, {name: torch.cat(column) for name, column in columns.items()}

    def _gradients(self) -> Iterator[tuple[Any, Gradients]]:
        # Loss function whose losses are divided by their counts, unless a count is 0.
        fn = as_loss_fn(self.loss_fn)

        def losses_per_count(model: nn.Module, batch: Any) -> Tensor:
            losses, counts = per_sample(fn(model, batch))
            return losses if counts is None else losses / counts.where(counts > 0, 1).to(losses.dtype)

        return scan(self.model, same_constants(losses_per_count, fn), self.loader, microbatch=self.microbatch)

    @torch.no_grad()
    def _logits_of(self, batch: Any) -> Any:
        if self.logits is not None:
            return self.logits(self.model, batch)
        if isinstance(batch, (tuple, list)):
            return self.model(batch[0])
        recorder = OutputRecorder(self.model)
        with recorder:
            as_loss_fn(self.loss_fn)(self.model, batch)
        outputs = recorder.last("its outputs are the logits", "pass logits=, a function of (model, batch)")
        return outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)

    def _labels_of(self, batch: Any) -> Any:
        if self.labels is None:
            remedy = "Pass labels=, a key or a function of the batch, or score='loss', which needs no labels."
            return Target("sw.suspects", "labels", remedy).of(batch)
        return _batch_entry(batch, self.labels, "labels")

    def _ids_of(self, batch: Any, samples: int) -> Ids:
        entry = _batch_entry(batch, self.ids, "ids")
        ids: Ids = entry.tolist() if hasattr(entry, "tolist") else list(entry)
        types = sorted({type(sample_id).__name__ for sample_id in ids})
        if len(ids) != samples or types not in (["int"], ["str"]):
            description = " and ".join(types) if len(ids) == samples else f"{len(ids)} for {samples}"
            raise ValueError(f"ids must be integers or strings, one per sample; found {description}.")
        return ids


def _positions(ids: Ids, later_ids: Ids) -> Tensor:
    """Positions of each of the ids in those of a later pass."""
    if ids == later_ids:
        return torch.arange(len(ids))
    position_of = {sample_id: k for k, sample_id in enumerate(later_ids)}
    if len(ids) != len(later_ids) or position_of.keys() != set(ids):
        raise ValueError(
            "every pass over the loader must yield the same samples; found other ids in a later pass. Use a loader "
            "without random sampling."
        )
    if len(position_of) < len(ids):
        raise ValueError(
            "each sample must have a unique id if the order changes between passes; found "
            f"{plural(len(position_of), 'id')} of {plural(len(ids), 'sample')}. Use a loader with "
            "shuffle=False, or unique ids."
        )
    return torch.tensor([position_of[sample_id] for sample_id in ids])


# --- scores of a ledger ----------------------------------------------------------------------------------------------


def _rank_visits(source: Any, ranked_by: str | Sequence[str] | None) -> Suspects:
    needed = "suspects needs a model, a loss function and a loader, or a table of visits"
    visited, aggregator = aggregated(source, VisitAggregator(), needed)
    scores = {name: _tensor(signed_scores(visited, name)) for name in visited.column_names if name in VISIT_SCORES}
    names = _as_names(ranked_by or recommended_score(scores))
    _check_names(names, scores, _RECORD_IT)
    ids = as_ids(visited["id"].to_pylist())
    score = _tensor(suspicion(visited, names))
    return Suspects(ids, score, scores, names, aggregator.unknown.to_pylist())


def aggregated(source: Any, aggregator: VisitAggregator, needed: str) -> tuple[Any, VisitAggregator]:
    """Table of samples from a run directory, which is read part by part, or from a table of visits, and the aggregator.

    needed: the beginning of the error message for another source
    """
    tables = parts(source) if isinstance(source, (str, Path)) else [_as_pyarrow(source, needed)]
    for table in tables:
        aggregator.add(table)
    visited = aggregator.samples()
    if not len(visited):
        raise ValueError("a table of visits must have a finite score of at least one sample; found none.")
    return visited, aggregator


def _as_pyarrow(table: Any, needed: str) -> Any:
    pa = load_pyarrow()
    if isinstance(table, Mapping):
        columns = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in table.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns must have equal lengths, one row per visit; found lengths {lengths}.")
        table = columns
    try:
        return pa.table(table)
    except (TypeError, ValueError, OverflowError) as why:
        raise TypeError(
            f"{needed}: a run directory, the result of sw.read_ledger, a data frame, or a mapping of columns; found "
            f"{type(table).__name__}: {why}"
        ) from why


# --- ranking ---------------------------------------------------------------------------------------------------------


def ids_at(ids: Tensor | list[str], indices: Tensor) -> Tensor | list[str]:
    return ids[indices] if isinstance(ids, Tensor) else [ids[i] for i in indices.tolist()]


def as_ids(ids: Ids) -> Tensor | list[str]:
    return ids if any(isinstance(sample_id, str) for sample_id in ids) else torch.tensor(ids)


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _check_names(names: Iterable[str], scores: Iterable[str], remedy: str = "") -> None:
    """Raise ValueError for a name that is not one of the scores. `remedy`: how to get another score."""
    for name in names:
        if name not in scores:
            hint = did_you_mean(str(name), scores) or remedy
            raise ValueError(f"a score must be one of {', '.join(scores)}; found {name!r}. {hint}".rstrip())


_RECORD_IT = (
    "A table has the scores whose columns were recorded: sw.Ledger records loss and norm, and the margin if loss_fn "
    "is nn.CrossEntropyLoss(). Another loss function returns a score as a column: return losses, {'margin': margin}."
)
