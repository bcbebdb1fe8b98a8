"""Section "Noise scale": gradient noise scale compared with the batch size."""

from __future__ import annotations

from math import isfinite, nan
from statistics import median

from samplewise.report.charts import Frame, lines
from samplewise.report.html import Section, beside, figure, quiet, text
from samplewise.report.run import Curve, RunLog, curve

FAR = 4.0  # ratio of batch size and noise scale from which the text recommends another batch size


def noise(run: RunLog) -> Section:
    if not run.noise:
        return Section("Noise scale", "")
    scale = _positive(curve(run.noise, "scale", "noise scale"))
    batch = _positive(curve(run.noise, "batch", "batch size"))
    unknown = len(scale.points) - len(scale.finite)
    said = f"At {unknown:,} of {len(scale.points):,} log lines it could not be estimated." if unknown else ""
    if not scale.finite:
        return Section("Noise scale", quiet(f"The noise scale is not known. {said}"))
    drawn = [scale, batch] if batch.finite else [scale]
    drawing = lines(drawn, Frame(*run.span), "noise", "Noise scale and batch size over updates", log=True)
    chart = figure("Noise scale, in samples", drawing, [c.name for c in drawn])
    return Section("Noise scale", beside(chart, f"<p>{text(_meaning(drawn))}</p>{quiet(said) if said else ''}"))


def _positive(found: Curve) -> Curve:
    """The curve with NaN in place of non-positive and infinite estimates, which carry no information."""
    return found._replace(points=[(x, y if y > 0 and isfinite(y) else nan) for x, y in found.points])


def _meaning(drawn: list[Curve]) -> str:
    """Explanation of the noise scale for the given batch size."""
    late = [value for _, value in drawn[0].finite][len(drawn[0].finite) // 2 :]
    scale = median(late)
    about = f"The noise scale is about {_round(scale)} samples (median of the second half of the run)"
    if len(drawn) < 2:
        return f"{about}. The batch size is not known."
    batch = median(value for _, value in drawn[1].finite)
    if batch * FAR < scale:
        return (
            f"{about}. The batch size {_round(batch)} is far below it: the gradient is mostly noise, and a larger "
            "batch would need almost proportionally fewer updates."
        )
    if batch > FAR * scale:
        return (
            f"{about}. The batch size {_round(batch)} is far above it: the gradient has little noise, and a smaller "
            "batch would make about the same progress per update at a lower cost."
        )
    return (
        f"{about}. The batch size {_round(batch)} is near it, which balances training time and number of samples well."
    )


def _round(value: float) -> str:
    """Number with two significant digits; integers, such as batch sizes, are not rounded."""
    return f"{value:,.0f}" if value.is_integer() else f"{float(f'{value:.2g}'):,g}"
