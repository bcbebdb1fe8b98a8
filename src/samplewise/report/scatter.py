"""Section "Samples": data for the scatter plot of loss and gradient norm and the gallery drawn by samples.js.

Up to 20,000 samples are put into the page individually. With more, the page gets counts on a grid, and the suspects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from samplewise.ledger.aggregate import SCORES
from samplewise.report.html import Section, embedded, quiet, shortened, text
from samplewise.report.previews import Previews
from samplewise.report.samples import TITLES, Samples

MOST_SAMPLES = 20_000
BUDGET = 1_200_000  # characters of all samples in the page
GRID = (72, 48)  # columns, rows
DECADES = 30.0  # ratio of largest and small values from which an axis is logarithmic
SMALLEST = 1e-8  # relative to the largest value: smaller ones are drawn at the edge of a logarithmic axis
EXACT = 2**53  # largest integer that JavaScript represents exactly
HIDDEN = ("id", "visits", "epoch", "update")
Values = Sequence[float | None]
Column = dict[str, Any]  # in the format of samples.js


class Axis(NamedTuple):
    """Range and scale of an axis."""

    name: str
    log: bool
    low: float
    high: float


def axis(name: str, values: Values) -> Axis | None:
    """Axis that covers all finite values; None if there are none."""
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    positive = sorted(value for value in known if value > 0)
    if low >= 0 and positive and high >= DECADES * positive[len(positive) // 100]:
        return Axis(name, True, max(positive[0], high * SMALLEST) / 1.3, high * 1.3)
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(name, False, low - margin, high + margin)


def density(axes: Sequence[Axis], values: Sequence[Values]) -> list[list[int]]:
    """[column, row, count] of each non-empty cell of the grid."""
    import numpy as np

    both = np.array(values, dtype=float)
    inside = [np.clip(v, a.low, a.high) for v, a in zip(both[:, np.isfinite(both).all(0)], axes, strict=True)]
    edges = [(np.geomspace if a.log else np.linspace)(a.low, a.high, n + 1) for a, n in zip(axes, GRID, strict=True)]
    counts = np.histogram2d(inside[0], inside[1], bins=edges)[0].astype(int)
    return [[int(column), int(row), int(counts[column, row])] for column, row in np.argwhere(counts)]


# ---------------------------------------------------------------------------------------- data


def payload(samples: Samples, previews: Previews) -> dict[str, Any]:
    """Data for samples.js."""
    each = samples.each
    rows, columns, whole = _chosen(samples)
    xs, ys = (each[name].to_pylist() if name in each.column_names else [] for name in ("loss", "norm"))
    x = axis("loss", xs)
    y = axis("gradient norm", ys)
    numbers = {row: k for k, row in enumerate(rows)}
    ids = [str(one) for one in each["id"].take(rows).to_pylist()]
    suspects = list(dict.fromkeys(numbers[row] for places in _by_rank(samples) for row in places))
    shown = previews.shown(ids[k] for k in suspects)
    return {
        "total": len(each),
        "axes": [x._asdict(), y._asdict()] if x and y else None,
        "grid": None if whole or not (x and y) else {"size": GRID, "cells": density((x, y), (xs, ys))},
        "ids": [shortened(one) for one in ids],
        "columns": _labels(each, ids, previews) + columns,
        "scores": [{"title": s.title, "order": [numbers[row] for row in s.order]} for s in samples.scores],
        "previews": {k: shown[ids[k]] for k in suspects if ids[k] in shown},
    }


def _by_rank(samples: Samples) -> list[list[int]]:
    """Rows by rank: the first of all scores, then the second, so that the last ranks lose their previews first."""
    longest = max(len(score.order) for score in samples.scores)
    return [[s.order[k] for s in samples.scores if k < len(s.order)] for k in range(longest)]


def _chosen(samples: Samples) -> tuple[list[int], list[Column], bool]:
    """Rows that are put into the page, their columns, and True if these are all rows."""
    each = samples.each
    if len(each) <= MOST_SAMPLES:
        columns = [_column(each, name) for name in _names(each)]
        if _size([each["id"].to_pylist(), columns]) <= BUDGET:
            return list(range(len(each))), columns, True
    rows = sorted({row for score in samples.scores for row in score.order})
    return rows, _fitting(each.take(rows)), False


def _size(value: Any) -> int:
    return len(json.dumps(value))


def _names(each: Any) -> list[str]:
    """Names of the columns shown for a sample, in order."""
    extra = [name for name in each.column_names if name not in HIDDEN and name not in SCORES]
    scores = [name for name in SCORES if name in each.column_names]
    return sorted([*scores, "visits", *extra], key=lambda name: name != "label")  # the label comes first


def _fitting(chosen: Any) -> list[Column]:
    """Columns of the chosen rows: all scores, and other columns within the budget."""
    found: list[Column] = []
    room = BUDGET
    for name in _names(chosen):
        column = _column(chosen, name)
        room -= _size(column)
        if room >= 0 or name in SCORES:
            found.append(column)
    return found


def _column(each: Any, name: str) -> Column:
    values = [_plain(value) for value in each[name].to_pylist()]
    return {"name": TITLES.get(name, name) if name in SCORES else name, "key": name, **_told(values)}


def _told(values: list[Any]) -> dict[str, Any]:
    """Values of a column; a constant column is stored once."""
    return {"same": values[0]} if len(set(values)) == 1 else {"values": values}


def _plain(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}") if isfinite(value) else None
    known = value is None or (isinstance(value, int) and abs(value) <= EXACT)
    return value if known else shortened(str(value))


def _labels(each: Any, ids: list[str], previews: Previews) -> list[Column]:
    """Column of labels from the previews, if the ledger has no labels."""
    found = [] if "label" in each.column_names else [previews.label(one) for one in ids]
    if all(label is None for label in found):
        return []
    return [{"name": "label", "key": "label", **_told(found)}]


# ---------------------------------------------------------------------------------------- page


def scatter(samples: Samples, previews: Previews) -> Section:
    if samples.each is None:
        return Section("Samples", quiet(samples.missing))
    data = payload(samples, previews)
    plot = _PLOT if data["axes"] else quiet("Loss or gradient norm is not known, so there is no plot.")
    choices = "".join(
        f'<button type="button" data-score="{k}" aria-pressed="{"false" if k else "true"}">{text(s["title"])}</button>'
        for k, s in enumerate(data["scores"])
    )
    return Section(
        "Samples",
        f"{quiet(_said(samples, data))}\n"
        f'<div id="scores" role="group" aria-label="Suspects by">{choices}</div>\n{plot}\n{_GALLERY}'
        f"{embedded('samples-data', data)}",
    )


def _said(samples: Samples, data: dict[str, Any]) -> str:
    """Explanation of the points, and of what is left out."""
    said = ["Values are means over the visits of each sample."]
    if data["grid"]:
        said = [
            f"{data['total']:,} samples are too many to draw individually: the shade shows their number, and only "
            "suspects are drawn as points."
        ]
    left = set(_names(samples.each)) - {column["key"] for column in data["columns"]}
    if left:
        said.append(f"{len(left):,} columns of the ledger are left out.")
    said.append("Suspects are the samples that are hardest to learn by the chosen score: wrong or unusual ones.")
    return " ".join(said)


_PLOT = """<div class="explorer">
<figure><figcaption>Loss and gradient norm</figcaption>
<div class="plot"><canvas id="plot" tabindex="0" role="application"
  aria-label="Loss and gradient norm of each sample. Arrow keys select suspects, Enter pins, Escape unpins."
></canvas>
<div id="tip" role="status" hidden=""></div></div>
<ul class="legend"><li><i class="dot"></i>sample</li><li><i class="dot suspect"></i>suspect</li></ul></figure>
<aside id="pinned" aria-live="polite"><p class="quiet">Click a point or a card to see the sample here. On the
  keyboard, arrow keys select suspects, Enter pins one, Escape unpins it.</p></aside>
</div>"""
_GALLERY = """<h3 id="suspects">Suspects</h3>
<noscript><p class="quiet">Showing the samples needs JavaScript, which is turned off.</p></noscript>
<ol id="gallery" class="gallery"></ol><button type="button" id="more" hidden="">Show more</button>
"""
