"""The gradient noise scale beside the batch size that was used."""

from __future__ import annotations

from math import isfinite, nan
from statistics import median

from samplewise.report.charts import Frame, lines
from samplewise.report.html import Section, beside, figure, quiet, text
from samplewise.report.run import Curve, Run, curve

FAR = 4.0  # times larger or smaller


def noise(run: Run) -> Section:
    if not run.noise:
        return Section("Noise scale", "")
    scale, batch = _positive(curve(run.noise, "scale", "noise scale")), curve(run.noise, "batch", "batch size")
    unknown = len(scale.points) - len(scale.finite)
    said = f"At {unknown:,} of {len(scale.points):,} places it could not be estimated." if unknown else ""
    if not scale.finite:
        return Section("Noise scale", quiet(f"The noise scale is not known. {said}"))
    drawn = [scale, _positive(batch)] if _positive(batch).finite else [scale]
    drawing = lines(drawn, Frame(*run.span), "noise", "Noise scale and batch size against updates", log=True)
    chart = figure("Noise scale, in samples", drawing, [c.name for c in drawn])
    return Section("Noise scale", beside(chart, f"<p>{text(_meaning(drawn))}</p>{quiet(said) if said else ''}"))


def _positive(found: Curve) -> Curve:
    """What is not positive is an estimate that tells nothing."""
    return found._replace(points=[(x, y if y > 0 and isfinite(y) else nan) for x, y in found.points])


def _meaning(drawn: list[Curve]) -> str:
    late = [value for _, value in drawn[0].finite][len(drawn[0].finite) // 2 :]
    scale = median(late)
    about = f"The noise scale is about {_round(scale)} samples, the median of the later half"
    if len(drawn) < 2:
        return f"{about}; the batch size used is not known."
    batch = median(value for _, value in drawn[1].finite)
    if batch * FAR < scale:
        return (
            f"{about}: the batch of {_round(batch)} is far below it. Its gradient is mostly noise, and a larger batch "
            "would need almost proportionally fewer updates."
        )
    if batch > FAR * scale:
        return (
            f"{about}: the batch of {_round(batch)} is far above it. Its gradient is hardly noisy, and a smaller batch "
            "would make about as much of each update at a lower price."
        )
    return (
        f"{about}: the batch of {_round(batch)} is near it, where time and the number of samples are in a fair balance."
    )


def _round(value: float) -> str:
    """To two digits, but a whole number as it is: it is a batch size."""
    return f"{value:,.0f}" if value.is_integer() else f"{float(f'{value:.2g}'):,g}"
