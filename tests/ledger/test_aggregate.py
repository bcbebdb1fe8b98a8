"""Aggregation of visits to samples, at once and table by table."""

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

import samplewise as sw
from samplewise.ledger import aggregate
from samplewise.ledger.aggregate import VisitAggregator, aggregate_visits


def drawn(seed, rows=300):
    """Visits of 40 samples in random order, with non-finite values and a column that starts later."""
    rng = np.random.default_rng(seed)
    loss, norm, margin = rng.normal(size=(3, rows))
    loss[rng.random(rows) < 0.3] = math.nan
    norm[rng.random(rows) < 0.1] = math.inf
    margin[: rows // 2] = math.nan
    ids = rng.integers(0, 40, rows) * (2**40 + 1) - 5
    return {
        "id": ids,
        "epoch": np.zeros(rows, int),
        "loss": loss,
        "norm": norm,
        "margin": margin,
        "note": np.arange(rows),
    }


def by_hand(columns):
    found = {}
    for k, one in enumerate(columns["id"].tolist()):
        found.setdefault(one, []).append(k)
    for one, places in found.items():
        means = {"id": one, "visits": len(places), "note": int(columns["note"][places[-1]])}
        squares = columns["norm"] ** 2
        for name, values in {**columns, "self_influence": squares}.items():
            if name in ("loss", "norm", "margin", "self_influence"):
                finite = [v for v in values[places].tolist() if math.isfinite(v)]
                means[name] = sum(finite) / len(finite) if finite else None
        yield means


@pytest.mark.parametrize("together", [1, 20, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_means_over_visits(monkeypatch, seed, together):
    monkeypatch.setattr(aggregate, "AGGREGATE_EVERY", together)
    columns, seen, rng = drawn(seed), VisitAggregator(), np.random.default_rng(seed)
    edges = [0, *sorted(rng.integers(0, 150, 4).tolist()), 150, 170, 170, 300]
    for start, end in pairwise(edges):
        late = () if start >= 150 else ("margin",)  # the column starts later
        seen.add(pa.table({name: values[start:end] for name, values in columns.items() if name not in late}))
    found = {row["id"]: row for row in seen.samples().to_pylist()}
    expected = list(by_hand(columns))
    assert list(found) == [row["id"] for row in expected]
    for row in expected:
        assert found[row["id"]] == pytest.approx(row), row["id"]
    assert (
        aggregate_visits([pa.table(columns)]).sort_by("id").to_pydict()["visits"]
        == seen.samples().sort_by("id")["visits"].to_pylist()
    )


def test_columns_of_one_name_and_two_types():
    seen = VisitAggregator()
    seen.add(pa.table({"id": [1], "loss": [1.0]}))
    seen.add(pa.table({"id": ["a"], "loss": [1.0]}))
    with pytest.raises(
        sw.LedgerError, match="must have compatible columns; found that those in the visits that were given"
    ):
        seen.samples()


def test_no_visit():
    seen = VisitAggregator()
    seen.add(pa.table({}))
    with pytest.raises(ValueError, match="at least one row, one per visit; found none"):
        seen.samples()
