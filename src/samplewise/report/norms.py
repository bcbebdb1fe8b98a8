"""How the norms of the samples' gradients were distributed, over time."""

from __future__ import annotations

from itertools import pairwise
from math import nan
from typing import Any

from samplewise.ledger.files import arrow
from samplewise.report.charts import Band, Frame, bands, spans_decades
from samplewise.report.html import Section, beside, figure, quiet
from samplewise.report.run import Curve, Run
from samplewise.report.samples import Samples

STRETCHES = 100
QUANTILES = (0.5, 0.05, 0.25, 0.75, 0.95, 1.0)


def norms(run: Run, samples: Samples) -> Section:
    title = "Gradient norms over time"
    if samples.rows is None or "norm" not in samples.rows.column_names:
        return Section(title, "")
    middle, lowest, low, high, highest, maximum = quantiles(samples.rows)
    if not middle.finite:
        return Section(title, quiet("The ledger holds no finite norm: it was made with norms=False."))
    log = spans_decades([y for c in (lowest, maximum) for _, y in c.finite])
    around = [Band(lowest.points, highest.points), Band(low.points, high.points)]
    first, last = run.span  # of the log, which the ledger may be ahead of
    frame = Frame(min(first, middle.points[0][0]), max(last, middle.points[-1][0]))
    label = "Quantiles of per-sample gradient norms against updates"
    drawing = bands(around, [middle, maximum], frame, "norms", label, log)
    note = (
        f"Half of the samples lie in the dark band, nine tenths in the light one, in each of {len(middle.points):,} "
        "stretches of the run. A maximum far above the band is a few samples that pull harder than all others, and "
        "that clipping acts on. A band that falls while the maximum stays is a model that learns all but a few."
    )
    chart = figure("Norm of each sample's gradient", drawing, ["median", "maximum"])
    return Section(title, beside(chart, quiet(note)))


def quantiles(rows: Any, stretches: int = STRETCHES) -> list[Curve]:
    """Curves of the quantiles, each over stretches of visits in the order of training."""
    pc = arrow().compute
    stretches = min(stretches, len(pc.unique(rows["update"])))
    edges = [k * len(rows) // stretches for k in range(stretches + 1)]
    curves = [Curve(f"{q:.0%}", []) for q in QUANTILES]
    for start, end in pairwise(edges):
        part = rows.slice(start, end - start)
        values = pc.filter(part["norm"], pc.is_finite(part["norm"]))
        found = pc.quantile(values, list(QUANTILES)).to_pylist()
        place = float(pc.mean(part["update"]).as_py())
        for curve, value in zip(curves, found, strict=True):
            curve.points.append((place, nan if value is None else value))
    return curves
