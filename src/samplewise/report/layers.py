"""Section "Layers": gradient norm of each layer."""

from __future__ import annotations

from math import inf, isfinite, log
from typing import Any

from samplewise.report.charts import Frame, lines, spans_decades
from samplewise.report.html import Section, aligned, beside, figure, quiet, table
from samplewise.report.run import Curve, RunLog, points

MOST = 12  # layers in the chart


def layers(run: RunLog) -> Section:
    curves = _curves(run)
    if not curves:
        return Section("Layers", "")
    shown = telling(curves)
    if not any(c.finite for c in shown):
        return Section("Layers", quiet("No layer has a finite gradient norm."))
    values = [value for c in shown for _, value in c.finite]
    drawing = lines(
        shown, Frame(*run.span), "layers", "Gradient norm of each layer over updates", spans_decades(values)
    )
    left = len(curves) - len(shown)
    note = (
        f"{left:,} of {len(curves):,} layers are left out. The chart shows the layers with the largest norms and those "
        "whose norms changed the most."
    )
    chart = figure("Gradient norm of each layer", drawing, [c.name for c in shown])
    return Section("Layers", beside(chart, _table(shown) + (quiet(note) if left else "")))


def _curves(run: RunLog) -> list[Curve]:
    """One curve per layer, in the order of the model."""
    values: dict[str, list[tuple[Any, Any]]] = {}
    for line in run.layers:
        norms = line.get("norms")
        for name, norm in norms.items() if isinstance(norms, dict) else ():
            values.setdefault(name, []).append((line.get("update"), norm))
    curves = [Curve(name, points(found)) for name, found in values.items()]
    return [found for found in curves if found.points]


def telling(curves: list[Curve], most: int = MOST) -> list[Curve]:
    """At most `most` curves in their order, chosen alternately by largest norm and by largest change."""
    if len(curves) <= most:
        return curves
    largest = sorted(curves, key=_size, reverse=True)
    changed = sorted(curves, key=_change, reverse=True)
    chosen = dict.fromkeys(c.name for pair in zip(largest, changed, strict=True) for c in pair)
    kept = set(list(chosen)[:most])
    return [c for c in curves if c.name in kept]


def _size(found: Curve) -> float:
    return max((value for _, value in found.finite), default=inf)


def _change(found: Curve) -> float:
    """Log ratio of largest and smallest norm; infinite if a norm was ever non-finite."""
    positive = [value for _, value in found.points if value > 0 and isfinite(value)]
    return log(max(positive) / min(positive)) if len(found.finite) == len(found.points) and positive else inf


def _table(shown: list[Curve]) -> str:
    values = [[value for _, value in c.finite] or [float("nan")] for c in shown]
    told = {
        "first": [v[0] for v in values],
        "last": [v[-1] for v in values],
        "lowest": [min(v) for v in values],
        "highest": [max(v) for v in values],
    }
    numbers = [aligned(column) for column in told.values()]
    rows = [(c.name, *row) for c, row in zip(shown, zip(*numbers, strict=True), strict=True)]
    return table(("layer", *told), rows, words=1)
