"""Sections "Suspects" and "Data map": data for the gallery, the scatter plot of loss and gradient norm, and that of
variability and confidence, drawn by samples.js.

Up to 20,000 samples are put into the page individually. With more, the page gets counts on a grid, the suspects, and
one sample of each cell of the data map.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from math import isfinite
from typing import Any, NamedTuple

from samplewise.core.text import plural
from samplewise.ledger.aggregate import SCORES
from samplewise.report.html import Section, embedded, note_paragraph, shortened, text
from samplewise.report.previews import Previews
from samplewise.report.samples import Samples, score_title

MAX_SAMPLES = 20_000
BUDGET = 1_200_000  # characters of all samples in the page
GRID = (72, 48)  # columns, rows
DECADES = 30.0  # ratio of largest and small values from which an axis is logarithmic
MIN_RELATIVE = 1e-8  # relative to the largest value: smaller ones are drawn at the edge of a logarithmic axis
MAX_INTEGER = 2**53  # largest integer that JavaScript represents exactly
LOSS_AND_NORM = ("loss", "norm")
MAP = ("variability", "confidence")
HIDDEN_COLUMNS = ("id", "visits", "epoch", "update")
CLASS_COLUMNS = ("label", "prediction")  # shown first, with the names of the classes if they are known
Values = Sequence[float | None]
Column = dict[str, Any]  # in the format of samples.js


class Axis(NamedTuple):
    """Range and scale of an axis."""

    name: str
    log: bool
    low: float
    high: float


def axis(name: str, values: Values, *, linear: bool = False) -> Axis | None:
    """Axis that covers all finite values; None if there are none. It is logarithmic for values of several decades,
    unless `linear`.
    """
    finite = [value for value in values if value is not None and isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    positive = sorted(value for value in finite if value > 0)
    if not linear and low >= 0 and positive and high >= DECADES * positive[len(positive) // 100]:
        return Axis(name, True, max(positive[0], high * MIN_RELATIVE) / 1.3, high * 1.3)
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(name, False, low - margin, high + margin)


def density(axes: Sequence[Axis], values: Sequence[Values]) -> list[list[int]]:
    """[column, row, count, first sample] of each non-empty cell of the grid."""
    import numpy as np

    points = np.array(values, dtype=float)  # (2, samples)
    samples = np.flatnonzero(np.isfinite(points).all(0))
    places = []
    for v, a, n in zip(points[:, samples], axes, GRID, strict=True):
        edges = (np.geomspace if a.log else np.linspace)(a.low, a.high, n + 1)
        places.append(np.clip(np.searchsorted(edges, v, side="right") - 1, 0, n - 1))
    cells, first, counts = np.unique(places[0] * GRID[1] + places[1], return_index=True, return_counts=True)
    rows = zip(cells // GRID[1], cells % GRID[1], counts, samples[first], strict=True)
    return [[int(number) for number in row] for row in rows]


# --- data -------------------------------------------------------------------------------------------------------------


def payload(samples: Samples, previews: Previews) -> dict[str, Any]:
    """Data for samples.js."""
    table = samples.table
    plots = {names: _plot(table, names) for names in (LOSS_AND_NORM, MAP)}
    rows, columns, complete = _selected_rows(samples, previews, [cell[3] for cell in plots[MAP]["cells"]])
    index_of_row = {row: k for k, row in enumerate(rows)}
    ids = [str(sample_id) for sample_id in table["id"].take(rows).to_pylist()]
    # By rank, the first of all scores, then the second: if previews exceed their budget, the last ranks lose theirs.
    ranks = zip_longest(*(score.order for score in samples.rankings))
    suspects = list(dict.fromkeys(index_of_row[row] for rank in ranks for row in rank if row is not None))
    visible = previews.shown(ids[k] for k in suspects)
    return {
        "total": len(table),
        **_page_plot(plots[LOSS_AND_NORM], complete, {}),
        "map": _page_plot(plots[MAP], complete, index_of_row),
        "ids": [shortened(sample_id) for sample_id in ids],
        "columns": _labels(table, ids, previews) + columns,
        "scores": [
            {"title": s.title, "by": s.by, "order": [index_of_row[row] for row in s.order]} for s in samples.rankings
        ],
        "previews": {k: visible[ids[k]] for k in suspects if ids[k] in visible},
    }


def _plot(table: Any, names: tuple[str, str]) -> dict[str, Any]:
    """Axes and cells of a plot of two columns; no axes if one of them has no values."""
    values = [table[name].to_pylist() if name in table.column_names else [] for name in names]
    is_map = names == MAP  # of probabilities
    x, y = (axis(score_title(table, name), column, linear=is_map) for name, column in zip(names, values, strict=True))
    return {"axes": [x, y], "cells": density((x, y), values)} if x and y else {"axes": None, "cells": []}


def _page_plot(plot: dict[str, Any], complete: bool, index_of_row: dict[int, int]) -> dict[str, Any]:
    """A plot as samples.js needs it. The fourth number of a cell is the index of one of its samples, if it is known."""
    axes = plot["axes"] and [axis._asdict() for axis in plot["axes"]]
    cells = [[*cell[:3], *([index_of_row[cell[3]]] if index_of_row else [])] for cell in plot["cells"]]
    return {"axes": axes, "grid": {"size": GRID, "cells": cells} if axes and not complete else None}


def _selected_rows(samples: Samples, previews: Previews, examples: list[int]) -> tuple[list[int], list[Column], bool]:
    """Rows that are put into the page, their columns, and True if these are all rows. If not, the `examples` are among
    them.
    """
    table = samples.table
    if len(table) <= MAX_SAMPLES:
        columns = [_column(table, name, previews) for name in _shown_columns(table)]
        if _size([table["id"].to_pylist(), columns]) <= BUDGET:
            return list(range(len(table))), columns, True
    rows = sorted({*examples, *(row for score in samples.rankings for row in score.order)})
    table = table.take(rows)
    columns = []
    remaining = BUDGET
    for name in _shown_columns(table):
        column = _column(table, name, previews)
        remaining -= _size(column)
        if remaining >= 0 or name in SCORES or name in MAP:  # needed for the rankings, and for the data map
            columns.append(column)
    return rows, columns, False


def _size(value: Any) -> int:
    return len(json.dumps(value))


def _shown_columns(table: Any) -> list[str]:
    """Names of the columns shown for a sample, in order."""
    extra = [name for name in table.column_names if name not in HIDDEN_COLUMNS and name not in SCORES]
    scores = [name for name in SCORES if name in table.column_names]
    first = [name for name in CLASS_COLUMNS if name in extra]
    return [*first, *scores, "visits", *(name for name in extra if name not in first)]


def _column(table: Any, name: str, previews: Previews) -> Column:
    values = [_json_value(value) for value in table[name].to_pylist()]
    if name in CLASS_COLUMNS:
        values = [previews.class_name(value) for value in values]
    if name == "label":
        ids = map(str, table["id"].to_pylist())
        labels = [previews.label(sample_id) for sample_id in ids]  # of a preview, which may be a name
        values = [v if label in (None, str(v)) else label for v, label in zip(values, labels, strict=True)]
    return {"name": score_title(table, name), "key": name, **_column_values(values)}


def _column_values(values: list[Any]) -> dict[str, Any]:
    """Values of a column; a constant column is stored once."""
    return {"same": values[0]} if len(set(values)) == 1 else {"values": values}


def _json_value(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}") if isfinite(value) else None
    is_exact = value is None or (isinstance(value, int) and abs(value) <= MAX_INTEGER)
    return value if is_exact else shortened(str(value))


def _labels(table: Any, ids: list[str], previews: Previews) -> list[Column]:
    """Column of labels from the previews, if the ledger has no labels."""
    labels = [] if "label" in table.column_names else [previews.label(sample_id) for sample_id in ids]
    if all(label is None for label in labels):
        return []
    return [{"name": "label", "key": "label", **_column_values(labels)}]


# --- page -------------------------------------------------------------------------------------------------------------


def scatter(samples: Samples, previews: Previews) -> Section:
    if samples.table is None:
        return Section("Samples", note_paragraph(samples.missing))
    data = payload(samples, previews)
    plot = _PLOT if data["axes"] else note_paragraph("Loss or gradient norm is not known, so there is no plot.")
    choices = "".join(
        f'<button type="button" data-score="{k}" aria-pressed="{"false" if k else "true"}">{text(s["title"])}</button>'
        for k, s in enumerate(data["scores"])
    )
    return Section(
        "Suspects",
        f"{note_paragraph(_explanation(samples, data))}\n"
        f'<div id="scores" role="group" aria-label="Suspects by">{choices}</div>\n{_GALLERY}{plot}\n'
        f"{embedded('samples-data', data)}",
    )


def data_map(samples: Samples) -> Section:
    """Plot of variability and confidence; without content if the ledger does not have confidences."""
    if samples.table is None or not set(MAP) <= set(samples.table.column_names):
        return Section("Data map", "")
    sentences = [
        "Confidence is the mean probability of a sample's label over its visits, variability its standard deviation: "
        "easy samples are at the top left, ambiguous ones on the right, and hard or wrongly labeled ones at the bottom "
        "left. Click a point to see the sample."
    ]
    if len(samples.table) > MAX_SAMPLES:
        sentences.append(
            "Of a cell of the map, the page has the sample that was visited first, beside the suspects: a click shows "
            "it, and search and filter find these samples only."
        )
    return Section("Data map", f"{note_paragraph(' '.join(sentences))}\n{_MAP}")


def _explanation(samples: Samples, data: dict[str, Any]) -> str:
    """Explanation of the points, and of what is left out."""
    sentences = [
        "Suspects are the samples that are hardest to learn by the chosen score: wrong or unusual ones.",
        "Values are means over the visits of each sample.",
    ]
    if "prediction" in samples.table.column_names:
        sentences.append("A prediction is that of the last visit.")
    if "count" in samples.table.column_names:
        sentences.append("Loss and gradient norm are divided by the count of the sample (its elements, or its weight).")
    if data["grid"]:
        sentences += [
            f"{data['total']:,} samples are too many to draw individually: the shade shows their number, and only "
            "suspects are drawn as points."
        ]
    left_out = set(_shown_columns(samples.table)) - {column["key"] for column in data["columns"]}
    if left_out:
        sentences.append(f"The page leaves out {plural(len(left_out), 'column')} of the ledger.")
    return " ".join(sentences)


_PLOT = """<h3>All samples</h3>
<div class="explorer">
<figure><figcaption>Loss and gradient norm</figcaption>
<div class="plot"><canvas id="plot" tabindex="0" role="application"
  aria-label="Loss and gradient norm of each sample. Arrow keys select suspects, Enter pins, Escape unpins."
></canvas>
<div id="tip" class="tip" role="status" hidden=""></div></div>
<ul class="legend"><li><i class="dot"></i>sample</li><li><i class="dot suspect"></i>suspect</li></ul></figure>
<aside id="pinned" class="pinned" aria-live="polite"><p class="quiet">Click a point or a card to see the sample here.
  On the keyboard, arrow keys select suspects, Enter pins one, Escape unpins it.</p></aside>
</div>"""
_MAP = """<div id="filter"><label>Search <input id="search" type="search" placeholder="id" /></label>
<label>Label <select id="label"><option value="">all</option></select></label>
<span id="matches" class="quiet" role="status"></span></div>
<div class="explorer">
<figure><figcaption>Variability and confidence</figcaption>
<div class="plot"><canvas id="map" tabindex="0" role="application"
  aria-label="Variability and confidence of each sample. Arrow keys select suspects, Enter pins, Escape unpins."
></canvas>
<div id="map-tip" class="tip" role="status" hidden=""></div></div></figure>
<aside id="map-pinned" class="pinned" aria-live="polite"></aside>
</div>"""
_GALLERY = """<noscript><p class="quiet">Showing the samples needs JavaScript, which is turned off.</p></noscript>
<ol id="gallery" class="gallery"></ol><button type="button" id="more" hidden="">Show more</button>
"""
