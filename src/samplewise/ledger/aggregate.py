"""Aggregation of a ledger to one row per sample, and suspicion scores of samples. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from math import inf, nan
from typing import Any

from samplewise.ledger.files import concat_tables, load_pyarrow
from samplewise.ledger.history import (
    RANKED,
    finite_visits,
    history_columns,
    partial_history,
    with_history,
    wrong_label_score,
)

AGGREGATE_EVERY = 2**20  # visits that are collected before they are aggregated

# Columns that are scores, and the sign that is suspicious. The margin is the label's logit minus the largest other.
SCORES = {"loss": 1, "norm": 1, "margin": -1, "el2n": 1, "self_influence": 1}
SUMMED = ("loss", "norm")  # scores that are sums over the elements of a sample if there is a column count
AVERAGED = re.compile("|".join([*SCORES, "confidence", "probability/[0-9]+"]))  # columns whose mean is computed


def aggregate_visits(tables: Iterable[Any]) -> Any:
    """Aggregate tables of visits to a pyarrow table with one row per sample, in the order of first visits.

    Columns: id; visits, their number; the mean of each score, of confidence and of probabilities over the visits where
    it is finite; and the last value of any other column except epoch and update. `self_influence`, if there is no such
    column, is the mean of norm². With a column count, loss and norm are divided by the count of the visit.

    A score that is never finite is left out, and so is a sample without a finite score.
    """
    aggregator = VisitAggregator()
    for table in tables:
        aggregator.add(table)
    return aggregator.samples()


class VisitAggregator:
    """Incremental aggregation of visits, see `aggregate_visits`; keeps one row per sample and up to 2**20 visits.

    early_epochs: also compute the columns of `samplewise.ledger.history`; the number of its first epochs
    """

    def __init__(self, early_epochs: int | None = None) -> None:
        self._early_epochs = early_epochs
        self.unknown: Any = None  # ids of the samples without a finite score; set by `samples`
        self.recorded: set[str] = set()  # columns of the visits
        self.ranked_by = ""  # description of the column suspicion
        self._tables: list[Any] = []  # the first holds aggregated samples, the others the visits since then
        self._pending = 0  # visits that are not aggregated yet

    def add(self, table: Any) -> None:
        """Add a table of visits."""
        if not len(table):
            return
        _check(table, ("count",) if self._early_epochs is None else ("count", "epoch"))
        self.recorded |= set(table.column_names)
        for start in range(0, len(table), AGGREGATE_EVERY):
            self._tables.append(_as_partial_sums(table.slice(start, AGGREGATE_EVERY), self._early_epochs))
            self._pending += len(self._tables[-1])
            if self._pending >= AGGREGATE_EVERY:
                self._aggregate()

    def samples(self) -> Any:
        """Pyarrow table with one row per sample; sets `unknown`."""
        pa, pc = load_pyarrow(), load_pyarrow().compute
        if not self._tables:
            raise ValueError("a table of visits must have at least one row, one per visit; found none.")
        totals = self._aggregate()
        columns = {"id": totals["id"], "visits": totals["visits"]}
        sums = [name.removeprefix("sum ") for name in totals.column_names if name.startswith("sum ")]
        for name in sorted(filter(AVERAGED.fullmatch, sums), key=_place):
            mean = pc.divide(totals[f"sum {name}"], finite_visits(totals, name))
            if mean.null_count < len(mean):
                columns[name] = mean
        if self._early_epochs is not None:
            columns |= history_columns(totals)
            score = wrong_label_score(totals, columns.keys(), self._early_epochs)
            if score is not None:
                name, self.ranked_by, means = score
                # A sample whose visits are all later is ranked by their mean.
                means = columns[name] if means is None else pc.coalesce(means, columns[name])
                columns["suspicion"] = pc.multiply(means, float(SCORES[name]))
        for name in totals.column_names:
            if name.startswith("last "):
                columns.setdefault(name.removeprefix("last "), totals[name])
        samples = pa.table(columns)
        scores = [samples[name] for name in samples.column_names if name in SCORES]
        has_score = reduce(pc.or_, map(pc.is_valid, scores)) if scores else pa.repeat(False, len(samples))
        self.unknown = samples["id"].filter(pc.invert(has_score))
        return samples.filter(has_score)

    def _aggregate(self) -> Any:
        """Aggregate to one row per sample. The prefix of a column's name says how rows combine: the last value after
        "last" and "state", otherwise the sum.
        """
        rows = _count_missing(concat_tables(self._tables, "the visits that were given"))
        # Numbers of the samples in the order of first visits: group_by keeps the order of most samples, but not of all.
        rows = rows.append_column("sample", rows["id"].combine_chunks().dictionary_encode().indices)
        if self._early_epochs is not None:
            rows = with_history(rows)
        names = [name for name in rows.column_names if name != "sample"]
        functions = {name: "last" if name.startswith(("id", "last ", "state ")) else "sum" for name in names}
        by_sample = rows.group_by("sample", use_threads=False)  # threads would change which value is the last
        grouped = by_sample.aggregate(list(functions.items())).sort_by("sample")
        totals = load_pyarrow().table({name: grouped[f"{name}_{function}"] for name, function in functions.items()})
        self._tables = [totals]
        self._pending = 0
        return totals


def _count_missing(rows: Any) -> Any:
    """Add the number of visits that are missing in the sum of a score; where the sum is null, all are."""
    pc = load_pyarrow().compute
    for name in [name for name in rows.column_names if name.startswith("sum ") and rows[name].null_count]:
        missing = name.replace("sum ", "missing ", 1)
        before = pc.fill_null(rows[missing], 0) if missing in rows.column_names else 0
        column = pc.if_else(pc.is_null(rows[name]), rows["visits"], before)
        if missing in rows.column_names:
            rows = rows.drop_columns(missing)
        rows = rows.append_column(missing, column)
    return rows


def _place(name: str) -> tuple[int, str]:
    """Key that sorts scores in the order of `SCORES`, and other columns after them."""
    return (list(SCORES).index(name) if name in SCORES else len(SCORES), name)


def _as_partial_sums(table: Any, early_epochs: int | None) -> Any:
    """Table of visits in the form of aggregated samples. The sum of a non-finite score is null."""
    pa, pc = load_pyarrow(), load_pyarrow().compute
    columns = {name: table[name] for name in table.column_names}
    if "count" in columns:
        counts = pc.fill_null(columns["count"].cast(pa.float64()), 1.0)
        columns |= {name: pc.divide(columns[name].cast(pa.float64()), counts) for name in SUMMED if name in columns}
    if "norm" in columns:
        columns.setdefault("self_influence", pc.power(columns["norm"].cast(pa.float64()), 2))
    partial = {"id": columns.pop("id"), "visits": pa.repeat(1, len(table))}
    for name in list(filter(AVERAGED.fullmatch, columns)):
        values = columns.pop(name).cast(pa.float64())
        partial[f"sum {name}"] = pc.if_else(pc.is_finite(values), values, None)
    if early_epochs is not None:
        partial |= partial_history(partial, columns, early_epochs)
    last_values = {f"last {name}": values for name, values in columns.items() if name not in ("epoch", "update")}
    return pa.table(partial | last_values)


def recommended_score(names: Iterable[str]) -> tuple[str, ...]:
    """The recommended one of some scores: the one that found most wrong labels in docs/diagnostics.md."""
    available = set(names)
    return next((name,) for name in RANKED if name in available)


def signed_scores(samples: Any, score: str) -> list[float]:
    """One score of each sample of `aggregate_visits`, signed so that higher is more suspicious; NaN if unknown."""
    return [nan if value is None else SCORES[score] * value for value in samples[score].to_pylist()]


def suspicion(samples: Any, by: Sequence[str]) -> list[float]:
    """Suspicion of each sample of `aggregate_visits`: one score, or the mean of the ranks (0 to 1) in several.

    A sample without the score gets -inf if it is the only score, and the rank 0.5 in that score if there are several.
    """
    if len(by) == 1:
        return [-inf if value != value else value for value in signed_scores(samples, by[0])]
    ranks_by_score = [ranks(signed_scores(samples, name)) for name in by]
    return [sum(sample_ranks) / len(by) for sample_ranks in zip(*ranks_by_score, strict=True)]


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0 (lowest) to 1 (highest); equal values get the mean of their ranks, and NaN gets 0.5."""
    order = sorted((k for k, v in enumerate(values) if v == v), key=values.__getitem__)
    result = [0.5] * len(values)
    start = 0
    last = max(len(order) - 1, 1)
    for _, group in groupby(order, key=values.__getitem__):
        tied = list(group)
        for k in tied:
            result[k] = (start + (len(tied) - 1) / 2) / last
        start += len(tied)
    return result


def _check(table: Any, numbers: tuple[str, ...]) -> None:
    """Raise ValueError for a table without ids or scores, or with strings in these or in the columns `numbers`."""
    names = table.column_names
    if "id" not in names or not any(name in SCORES for name in names):
        raise ValueError(
            f"a table of visits must have the column id and one of {', '.join(SCORES)}; found "
            f"{', '.join(names) or 'no columns'}. sw.Ledger() records such a table, with the ids that "
            "sw.Indexed(dataset) adds to the batches; a loss function adds columns: return losses, {'margin': margin}."
        )
    unknown = table["id"].null_count
    if unknown:
        raise ValueError(f"every visit must have an id; found {unknown:,} of {len(table):,} visits without an id.")
    for name in (*filter(AVERAGED.fullmatch, names), *numbers):
        if name in names and load_pyarrow().types.is_string(table[name].type):
            raise ValueError(f"the column {name!r} must hold numbers; found {table[name].type}.")
