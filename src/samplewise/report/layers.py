"""Section "Layers": gradient norm of each layer."""

from __future__ import annotations

from math import inf, isfinite, log
from typing import Any

from samplewise.report.charts import XRange, lines, spans_decades
from samplewise.report.html import Section, aligned, beside, figure, note_paragraph, table
from samplewise.report.run_log import Curve, RunLog, points

MAX_LAYERS = 12  # layers in the chart


def layers(run: RunLog) -> Section:
    curves = _curves(run)
    if not curves:
        return Section("Layers", "")
    shown = select_layers(curves)
    if not any(c.finite for c in shown):
        return Section("Layers", note_paragraph("No layer has a finite gradient norm."))
    values = [value for c in shown for _, value in c.finite]
    drawing = lines(
        shown, XRange(*run.span), "layers", "Gradient norm of each layer over updates", spans_decades(values)
    )
    left_out = len(curves) - len(shown)
    left_out_note = (
        f"{left_out:,} of {len(curves):,} layers are left out. The chart shows the layers with the largest norms and "
        "those whose norms changed the most."
    )
    chart = figure("Gradient norm of each layer", drawing, [c.name for c in shown])
    return Section("Layers", beside(chart, _table(shown) + (note_paragraph(left_out_note) if left_out else "")))


def _curves(run: RunLog) -> list[Curve]:
    """One curve per layer, in the order of the model."""
    values: dict[str, list[tuple[Any, Any]]] = {}
    for line in run.layers:
        norms = line.get("norms")
        for name, norm in norms.items() if isinstance(norms, dict) else ():
            values.setdefault(name, []).append((line.get("update"), norm))
    curves = [Curve(name, points(values_of_layer)) for name, values_of_layer in values.items()]
    return [curve for curve in curves if curve.points]


def select_layers(curves: list[Curve], limit: int = MAX_LAYERS) -> list[Curve]:
    """At most `limit` curves in their order, chosen alternately by largest norm and by largest change."""
    if len(curves) <= limit:
        return curves
    largest = sorted(curves, key=_size, reverse=True)
    changed = sorted(curves, key=_change, reverse=True)
    chosen = dict.fromkeys(c.name for pair in zip(largest, changed, strict=True) for c in pair)
    kept = set(list(chosen)[:limit])
    return [c for c in curves if c.name in kept]


def _size(layer_curve: Curve) -> float:
    return max((value for _, value in layer_curve.finite), default=inf)


def _change(layer_curve: Curve) -> float:
    """Log ratio of largest and smallest norm; infinite if a norm was ever non-finite."""
    positive = [value for _, value in layer_curve.points if value > 0 and isfinite(value)]
    if len(layer_curve.finite) < len(layer_curve.points) or not positive:
        return inf
    return log(max(positive) / min(positive))


def _table(shown: list[Curve]) -> str:
    values = [[value for _, value in c.finite] or [float("nan")] for c in shown]
    summary = {
        "first": [v[0] for v in values],
        "last": [v[-1] for v in values],
        "lowest": [min(v) for v in values],
        "highest": [max(v) for v in values],
    }
    numbers = [aligned(column) for column in summary.values()]
    rows = [(c.name, *row) for c, row in zip(shown, zip(*numbers, strict=True), strict=True)]
    return table(("layer", *summary), rows, text_columns=1)
