"""From visits to samples: what a ledger tells of each sample, and how suspicious that makes it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from math import inf, nan
from typing import Any

from samplewise.ledger.files import arrow

# Columns that are scores, and which sign is suspicious. The margin is the label's logit minus the largest other.
SCORES = {"loss": 1, "norm": 1, "margin": -1, "el2n": 1, "self_influence": 1}


def visited(table: Any) -> Any:
    """One row per sample, in the order of first visits: id, visits, the mean of each score over the visits where it is
    finite, and of any other column what the last visit said. `self_influence` is the mean of norm²,
    if it is no column.

    A score that is finite nowhere is left out, and so is a sample that has none.
    """
    pa, pc = arrow(), arrow().compute
    _check(table)
    if "norm" in table.column_names and "self_influence" not in table.column_names:
        table = table.append_column("self_influence", pc.power(table["norm"].cast(pa.float64()), 2))
    scores = [name for name in SCORES if name in table.column_names]
    others = [name for name in table.column_names if name not in ("id", *scores)]
    for name in scores:
        table = _set(table, name, _or_null(table[name].cast(pa.float64())))
    ways = [(name, "mean") for name in scores] + [(name, "last") for name in others] + [([], "count_all")]
    grouped = table.group_by("id", use_threads=False).aggregate(ways)  # threads would shuffle the samples
    columns = {"id": grouped["id"], "visits": grouped["count_all"]}
    columns |= {name: grouped[f"{name}_mean"] for name in scores if grouped[f"{name}_mean"].null_count < len(grouped)}
    known = pa.table(columns | {name: grouped[f"{name}_last"] for name in others if name not in columns})
    return known.filter(_any_known(known))


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
    if not len(table):
        raise ValueError("a table of visits must have one row per visit, one at least; found none.")
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


def _set(table: Any, name: str, column: Any) -> Any:
    return table.set_column(table.column_names.index(name), name, column)


def _any_known(samples: Any) -> Any:
    pc = arrow().compute
    scores = [samples[name] for name in samples.column_names if name in SCORES]
    return reduce(pc.or_, map(pc.is_valid, scores)) if scores else [False] * len(samples)
