"""Training dynamics of tables of visits: compared with plain loops, at once and in chunks."""

import math

import numpy as np
import pyarrow as pa
import pytest

from samplewise.ledger import aggregate
from samplewise.ledger.aggregate import VisitAggregator

EARLY = 3


def drawn(seed, rows=400):
    """Visits of 30 samples in random order: some values are not finite, some visits have no label."""
    rng = np.random.default_rng(seed)
    confidence, norm, margin, el2n = rng.random((4, rows))
    label, prediction = rng.integers(0, 2, (2, rows))
    ignored = rng.random(rows) < 0.2
    norm[rng.random(rows) < 0.1] = math.inf
    norm += 1e6  # a difference of sums of squares would lose six digits
    confidence[ignored] = math.nan
    margin[ignored] = math.nan
    ids = rng.integers(0, 30, rows)
    names = [f"s{k}" for k in ids] if seed % 2 else ids
    epochs = np.sort(rng.integers(0, 14, rows))
    return {
        "id": names,
        "epoch": epochs,
        "norm": norm,
        "margin": margin,
        "el2n": el2n,
        "confidence": confidence,
        "label": label,
        "prediction": prediction,
    }


def rows_of(columns):
    """Rows of each sample, in the order of first visits."""
    rows = {}
    for k, name in enumerate(list(columns["id"])):
        rows.setdefault(name, []).append(k)
    return rows


def number(value):
    return math.nan if value is None else float(value)


def mean(values):
    return sum(values) / len(values) if values else None


def by_hand(columns, rows):
    """Training dynamics of the sample with these rows, by their definitions."""
    finite = {name: [k for k in rows if math.isfinite(columns[name][k])] for name in ("confidence", "norm", "margin")}
    confidences = [columns["confidence"][k] for k in finite["confidence"]]
    center = mean(confidences)
    right = [bool(columns["label"][k] == columns["prediction"][k]) for k in finite["margin"]]
    forgotten = 0
    learned = None
    for place, k in enumerate(finite["margin"]):
        forgotten += place > 0 and right[place - 1] and not right[place]
        if not right[place]:
            learned = None
        elif learned is None:
            learned = columns["epoch"][k]
    epochs = [columns["epoch"][k] for k in finite["norm"]]
    norms = [columns["norm"][k] for k in finite["norm"]]
    slope = None
    if len(set(epochs)) > 1:
        middle = mean(epochs)
        slope = sum((e - middle) * n for e, n in zip(epochs, norms, strict=True))
        slope /= sum((e - middle) ** 2 for e in epochs)
    return {
        "variability": math.sqrt(mean([(c - center) ** 2 for c in confidences])) if confidences else None,
        "correctness": mean(right),
        "forgetting_events": forgotten,
        "learned_epoch": learned,
        "aum": mean([columns["margin"][k] for k in finite["margin"]]),
        "grand": mean([columns["norm"][k] for k in finite["norm"] if columns["epoch"][k] < EARLY]),
        "early_el2n": mean([columns["el2n"][k] for k in rows if columns["epoch"][k] < EARLY]),
        "norm_trend": slope,
    }


@pytest.mark.parametrize("chunk", [5, 50, 10_000])
@pytest.mark.parametrize("seed", range(2))
def test_equal_to_loops_over_the_visits(monkeypatch, seed, chunk):
    monkeypatch.setattr(aggregate, "AGGREGATE_EVERY", chunk)
    columns = drawn(seed)
    aggregator = VisitAggregator(EARLY)
    aggregator.add(pa.table(columns).slice(0, 150))
    aggregator.add(pa.table(columns).slice(150))
    samples = aggregator.samples().to_pylist()
    assert [row["id"] for row in samples] == list(rows_of(columns))
    for row in samples:
        expected = by_hand(columns, rows_of(columns)[row["id"]])
        for name, value in expected.items():
            tolerance = 1e-8 if name == "norm_trend" else 1e-14  # a small difference of norms of 1e6
            np.testing.assert_allclose(
                number(row[name]), number(value), 1e-12, tolerance, err_msg=f"{name} {row['id']}"
            )


def test_columns_that_are_in_some_parts_only(monkeypatch):
    monkeypatch.setattr(aggregate, "AGGREGATE_EVERY", 1)
    aggregator = VisitAggregator(EARLY)
    aggregator.add(pa.table({"id": [0, 1], "epoch": [0, 0], "loss": [1.0, 2.0]}))
    both = {"label": [1, 1], "prediction": [1, 0], "confidence": [0.5, 0.25]}
    aggregator.add(pa.table({"id": [0, 1], "epoch": [1, 1], "loss": [1.0, 2.0], **both}))
    first, second = aggregator.samples().to_pylist()
    assert (first["correctness"], first["learned_epoch"], first["variability"]) == (1, 1, 0)
    assert (second["correctness"], second["learned_epoch"], second["confidence"]) == (0, None, 0.25)


def test_a_constant_confidence_has_no_variability():
    aggregator = VisitAggregator(EARLY)
    aggregator.add(pa.table({"id": [0] * 7, "loss": [1.0] * 7, "confidence": [0.1] * 7}))
    assert aggregator.samples()["variability"].to_pylist() == pytest.approx([0], abs=1e-16)


def simulated(memorized, confused, classes=5, epochs=24):
    """Samples of which some have wrong labels, which the model predicts rightly, until it memorizes them or forever."""
    rng = np.random.default_rng(0)
    truth = np.arange(200) % classes
    is_wrong = np.arange(200) % 7 == 0
    other = (truth + (1 if confused else rng.integers(1, classes, 200))) % classes
    label = np.where(is_wrong, other, truth)
    columns = {name: [] for name in ("id", "epoch", "margin", "el2n", "confidence", "label", "prediction")}
    for epoch in range(epochs):
        hidden = is_wrong & (not memorized or epoch < EARLY)
        entries = (
            np.arange(200),
            np.full(200, epoch),
            np.where(hidden, -1.0, 1.0) - 0.1 * epoch,
            hidden + 0.01 * epoch,
            np.where(hidden, 0.1, 0.9),
            label,
            np.where(hidden, truth, label),
        )
        for column, values in zip(columns.values(), entries, strict=True):
            column.extend(values.tolist())
    aggregator = VisitAggregator(EARLY)
    aggregator.add(pa.table(columns))
    return aggregator, aggregator.samples()["suspicion"].to_numpy(), is_wrong


@pytest.mark.parametrize("confused", [True, False])
@pytest.mark.parametrize("memorized", [True, False])
def test_the_score_of_wrong_labels_depends_on_the_run(memorized, confused):
    aggregator, suspicion, is_wrong = simulated(memorized, confused)
    name = "el2n" if confused else "margin"
    window = f"the first {EARLY} epochs" if memorized else "all visits"
    assert aggregator.ranked_by == f"mean {name} over {window}"
    middle = (EARLY - 1) / 2 if memorized else 23 / 2
    expected = is_wrong + 0.01 * middle if confused else np.where(is_wrong, 1, -1) + 0.1 * middle
    np.testing.assert_allclose(suspicion, expected, rtol=1e-12)


def test_two_classes_are_ranked_by_the_margin():
    aggregator, _, _ = simulated(memorized=False, confused=True, classes=2)
    assert aggregator.ranked_by == "mean margin over all visits"


def test_a_sample_that_joins_later_is_ranked_by_all_its_visits():
    aggregator, _, _ = simulated(memorized=True, confused=False)
    late = {"epoch": [20, 21], "margin": [-7.0, -9.0], "el2n": [1.0, 1.0], "confidence": [0.5, 0.5]}
    aggregator.add(pa.table({"id": [900, 900], **late, "label": [0, 0], "prediction": [1, 1]}))
    assert aggregator.samples().slice(200).to_pylist()[0]["suspicion"] == 8
    assert aggregator.ranked_by == f"mean margin over the first {EARLY} epochs"


@pytest.mark.parametrize(
    ("columns", "by"),
    [
        ({"margin": [1.0, 2.0], "loss": [3.0, 4.0]}, "margin"),
        ({"loss": [3.0, 4.0], "el2n": [1.0, 2.0]}, "loss"),
        ({"el2n": [1.0, 2.0], "norm": [3.0, 4.0]}, "el2n"),
        ({"margin": [math.nan, math.nan], "norm": [3.0, 4.0]}, "norm"),
    ],
)
def test_without_some_columns(columns, by):
    aggregator = VisitAggregator(EARLY)
    aggregator.add(pa.table({"id": [0, 1], **columns}))
    sign = -1 if by == "margin" else 1
    assert aggregator.samples()["suspicion"].to_pylist() == [sign * value for value in columns[by]]
    assert aggregator.ranked_by == f"mean {by} over all visits"
