"""Sections about gradients: "Gradient norms over time" of the samples, "Noise scale", "Importance
sampling" and "Layers"."""

from __future__ import annotations

from math import inf, isfinite, log, nan
from statistics import median
from typing import Any

from samplewise.report.charts import Band, XRange, bands, lines, spans_decades
from samplewise.report.html import Section, aligned, beside, figure, note_paragraph, table, text
from samplewise.report.run_log import Curve, RunLog, curve, points
from samplewise.report.samples import Samples

FAR_RATIO = 4.0  # ratio of batch size and noise scale from which the text recommends another batch size
MAX_LAYERS = 12  # layers in the chart


def norms(run: RunLog, samples: Samples) -> Section:
    """Section "Gradient norms over time": distribution of per-sample gradient norms."""
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


# --- noise scale ------------------------------------------------------------------------------------------------------


def noise(run: RunLog) -> Section:
    """Section "Noise scale": gradient noise scale compared with the batch size."""
    if not run.noise:
        return Section("Noise scale", "")
    scale = _positive(curve(run.noise, "scale", "noise scale"))
    batch = _positive(curve(run.noise, "batch", "batch size"))
    unknown = len(scale.points) - len(scale.finite)
    unknown_note = f"At {unknown:,} of {len(scale.points):,} log lines it could not be estimated." if unknown else ""
    if not scale.finite:
        return Section("Noise scale", note_paragraph(f"The noise scale is not known. {unknown_note}"))
    curves = [scale, batch] if batch.finite else [scale]
    drawing = lines(curves, XRange(*run.span), "noise", "Noise scale and batch size over updates", log=True)
    chart = figure("Noise scale, in samples", drawing, [c.name for c in curves])
    explanation = f"<p>{text(_meaning(scale, batch))}</p>"
    if unknown_note:
        explanation += note_paragraph(unknown_note)
    return Section("Noise scale", beside(chart, explanation))


def importance(run: RunLog) -> Section:
    """Section "Importance sampling": variance of the draws compared with that of uniform ones."""
    ratios = _positive(curve(run.importance, "variance_ratio", "variance ratio"))
    if not ratios.finite:
        return Section("Importance sampling", "")
    drawing = lines([ratios], XRange(*run.span), "importance", "Variance ratio over updates")
    note = (
        "Mean square of the weighted gradients of drawn samples, divided by that of uniform sampling. Below 1 "
        "importance sampling reduces the variance of updates; above 1 it increases it: use a larger floor, or uniform "
        "sampling."
    )
    chart = figure("Variance relative to uniform sampling", drawing, [ratios.name])
    return Section("Importance sampling", beside(chart, note_paragraph(note)))


def _positive(estimates: Curve) -> Curve:
    """The curve with NaN in place of non-positive and infinite estimates, which carry no information."""
    return estimates._replace(points=[(x, y if y > 0 and isfinite(y) else nan) for x, y in estimates.points])


def _meaning(scales: Curve, batches: Curve) -> str:
    """Explanation of the noise scale for the given batch size."""
    scale = median(value for _, value in scales.finite[len(scales.finite) // 2 :])
    estimate = f"The noise scale is about {_round(scale)} samples (median of the second half of the run)"
    if not batches.finite:
        return f"{estimate}. The batch size is not known."
    batch = median(value for _, value in batches.finite[len(batches.finite) // 2 :])
    if batch * FAR_RATIO < scale:
        return (
            f"{estimate}. The batch size {_round(batch)} is far below it: the gradient is mostly noise, and a larger "
            "batch would need almost proportionally fewer updates."
        )
    if batch > FAR_RATIO * scale:
        return (
            f"{estimate}. The batch size {_round(batch)} is far above it: the gradient has little noise, and a smaller "
            "batch would make about the same progress per update at a lower cost."
        )
    return (
        f"{estimate}. The batch size {_round(batch)} is near it, which balances training time and number of samples "
        "well."
    )


def _round(value: float) -> str:
    """Number with two significant digits; integers, such as batch sizes, are not rounded."""
    return f"{value:,.0f}" if value.is_integer() else f"{float(f'{value:.2g}'):,g}"


# --- layers -----------------------------------------------------------------------------------------------------------


def layers(run: RunLog) -> Section:
    """Section "Layers": gradient norm of each layer."""
    norms_of_layers: dict[str, list[tuple[Any, Any]]] = {}  # in the order of the model
    for line in run.layers:
        norms = line.get("norms")
        for name, norm in norms.items() if isinstance(norms, dict) else ():
            norms_of_layers.setdefault(name, []).append((line.get("update"), norm))
    all_curves = [Curve(name, points(pairs)) for name, pairs in norms_of_layers.items()]
    all_curves = [c for c in all_curves if c.points]
    if not all_curves:
        return Section("Layers", "")
    curves = select_layers(all_curves)
    if not any(c.finite for c in curves):
        return Section("Layers", note_paragraph("No layer has a finite gradient norm."))
    values = [value for c in curves for _, value in c.finite]
    drawing = lines(
        curves, XRange(*run.span), "layers", "Gradient norm of each layer over updates", spans_decades(values)
    )
    left_out = len(all_curves) - len(curves)
    left_out_note = (
        f"{left_out:,} of {len(all_curves):,} layers are left out. The chart shows the layers with the largest norms "
        "and those whose norms changed the most."
    )
    chart = figure("Gradient norm of each layer", drawing, [c.name for c in curves])
    return Section("Layers", beside(chart, _table(curves) + (note_paragraph(left_out_note) if left_out else "")))


def select_layers(curves: list[Curve], limit: int = MAX_LAYERS) -> list[Curve]:
    """At most `limit` curves in their order, chosen alternately by largest norm and by largest change."""
    if len(curves) <= limit:
        return curves
    largest = sorted(curves, key=_size, reverse=True)
    changed = sorted(curves, key=_change, reverse=True)
    ranked = dict.fromkeys(c.name for pair in zip(largest, changed, strict=True) for c in pair)
    names = set(list(ranked)[:limit])
    return [c for c in curves if c.name in names]


def _size(layer_curve: Curve) -> float:
    return max((value for _, value in layer_curve.finite), default=inf)


def _change(layer_curve: Curve) -> float:
    """Log ratio of largest and smallest norm; infinite if a norm was ever non-finite."""
    positive = [value for _, value in layer_curve.points if value > 0 and isfinite(value)]
    if len(layer_curve.finite) < len(layer_curve.points) or not positive:
        return inf
    return log(max(positive) / min(positive))


def _table(curves: list[Curve]) -> str:
    values = [[value for _, value in c.finite] or [float("nan")] for c in curves]
    summary = {
        "first": [v[0] for v in values],
        "last": [v[-1] for v in values],
        "lowest": [min(v) for v in values],
        "highest": [max(v) for v in values],
    }
    numbers = [aligned(column) for column in summary.values()]
    rows = [(c.name, *row) for c, row in zip(curves, zip(*numbers, strict=True), strict=True)]
    return table(("layer", *summary), rows, text_columns=1)
