"""`sw.dynamics`: training dynamics of each sample (data maps, dataset cartography) from the ledger of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from samplewise.core.package import import_package
from samplewise.core.text import Table, Tabular, listed, plural
from samplewise.diagnostics.suspects import aggregated, as_ids, ids_at
from samplewise.ledger.aggregate import VisitAggregator
from samplewise.ledger.history import EARLY_EPOCHS, NEEDS

COUNTS = ("visits", "forgetting_events")  # int64; the other columns are float64
SHOWN = ("suspicion", "confidence", "variability", "correctness", "forgetting_events", "aum", "el2n")
LABELS = ("label", "prediction")


@dataclass(frozen=True, repr=False)
class Dynamics(Tabular):
    """Training dynamics, one row per sample in the order of first visits. `dynamics["aum"]` or `dynamics.aum` is a
    column (N,); NaN where it is not known. Means are over the visits where the value is finite.

    ids                (N,) ids of the samples; a list if they are strings
    visits             number of visits
    confidence         mean probability of the label; low for wrong labels
    variability        standard deviation of the probability of the label; high for ambiguous samples
    correctness        share of the visits at which the label was predicted
    forgetting_events  number of times that a wrong prediction followed a right one
    learned_epoch      epoch from which on all predictions were right; NaN if the last one was wrong
    aum                area under the margin: mean of the label's logit minus the largest other
    el2n, early_el2n   mean norm of the probabilities minus the one-hot label; the second over the first epochs
    grand              mean gradient norm over the first epochs (GraNd)
    norm_trend         slope of the gradient norm, per epoch; NaN with visits in one epoch only
    loss, norm         mean loss and gradient norm, divided by the counts of the visits if there are counts
    suspicion          the ranking of `order` and `top`: higher for labels that are likely wrong
    ranked_by          description of `suspicion`
    columns            name -> column
    absent             name -> the reason why there is no such column
    unknown            ids of samples without a finite loss, norm, margin or EL2N, which have no row
    """

    ids: Tensor | Any  # Any: list[str]
    columns: dict[str, Any]
    ranked_by: str
    absent: dict[str, str] = field(default_factory=dict)
    unknown: list[Any] = field(default_factory=list)
    _last: dict[str, list[Any]] = field(default_factory=dict)  # label and prediction of the last visit
    _probabilities: list[Tensor] = field(default_factory=list)  # mean of each class

    def __getitem__(self, name: str) -> Tensor:
        if name in self.columns:
            return self.columns[name]
        reason = self.absent.get(name, f"the columns are {', '.join(self.columns)}")
        raise KeyError(f"dynamics has no column {name!r}: {reason}.")

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name in ("columns", "absent"):  # copy and pickle ask before these exist
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as why:
            raise AttributeError(why.args[0]) from None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def order(self) -> Tensor:
        """Indices (N,) of the samples, the most suspicious first."""
        return self["suspicion"].argsort(descending=True, stable=True)

    def top(self, k: int = 10) -> Tensor | Any:
        """Ids of the k most suspicious samples, the most suspicious first; a list if they are strings."""
        return ids_at(self.ids, self.order[:k])

    def _table(self) -> Table:
        names = [name for name in SHOWN if name in self.columns]
        ids = self._id_list()
        rows = [(str(ids[i]), *(f"{self[name][i].item():.4g}" for name in names)) for i in self.order[:10].tolist()]
        notes = [f"no {name}: {reason}" for name, reason in self.absent.items()]
        title = f"training dynamics of {plural(len(self), 'sample')}, the most suspicious first by {self.ranked_by}"
        return Table(("sample", *names), rows, title, notes)

    def _id_list(self) -> list[Any]:
        return self.ids.tolist() if isinstance(self.ids, Tensor) else self.ids

    # --- for other libraries -------------------------------------------------------------------------------------

    def _lists(self) -> dict[str, list[Any]]:
        return {name: column.tolist() for name, column in self.columns.items()}

    def to_pandas(self) -> Any:
        """Data frame with one row per sample: id, label and prediction of the last visit, and the columns."""
        pandas = import_package("pandas", "to_pandas")
        return pandas.DataFrame({"id": self._id_list(), **self._last, **self._lists()})

    def to_datasets(self, dataset: Any, id: str | None = None) -> Any:
        """A `datasets.Dataset` with the columns added; None in rows whose id has none.

        id: column of the dataset with the ids; default "id" if it has one, otherwise ids are the numbers of rows, as
        with sw.Indexed(dataset)
        """
        datasets = import_package("datasets", "to_datasets")
        if not isinstance(dataset, datasets.Dataset):
            raise TypeError(
                f"to_datasets needs a datasets.Dataset; found {type(dataset).__name__}. Pass one split, such as "
                "data['train']."
            )
        names = set(dataset.column_names)
        if clash := sorted(names & self.columns.keys()):
            raise ValueError(
                f"the dataset must not have columns of the same names; found {listed(clash)}. Rename them: "
                "dataset.rename_column."
            )
        key = id or ("id" if "id" in names else None)
        if key is not None and key not in names:
            raise ValueError(f"id must be a column of the dataset; found {key!r}, its columns are {listed(names)}.")
        rows = list(range(len(dataset)) if key is None else dataset[key])
        row_of = {sample_id: i for i, sample_id in enumerate(self._id_list())}
        if strangers := row_of.keys() - set(rows):
            raise ValueError(
                f"every sample must be in the dataset; found {plural(len(strangers), 'id')} that "
                f"{'is no row number' if key is None else f'column {key!r} lacks'}, such as "
                f"{min(strangers, key=str)!r}. Pass the dataset that was trained on, or id=, its column of ids."
            )
        for name, column in self._lists().items():
            values = [column[row_of[row]] if row in row_of else None for row in rows]
            dataset = dataset.add_column(name, values)
        return dataset

    def to_cleanlab(self) -> dict[str, Any]:
        """Arrays {"labels": (N,), "pred_probs": (N, classes)} for `cleanlab.filter.find_label_issues` and, with label
        and pred_probs, `cleanlab.Datalab`. The probabilities are means over the visits of a sample during training, in
        place of those of models that were not trained on it. Needs a run with `sw.Ledger(probabilities=True)`.
        """
        numpy = import_package("numpy", "to_cleanlab")
        if not self._probabilities or "label" not in self._last:
            raise ValueError(
                "to_cleanlab needs the probabilities of all classes; found a ledger without columns probability/0, "
                "probability/1, ... and label. Train with sw.Ledger(probabilities=True) and nn.CrossEntropyLoss."
            )
        rows = torch.stack(self._probabilities, dim=1)
        rows = rows / rows.sum(1, keepdim=True)  # float32 probabilities add up to 1 within 1e-7
        return {"labels": numpy.array(self._last["label"]), "pred_probs": numpy.array(rows.tolist())}

    def to_wandb(self) -> Any:
        """`wandb.Table` with one row per sample, the most suspicious first: wandb.log({"dynamics": table})."""
        wandb = import_package("wandb", "to_wandb")
        columns = {"id": self._id_list(), **self._last, **self._lists()}
        rows = [[column[i] for column in columns.values()] for i in self.order.tolist()]
        return wandb.Table(columns=list(columns), data=rows)


def dynamics(source: object, *, early_epochs: int = EARLY_EPOCHS) -> Dynamics:
    """Training dynamics of each sample (dataset cartography, forgetting events, AUM, EL2N, GraNd) from the ledger of a
    run, which is read part by part: memory grows with the number of samples, not of visits.

    source: run directory, or a table of visits in the order of training: the result of `sw.read_ledger`, a data frame,
    or a mapping of columns. `sw.Ledger` records all columns with nn.CrossEntropyLoss and one class index per sample;
    another loss function returns them: label, prediction, margin, confidence (probability of the label) and el2n. What
    a ledger cannot tell is in `absent`, with the reason.
    early_epochs: number of first epochs, for grand and early_el2n

    suspicion is minus the mean margin, or the mean EL2N if each class is confused with one other class, over the epochs
    before wrong labels are memorized, if they are. Both are chosen by the predictions and confidences of the run.
    """
    if type(early_epochs) is not int or early_epochs < 1:
        raise ValueError(f"early_epochs must be a positive whole number; found {early_epochs!r}.")
    samples, aggregator = aggregated(source, VisitAggregator(early_epochs), "dynamics needs the visits of a run")
    names = samples.column_names
    absent = {}
    for name, needed in NEEDS.items():
        missing = [column for column in needed if column not in (aggregator.recorded if column == "epoch" else names)]
        if missing or name not in names:
            values = f"no values of {' and '.join(missing)}" if missing else "values that cannot be compared"
            absent[name] = f"it needs {' and '.join(needed)} of the visits; found {values}"
    present = [name for name in ("visits", *NEEDS, "loss", "norm", "suspicion") if name in names and name not in absent]
    columns = {name: _column(samples, name) for name in present}
    columns["suspicion"] = columns["suspicion"].nan_to_num(-inf)
    last = {name: samples[name].to_pylist() for name in LABELS if name in names}
    classes = sorted((name for name in names if name.startswith("probability/")), key=lambda name: int(name[12:]))
    probabilities = [_column(samples, name) for name in classes]
    ids = as_ids(samples["id"].to_pylist())
    unknown = aggregator.unknown.to_pylist()
    return Dynamics(ids, columns, aggregator.ranked_by, absent, unknown, last, probabilities)


def _column(samples: Any, name: str) -> Tensor:
    values = samples[name].fill_null(0 if name in COUNTS else nan).to_pylist()
    return torch.tensor(values, dtype=torch.int64 if name in COUNTS else torch.float64)
