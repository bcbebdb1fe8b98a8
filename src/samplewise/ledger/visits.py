"""From visits to samples: what a ledger tells of each sample, and how suspicious that makes it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from math import inf, nan
from typing import Any

from samplewise.ledger.files import arrow, together

TOGETHER = 2**20  # visits; they are kept as they come until there are so many

# Columns that are scores, and which sign is suspicious. The margin is the label's logit minus the largest other.
SCORES = {"loss": 1, "norm": 1, "margin": -1, "el2n": 1, "self_influence": 1}


def visited(tables: Iterable[Any]) -> Any:
    """Of tables of visits, one row per sample, in the order of first visits: id, visits, the mean of each score
    over the visits where it is finite, and of any other column, epoch and update aside, what the last visit said.
    `self_influence`, if it is no column, is the mean of norm².

    A score that is finite nowhere is left out, and so is a sample that has none.
    """
    seen = Visits()
    for table in tables:
        seen.add(table)
    return seen.samples()


class Visits:
    """The same, table by table. Kept is one row per sample, and the latest visits."""

    def __init__(self) -> None:
        self.unknown: Any = None  # ids of the samples that have no score, once `samples` has been asked
        self._tables: list[Any] = []  # the first is of samples, and the others of visits since
        self._waiting = 0  # so many

    def add(self, table: Any) -> None:
        if not len(table):
            return
        _check(table)
        for start in range(0, len(table), TOGETHER):
            self._tables.append(_told(table.slice(start, TOGETHER)))
            self._waiting += len(self._tables[-1])
            if self._waiting >= TOGETHER:
                self._settle()

    def samples(self) -> Any:
        pa, pc = arrow(), arrow().compute
        if not self._tables:
            raise ValueError("a table of visits must have one row per visit, one at least; found none.")
        settled = self._settle()
        found = {name: settled[name] for name in settled.column_names}
        columns = {"id": found["id"], "visits": found["visits"]}
        for name in (name for name in SCORES if f"sum {name}" in found):
            missing = pc.fill_null(found.get(f"missing {name}", pa.repeat(0, len(settled))), 0)
            mean = pc.divide(found[f"sum {name}"], pc.subtract(found["visits"], missing))
            columns |= {name: mean} if mean.null_count < len(mean) else {}
        others = {name.removeprefix("last "): found[name] for name in found if name.startswith("last ")}
        known = pa.table(columns | {name: values for name, values in others.items() if name not in columns})
        told = _any_known(known)
        self.unknown = known["id"].filter(pc.invert(told))
        return known.filter(told)

    def _settle(self) -> Any:
        """One row per sample; how rows combine is in the names of their columns."""
        rows = _counted(together(self._tables, "the visits that were given"))
        ways = [(name, "last" if name.startswith("last ") else "sum") for name in rows.column_names if name != "id"]
        grouped = rows.group_by("id", use_threads=False).aggregate(ways)  # threads would shuffle the samples
        settled = arrow().table({"id": grouped["id"]} | {name: grouped[f"{name}_{way}"] for name, way in ways})
        self._tables, self._waiting = [settled], 0
        return settled


def _counted(rows: Any) -> Any:
    """Says how many visits are missing in the sum of a score, where some are: of a null all."""
    pc = arrow().compute
    for name in [name for name in rows.column_names if name.startswith("sum ") and rows[name].null_count]:
        missing = name.replace("sum ", "missing ", 1)
        before = pc.fill_null(rows[missing], 0) if missing in rows.column_names else 0
        column = pc.if_else(pc.is_null(rows[name]), rows["visits"], before)
        rows = (rows.drop_columns(missing) if missing in rows.column_names else rows).append_column(missing, column)
    return rows


def _told(table: Any) -> Any:
    """Each visit by itself. Where a score is not finite, its sum is null."""
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
    """By which of these scores: the one that found most wrong labels where we measured it, in docs/diagnostics.md."""
    there = set(names)
    return next((name,) for name in ("margin", "loss", "el2n", "norm", "self_influence") if name in there)


def scored(samples: Any, name: str) -> list[float]:
    """One score of each sample of `visited`, the higher the more suspicious; NaN where it is unknown."""
    return [nan if value is None else SCORES[name] * value for value in samples[name].to_pylist()]


def suspicion(samples: Any, by: Sequence[str]) -> list[float]:
    """How suspicious each sample of `visited` is, by a score or by the mean of its ranks in several, 0 to 1. Who has no
    such score is last, and in the middle where other scores are known.
    """
    if len(by) == 1:
        return [-inf if value != value else value for value in scored(samples, by[0])]
    return [sum(places) / len(by) for places in zip(*(ranks(scored(samples, name)) for name in by), strict=True)]


def ranks(values: Sequence[float]) -> list[float]:
    """From 0 for the lowest to 1 for the highest; equal values share the mean of theirs, and NaN stands at 0.5."""
    places, found = sorted((k for k, v in enumerate(values) if v == v), key=values.__getitem__), [0.5] * len(values)
    start, last = 0, max(len(places) - 1, 1)
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
            f"{', '.join(there) or 'none'}."
        )
    unknown = table["id"].null_count
    if unknown:
        raise ValueError(f"every visit must have an id; found {unknown:,} of {len(table):,} without.")
    for name in SCORES:
        if name in there and arrow().types.is_string(table[name].type):
            raise ValueError(f"the column {name!r} must hold numbers; found {table[name].type}.")


def _or_null(column: Any) -> Any:
    """Without what is not finite."""
    pc = arrow().compute
    return pc.if_else(pc.is_finite(column), column, None)


def _any_known(samples: Any) -> Any:
    pa, pc = arrow(), arrow().compute
    scores = [samples[name] for name in samples.column_names if name in SCORES]
    return reduce(pc.or_, map(pc.is_valid, scores)) if scores else pa.repeat(False, len(samples))
