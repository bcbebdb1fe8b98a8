"""Charts as inline SVG, drawn by matplotlib, in the colors of the page, light or dark.

A chart contains no text of the user: titles and names of curves are HTML text beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import pairwise
from math import copysign, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from samplewise.report.html import COLORS
from samplewise.report.run_log import Curve, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 1000  # per chart, over all its curves
MIN_POINTS_PER_CURVE = 200  # per curve, regardless of the number of curves
DOTTED_POINTS = 40  # up to this number, each point is marked with a dot
MAX_VALUE = 1e300  # larger values overflow the margins of the axes

# matplotlib has no CSS variables: it draws with these placeholder colors, which are replaced in the SVG.
INK, GRID = "#010203", "#040506"
LINES = tuple(f"#{7 + 3 * k:02x}{8 + 3 * k:02x}{9 + 3 * k:02x}" for k in range(COLORS))
CSS = {INK: "var(--quiet)", GRID: "var(--rule)"} | {line: f"var(--line-{k})" for k, line in enumerate(LINES)}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the fonts of the page
    "svg.hashsalt": "samplewise",  # ids are reproducible: the same run gives the same file
    "font.size": 9.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


class Band(NamedTuple):
    """Area between two curves over the same updates. Of two bands, draw the wider one first."""

    low: list[Point]
    high: list[Point]


class XRange(NamedTuple):
    """Horizontal range of the charts of a page, shared so that the same update has the same position in each."""

    first: float  # update
    last: float  # update
    points: int = MAX_POINTS  # per chart


def lines(curves: Sequence[Curve], frame: XRange, prefix: str, label: str, log: bool = False) -> str:
    """Line chart as an `<svg>` element.

    prefix: makes the ids of the element unique within the page
    label: description for screen readers, already escaped
    log: logarithmic vertical axis; default linear
    """
    return _svg(lambda axes: _plot(axes, curves, frame), frame, prefix, label, log)


def bands(areas: Sequence[Band], curves: Sequence[Curve], frame: XRange, prefix: str, label: str, log: bool) -> str:
    """Line chart with bands behind the curves, in the color of the first curve."""

    def draw(axes: Axes) -> None:
        for band in areas:
            xs = [x for x, _ in band.low]
            axes.fill_between(xs, [y for _, y in band.low], [y for _, y in band.high], color=LINES[0], alpha=0.2, lw=0)
        _plot(axes, curves, frame)

    return _svg(draw, frame, prefix, label, log)


def shares(curves: Sequence[Curve], frame: XRange, prefix: str, label: str) -> str:
    """Stacked area chart of curves over the same updates, as percentages of their sum."""

    def draw(axes: Axes) -> None:
        xs = [x for x, _ in curves[0].points]
        totals = [sum(values) or 1.0 for values in zip(*([y for _, y in c.points] for c in curves), strict=True)]
        parts = [[100 * y / total for (_, y), total in zip(c.points, totals, strict=True)] for c in curves]
        axes.stackplot(xs, parts, colors=[LINES[k % COLORS] for k in range(len(curves))], alpha=0.75, step="pre", lw=0)
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:.0f} %")

    return _svg(draw, frame, prefix, label, log=False)


def spans_decades(values: Sequence[float], factor: float = 100.0) -> bool:
    """True if values are positive and span a factor of `factor`, so that a logarithmic axis is preferable."""
    finite = [value for value in values if isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= factor


def _svg(draw: Callable[[Axes], None], frame: XRange, prefix: str, label: str, log: bool) -> str:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the report needs matplotlib: pip install 'samplewise[report]'") from None
    buffer = StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's settings for other figures
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(4.7, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        margin = 0.02 * (frame.last - frame.first) or 1.0  # 1.0: the run has a single update
        axes.set_xlim(frame.first - margin, frame.last + margin)
        axes.set_xlabel("update")
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _logarithmic(axes) if log else _linear(axes)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # omit matplotlib's metadata and its URLs
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return _adapt_svg(buffer.getvalue(), prefix, label)


def _plot(axes: Axes, curves: Sequence[Curve], frame: XRange) -> None:
    limit = max(MIN_POINTS_PER_CURVE, frame.points // max(1, len(curves)))
    for k, curve in enumerate(curves):
        points = thin([(x, _drawable(y)) for x, y in curve.points], limit)
        xs, ys = zip(*points, strict=True) if points else ((), ())
        width = 1.4 if len(points) <= 10 * DOTTED_POINTS else 0.9
        if len(curves) < 5:  # curves such as learning rates often coincide: later ones are thinner and drawn on top
            width += 0.6 * (len(curves) - 1 - k)
        color = LINES[k % COLORS]
        style = "-" if k < COLORS else "--"
        dots = _dotted_points(points)
        axes.plot(xs, ys, color=color, linewidth=width, linestyle=style)
        axes.plot([xs[d] for d in dots], [ys[d] for d in dots], color=color, linestyle="", marker="o", markersize=3)


def _linear(axes: Axes) -> None:
    """Set up a linear vertical axis; for a constant curve, such as a learning rate, it includes zero."""
    low, high = float(axes.dataLim.y0), float(axes.dataLim.y1)
    if low == high:
        axes.set_ylim(min(0.0, 2 * low), max(0.0, 2 * high) if low else 1.0)
    axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _logarithmic(axes: Axes) -> None:
    """Set up a logarithmic vertical axis, wide enough for at least one tick; non-positive values are not drawn."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = float(axes.dataLim.minposy) / 1.5, float(axes.dataLim.y1) * 1.5
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")


def _drawable(y: float) -> float:
    if not isfinite(y):
        return nan
    return copysign(MAX_VALUE, y) if abs(y) > MAX_VALUE else y


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most `limit` points: minimum, maximum and one non-finite point of each interval.

    Taking every n-th point would lose single spikes.
    """
    if len(points) <= limit:
        return points
    intervals = (limit - 1) // 3
    edges = [k * len(points) // intervals for k in range(intervals + 1)]
    selected = {len(points) - 1}
    for interval in (range(start, end) for start, end in pairwise(edges)):
        finite = [k for k in interval if isfinite(points[k][1])]
        if finite:
            selected.add(min(finite, key=lambda k: points[k][1]))
            selected.add(max(finite, key=lambda k: points[k][1]))
        if len(finite) < len(interval):
            selected.add(next(k for k in interval if not isfinite(points[k][1])))
    return [points[k] for k in sorted(selected)]


def _dotted_points(points: list[Point]) -> list[int]:
    """Indices of points marked with a dot: all if few, otherwise those between two gaps, where there is no line."""
    is_finite = [False, *(isfinite(y) for _, y in points), False]
    dot_all = len(points) <= DOTTED_POINTS
    return [k for k in range(len(points)) if is_finite[k + 1] and (dot_all or not (is_finite[k] or is_finite[k + 2]))]


def _adapt_svg(svg: str, prefix: str, label: str) -> str:
    """The `<svg>` element of a file of matplotlib, with unique ids and the colors of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{prefix}">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    # Halve the size: round paths to hundredths of a point, remove font families and unused ids.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.[0-9]{2})[0-9]+", r"\1", path[0].replace("\n", "")), svg)
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for placeholder, css in CSS.items():
        svg = svg.replace(placeholder, css)
    return svg.replace(f'aria-label="{prefix}"', f'aria-label="{label}"', 1)  # last: a label may hold any text
