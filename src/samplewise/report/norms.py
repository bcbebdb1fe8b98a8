"""Section "Gradient norms over time": distribution of per-sample gradient norms."""

from __future__ import annotations

from samplewise.report.charts import Band, XRange, bands, spans_decades
from samplewise.report.html import Section, beside, figure, note_paragraph
from samplewise.report.run_log import RunLog
from samplewise.report.samples import Samples


def norms(run: RunLog, samples: Samples) -> Section:
    title = "Gradient norms over time"
    if not samples.norms:
        return Section(title, "")
    middle, lowest, low, high, highest, maximum = samples.norms
    if not middle.finite:
        return Section(title, note_paragraph("The ledger has no finite norms: it was recorded with norms=False."))
    log = spans_decades([y for c in (lowest, maximum) for _, y in c.finite])
    around = [Band(lowest.points, highest.points), Band(low.points, high.points)]
    first, last = run.span  # of the log; the ledger may be ahead of it
    frame = XRange(min(first, middle.points[0][0]), max(last, middle.points[-1][0]))
    label = "Quantiles of per-sample gradient norms over updates"
    drawing = bands(around, [middle, maximum], frame, "norms", label, log)
    note = (
        f"The dark band holds 50 % of the samples and the light band 90 %, in each of {len(middle.points):,} intervals "
        "of the run. A maximum far above the bands means that a few samples have much larger gradients than all "
        "others; clipping acts on these. If the bands fall while the maximum stays, the model learns all but a few "
        "samples."
    )
    if samples.table is not None and "count" in samples.table.column_names:
        note += " Here, norms are those of the summed loss of a sample: they are not divided by its count."
    chart = figure("Per-sample gradient norms", drawing, ["median", "maximum"])
    return Section(title, beside(chart, note_paragraph(note)))
