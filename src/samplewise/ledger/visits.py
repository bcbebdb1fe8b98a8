"""Aggregation of a ledger to one row per sample, and suspicion scores of samples. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from math import inf, nan
from typing import Any

from samplewise.ledger.files import arrow, together

TOGETHER = 2**20  # visits that are collected before they are aggregated

# Columns that are scores, and the sign that is suspicious. The margin is the label's logit minus the largest other.
SCORES = {"loss": 1, "norm": 1, "margin": -1, "el2n": 1, "self_influence": 1}


def visited(tables: Iterable[Any]) -> Any:
    """Aggregate tables of visits to a pyarrow table with one row per sample, in the order of first visits.

    Columns: id; visits, their number; the mean of each score over the visits where it is finite; and the last value of
    any other column except epoch and update. `self_influence`, if there is no such column, is the mean of norm².

    A score that is never finite is left out, and so is a sample without a finite score.
    """
    seen = Visits()
    for table in tables:
        seen.add(table)
    return seen.samples()


class Visits:
    """Incremental aggregation of visits, see `visited`. Keeps one row per sample and at most 2**20 recent visits."""

    def __init__(self) -> None:
        self.unknown: Any = None  # ids of the samples without a finite score; set by `samples`
        self._tables: list[Any] = []  # the first holds aggregated samples, the others the visits since then
        self._waiting = 0  # visits that are not aggregated yet

    def add(self, table: Any) -> None:
        """Add a table of visits."""
        if not len(table):
            return
        _check(table)
        for start in range(0, len(table), TOGETHER):
            self._tables.append(_told(table.slice(start, TOGETHER)))
            self._waiting += len(self._tables[-1])
            if self._waiting >= TOGETHER:
                self._settle()

    def samples(self) -> Any:
        """Pyarrow table with one row per sample; sets `unknown`."""
        pa, pc = arrow(), arrow().compute
        if not self._tables:
            raise ValueError("a table of visits must have at least one row, one per visit; found none.")
        settled = self._settle()
        found = {name: settled[name] for name in settled.column_names}
        columns = {"id": found["id"], "visits": found["visits"]}
        for name in (name for name in SCORES if f"sum {name}" in found):
            missing = pc.fill_null(found.get(f"missing {name}", pa.repeat(0, len(settled))), 0)
            mean = pc.divide(found[f"sum {name}"], pc.subtract(found["visits"], missing))
            if mean.null_count < len(mean):
                columns[name] = mean
        others = {name.removeprefix("last "): found[name] for name in found if name.startswith("last ")}
        known = pa.table(columns | {name: values for name, values in others.items() if name not in columns})
        told = _any_known(known)
        self.unknown = known["id"].filter(pc.invert(told))
        return known.filter(told)

    def _settle(self) -> Any:
        """Aggregate to one row per sample. The prefix of a column's name, "last" or "sum", says how rows combine."""
        rows = _counted(together(self._tables, "the visits that were given"))
        ways = [(name, "last" if name.startswith("last ") else "sum") for name in rows.column_names if name != "id"]
        grouped = rows.group_by("id", use_threads=False).aggregate(ways)  # threads would change the order of samples
        settled = arrow().table({"id": grouped["id"]} | {name: grouped[f"{name}_{way}"] for name, way in ways})
        self._tables = [settled]
        self._waiting = 0
        return settled


def _counted(rows: Any) -> Any:
    """Add the number of visits that are missing in the sum of a score; where the sum is null, all are."""
    pc = arrow().compute
    for name in [name for name in rows.column_names if name.startswith("sum ") and rows[name].null_count]:
        missing = name.replace("sum ", "missing ", 1)
        before = pc.fill_null(rows[missing], 0) if missing in rows.column_names else 0
        column = pc.if_else(pc.is_null(rows[name]), rows["visits"], before)
        if missing in rows.column_names:
            rows = rows.drop_columns(missing)
        rows = rows.append_column(missing, column)
    return rows


def _told(table: Any) -> Any:
    """Table of visits in the form of aggregated samples. The sum of a non-finite score is null."""
    pa, pc = arrow(), arrow().compute
    known = {name: table[name] for name in table.column_names}
    if "norm" in known:
        known.setdefault("self_influence", pc.power(known["norm"].cast(pa.float64()), 2))
    told = {"id": known.pop("id"), "visits": pa.repeat(1, len(table))}
    for name in (name for name in SCORES if name in known):
        values = _or_null(known.pop(name).cast(pa.float64()))
        told[f"sum {name}"] = values
    others = {f"last {name}": values for name, values in known.items() if name not in ("epoch", "update")}
    return pa.table(told | others)


def recommended(names: Iterable[str]) -> tuple[str, ...]:
    """The recommended one of some scores: the one that found most wrong labels in docs/diagnostics.md."""
    there = set(names)
    return next((name,) for name in ("margin", "loss", "el2n", "norm", "self_influence") if name in there)


def scored(samples: Any, name: str) -> list[float]:
    """One score of each sample of `visited`, signed so that higher is more suspicious; NaN where it is unknown."""
    return [nan if value is None else SCORES[name] * value for value in samples[name].to_pylist()]


def suspicion(samples: Any, by: Sequence[str]) -> list[float]:
    """Suspicion of each sample of `visited`: a single score, or the mean of the ranks (0 to 1) in several scores.

    A sample without the score gets -inf if it is the only score, and the rank 0.5 in that score if there are several.
    """
    if len(by) == 1:
        return [-inf if value != value else value for value in scored(samples, by[0])]
    return [sum(places) / len(by) for places in zip(*(ranks(scored(samples, name)) for name in by), strict=True)]


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0 (lowest) to 1 (highest); equal values get the mean of their ranks, and NaN gets 0.5."""
    places = sorted((k for k, v in enumerate(values) if v == v), key=values.__getitem__)
    found = [0.5] * len(values)
    start = 0
    last = max(len(places) - 1, 1)
    for _, equal in groupby(places, key=values.__getitem__):
        same = list(equal)
        for k in same:
            found[k] = (start + (len(same) - 1) / 2) / last
        start += len(same)
    return found


def _check(table: Any) -> None:
    there = table.column_names
    if "id" not in there or not any(name in SCORES for name in there):
        raise ValueError(
            f"a table of visits must have the column id and one of {', '.join(SCORES)}; found "
            f"{', '.join(there) or 'no columns'}."
        )
    unknown = table["id"].null_count
    if unknown:
        raise ValueError(f"every visit must have an id; found {unknown:,} of {len(table):,} visits without an id.")
    for name in SCORES:
        if name in there and arrow().types.is_string(table[name].type):
            raise ValueError(f"the column {name!r} must hold numbers; found {table[name].type}.")


def _or_null(column: Any) -> Any:
    """The column with non-finite values replaced by null."""
    pc = arrow().compute
    return pc.if_else(pc.is_finite(column), column, None)


def _any_known(samples: Any) -> Any:
    pa, pc = arrow(), arrow().compute
    scores = [samples[name] for name in samples.column_names if name in SCORES]
    return reduce(pc.or_, map(pc.is_valid, scores)) if scores else pa.repeat(False, len(samples))
