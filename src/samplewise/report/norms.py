"""How the norms of the samples' gradients were distributed, over time."""

from __future__ import annotations

from samplewise.report.charts import Band, Frame, bands, spans_decades
from samplewise.report.html import Section, beside, figure, quiet
from samplewise.report.run import Run
from samplewise.report.samples import Samples


def norms(run: Run, samples: Samples) -> Section:
    title = "Gradient norms over time"
    if not samples.norms:
        return Section(title, "")
    middle, lowest, low, high, highest, maximum = samples.norms
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
