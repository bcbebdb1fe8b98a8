"""`sw.suspects`: samples ranked as mislabelled or odd."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.batches import pick
from samplewise.diagnostics.scores import ADDED_UP, SCORES, ClassGradients, Piece
from samplewise.engine.gradients import Gradients
from samplewise.engine.table import render
from samplewise.losses import LossFn
from samplewise.measuring import Checkpoint, at_each, check_order, check_repeatable, evaluating, parameters_kept
from samplewise.scan import scan

RECOMMENDED = ("margin", "el2n")  # measured: docs/diagnostics.md
OF_VISITS = {"loss": 1, "norm": 1, "margin": -1, "el2n": 1}  # columns that are scores, and which sign is suspicious

Key = Hashable | Callable[[Any], Tensor]  # where a batch has something: a key, or a function of the batch


@dataclass(frozen=True)
class Suspects:
    """Samples and how suspicious they are.

    ids      (N,) of the samples, in the order they came
    score    (N,) what they are ranked by; the higher, the more suspicious
    scores   name -> (N,), each score by itself, the same way round
    by       the names that `score` is made of
    """

    ids: Tensor
    score: Tensor
    scores: dict[str, Tensor]
    by: tuple[str, ...]

    @property
    def order(self) -> Tensor:
        """(N,): places in `ids`, the most suspicious first."""
        return self.score.argsort(descending=True, stable=True)

    def top(self, k: int = 10) -> Tensor:
        """The ids of the k most suspicious, those first."""
        return self.ids[self.order[:k]]

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        places = self.order[:10].tolist()
        rows = [(str(int(self.ids[i])), *(f"{s[i].item():.4g}" for s in self.scores.values())) for i in places]
        return render(("sample", *self.scores), rows, f"the first of {len(self)} samples, by {' and '.join(self.by)}")


def suspects(
    source: nn.Module | Mapping[str, Any],
    loss_fn: LossFn | None = None,
    loader: Iterable[Any] | None = None,
    *,
    by: str | Sequence[str] | None = None,
    also: Sequence[str] = (),
    logits: Callable[[nn.Module, Any], Tensor] | None = None,
    labels: Key = 1,
    ids: Key | None = None,
    checkpoints: Sequence[Checkpoint] | None = None,
    microbatch: int | str | None = "auto",
) -> Suspects:
    """Samples ranked as mislabelled or odd: of a model and a loader, or of a table of visits during training.

    A table is a mapping with the columns id, and some of loss, norm, margin (the label's logit minus the largest other)
    and el2n, one row per visit. A sample's score is the mean over its visits; of the margin that is the AUM.

    by: a score, or several, whose ranks are averaged; default margin and el2n, of a table margin, or loss and norm
    also: more scores to compute
    logits: a function of (model, batch), default model(batch[0])
    labels: where a batch has its labels: a key, an index or a function of the batch
    ids: the same for the ids of its samples; default their places in the loader
    checkpoints: list of (state_dict, lr) to average the scores over; default the model as it is
    microbatch: as in `sw.scan`

    Scores: loss, margin, el2n, norm, last_norm, self_influence, agreement. The last goes through the data twice and
    keeps a gradient per class. The model is measured in evaluation mode.
    """
    if isinstance(source, Mapping):
        ids_seen, scores = _of_visits(source)
        return _ranked(ids_seen, scores, by or _recommended(scores))
    if loss_fn is None or loader is None:
        raise TypeError("suspects needs a model, a loss function and a loader, or a table of visits; found a model.")
    names = list(dict.fromkeys([*_names(by or RECOMMENDED), *also]))
    _check_names(names, SCORES)
    if ids is None:
        check_order(loader, "Pass ids=, or a loader with shuffle=False.")
    survey = _Survey(source, loss_fn, loader, names, microbatch, logits or _logits, labels, ids)
    return _ranked(*survey.over(checkpoints), by or RECOMMENDED)


def _recommended(scores: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Of what a table has: the margin; else loss and norm, or either; else what there is."""
    names = ("margin",) if "margin" in scores else tuple(name for name in ("loss", "norm") if name in scores)
    return names or tuple(scores)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(pick(batch, 0))


def _of(batch: Any, key: Key) -> Tensor:
    return key(batch) if callable(key) else pick(batch, key)


# --- of a model ------------------------------------------------------------------------------------------------------


@dataclass
class _Survey:
    """The scores of a data set."""

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any]
    names: list[str]
    microbatch: int | str | None
    logits: Callable[[nn.Module, Any], Tensor]
    labels: Key
    ids: Key | None

    def over(self, checkpoints: Sequence[Checkpoint] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Of all checkpoints together; lines are matched by id, for a loader may shuffle."""
        if checkpoints is not None or "agreement" in self.names:
            check_repeatable(self.loader, "loader")
        found = []
        with evaluating(self.model), parameters_kept(self.model):
            for rate in at_each(self.model, checkpoints):
                found.append(self._once(rate))
        ids = found[0][0]
        places = [_places(ids, other) for other, _ in found]
        total = {
            name: torch.stack([scores[name][at] for at, (_, scores) in zip(places, found, strict=True)]).sum(0)
            for name in self.names
        }
        return ids, {name: s if name in ADDED_UP else s / len(found) for name, s in total.items()}

    def _once(self, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        classes = self._classes()
        ids: list[Tensor] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for batch, g in self._pieces():
            piece = Piece(g, rate, batch, self._logits_of, self._labels_of, classes)
            for name, column in columns.items():
                column.append(SCORES[name](piece).detach().double().cpu())
            start = sum(map(len, ids))
            ids.append(torch.arange(start, start + len(g)) if self.ids is None else _of(batch, self.ids).cpu())
        if not ids:
            raise ValueError("the loader must yield at least one batch; found none.")
        return torch.cat(ids), {name: torch.cat(column) for name, column in columns.items()}

    def _pieces(self) -> Iterator[tuple[Any, Gradients]]:
        return scan(self.model, self.loss_fn, self.loader, self.microbatch)

    def _logits_of(self, batch: Any) -> Tensor:
        with torch.no_grad():
            return self.logits(self.model, batch)

    def _labels_of(self, batch: Any) -> Tensor:
        return _of(batch, self.labels)

    def _classes(self) -> ClassGradients:
        classes = ClassGradients()
        if "agreement" in self.names:
            for batch, g in self._pieces():
                classes.add(g, self._labels_of(batch))
        return classes


def _places(ids: Tensor, others: Tensor) -> Tensor:
    """Where in `others` each of the ids stands."""
    mine, theirs = ids.argsort(stable=True), others.argsort(stable=True)
    if not torch.equal(ids[mine], others[theirs]):
        raise ValueError("every pass over the loader must yield the same samples; found other ids in a later one.")
    places = torch.empty_like(mine)
    places[mine] = theirs
    return places


# --- of visits -------------------------------------------------------------------------------------------------------


def _of_visits(table: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sample's mean over its visits."""
    columns = {name: torch.as_tensor(table[name]) for name in ("id", *OF_VISITS) if name in table}
    if "id" not in columns or len(columns) < 2:
        wanted = f"a table of visits must have the column id and one of {', '.join(OF_VISITS)}"
        raise ValueError(f"{wanted}; found {', '.join(map(str, table)) or 'none'}.")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or not lengths["id"]:
        raise ValueError(f"the columns must have one row per visit, one at least; found lengths {lengths}.")
    for name, column in columns.items():
        if not column.isfinite().all():
            raise ValueError(f"column {name!r} must be finite; found NaN or infinity. Leave those visits out.")
    ids, who, visits = columns.pop("id").unique(return_inverse=True, return_counts=True)

    def mean(column: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64).index_add(0, who, column.double()) / visits

    scores = {name: mean(column) * OF_VISITS[name] for name, column in columns.items()}
    if "norm" in columns:
        scores["self_influence"] = mean(columns["norm"].double().square())
    return ids, scores


# --- ranking ---------------------------------------------------------------------------------------------------------


def _ranked(ids: Tensor, scores: dict[str, Tensor], by: str | Sequence[str]) -> Suspects:
    names = _names(by)
    _check_names(names, scores)
    score = scores[names[0]] if len(names) == 1 else torch.stack([ranks(scores[name]) for name in names]).mean(0)
    return Suspects(ids, score, scores, names)


def ranks(values: Tensor) -> Tensor:
    """From 0 for the lowest to 1 for the highest; equal values share the mean of their ranks."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - (counts + 1) / 2
    return (middle / max(len(values) - 1, 1)).double()[which]


def _names(by: str | Sequence[str]) -> tuple[str, ...]:
    return (by,) if isinstance(by, str) else tuple(by)


def _check_names(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"a score must be one of {', '.join(known)}; found {name!r}.")
