"""Section "Noise scale": gradient noise scale compared with the batch size."""

from __future__ import annotations

from math import isfinite, nan
from statistics import median

from samplewise.report.charts import XRange, lines
from samplewise.report.html import Section, beside, figure, note_paragraph, text
from samplewise.report.run_log import Curve, RunLog, curve

FAR_RATIO = 4.0  # ratio of batch size and noise scale from which the text recommends another batch size


def noise(run: RunLog) -> Section:
    if not run.noise:
        return Section("Noise scale", "")
    scale = _positive(curve(run.noise, "scale", "noise scale"))
    batch = _positive(curve(run.noise, "batch", "batch size"))
    unknown = len(scale.points) - len(scale.finite)
    unknown_note = f"At {unknown:,} of {len(scale.points):,} log lines it could not be estimated." if unknown else ""
    if not scale.finite:
        return Section("Noise scale", note_paragraph(f"The noise scale is not known. {unknown_note}"))
    drawn = [scale, batch] if batch.finite else [scale]
    drawing = lines(drawn, XRange(*run.span), "noise", "Noise scale and batch size over updates", log=True)
    chart = figure("Noise scale, in samples", drawing, [c.name for c in drawn])
    explanation = f"<p>{text(_meaning(drawn))}</p>"
    if unknown_note:
        explanation += note_paragraph(unknown_note)
    return Section("Noise scale", beside(chart, explanation))


def _positive(estimates: Curve) -> Curve:
    """The curve with NaN in place of non-positive and infinite estimates, which carry no information."""
    return estimates._replace(points=[(x, y if y > 0 and isfinite(y) else nan) for x, y in estimates.points])


def _meaning(drawn: list[Curve]) -> str:
    """Explanation of the noise scale for the given batch size."""
    second_half = [value for _, value in drawn[0].finite][len(drawn[0].finite) // 2 :]
    scale = median(second_half)
    estimate = f"The noise scale is about {_round(scale)} samples (median of the second half of the run)"
    if len(drawn) < 2:
        return f"{estimate}. The batch size is not known."
    batch = median(value for _, value in drawn[1].finite)
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
