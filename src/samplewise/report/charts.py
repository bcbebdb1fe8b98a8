"""Charts as SVG inside the page: no file of their own, and the colours of the page, light or dark.

No words of the user stand in a drawing: titles and names of curves are beside it, as text of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import pairwise
from math import copysign, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from samplewise.report.html import COLOURS
from samplewise.report.run import Curve, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1000  # of all curves of a chart
FEWEST_POINTS = 200  # of one of them, however many there are
FEW_POINTS = 40  # so few are marked one by one
LARGEST = 1e300  # beyond, the margins of the axes overflow

# matplotlib knows no CSS: it draws with these, and what stands for each is put in afterwards.
INK, GRID = "#010203", "#040506"
LINES = tuple(f"#{7 + 3 * k:02x}{8 + 3 * k:02x}{9 + 3 * k:02x}" for k in range(COLOURS))
CSS = {INK: "var(--quiet)", GRID: "var(--rule)"} | {line: f"var(--line-{k})" for k, line in enumerate(LINES)}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters, in the fonts of the page
    "svg.hashsalt": "samplewise",  # the same run gives the same file
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
    """Between two curves of the same updates; the wider of two is drawn first."""

    low: list[Point]
    high: list[Point]


class Frame(NamedTuple):
    """What charts of a page share, so that what stands below each other happened together."""

    first: float
    last: float
    points: int = MOST_POINTS  # of a chart


def lines(curves: Sequence[Curve], frame: Frame, prefix: str, label: str, log: bool = False) -> str:
    """Curves as an `<svg>` element; `prefix` keeps its ids apart from those of the other charts of the page. `label` is
    for those who cannot see it, and escaped already.
    """
    return _svg(lambda axes: _plot(axes, curves, frame), frame, prefix, label, log)


def bands(around: Sequence[Band], curves: Sequence[Curve], frame: Frame, prefix: str, label: str, log: bool) -> str:
    """Bands in the colour of the first curve, and curves over them."""

    def paint(axes: Axes) -> None:
        for band in around:
            xs = [x for x, _ in band.low]
            axes.fill_between(xs, [y for _, y in band.low], [y for _, y in band.high], color=LINES[0], alpha=0.2, lw=0)
        _plot(axes, curves, frame)

    return _svg(paint, frame, prefix, label, log)


def shares(curves: Sequence[Curve], frame: Frame, prefix: str, label: str) -> str:
    """Curves of the same updates, as parts of a whole on top of each other."""

    def paint(axes: Axes) -> None:
        xs = [x for x, _ in curves[0].points]
        totals = [sum(values) or 1.0 for values in zip(*([y for _, y in c.points] for c in curves), strict=True)]
        parts = [[100 * y / total for (_, y), total in zip(c.points, totals, strict=True)] for c in curves]
        axes.stackplot(xs, parts, colors=[LINES[k % COLOURS] for k in range(len(curves))], alpha=0.75, step="pre", lw=0)
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:.0f} %")

    return _svg(paint, frame, prefix, label, log=False)


def spans_decades(values: Sequence[float], times: float = 100.0) -> bool:
    """Whether a logarithmic axis tells more."""
    found = [value for value in values if isfinite(value)]
    return bool(found) and min(found) > 0 and max(found) / min(found) >= times


def _svg(paint: Callable[[Axes], None], frame: Frame, prefix: str, label: str, log: bool) -> str:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the report needs matplotlib: pip install 'samplewise[report]'") from None
    out = StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # what the user has set for other figures is not meant for this one
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(4.7, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        paint(axes)
        _frame(axes, frame.first, frame.last)
        _logarithmic(axes) if log else _linear(axes)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # else it names its maker, with addresses
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _for_the_page(out.getvalue(), prefix, label)


def _plot(axes: Axes, curves: Sequence[Curve], frame: Frame) -> None:
    most = max(FEWEST_POINTS, frame.points // max(1, len(curves)))
    for k, curve in enumerate(curves):
        points = thin([(x, _drawable(y)) for x, y in curve.points], most)
        xs, ys = zip(*points, strict=True) if points else ((), ())
        # A few curves of one chart often coincide (learning rates): the later ones are thinner and lie above.
        width = (1.4 if len(points) <= 10 * FEW_POINTS else 0.9) + 0.6 * (len(curves) - 1 - k if len(curves) < 5 else 0)
        color, style = LINES[k % COLOURS], "-" if k < COLOURS else "--"
        dots = _marked(points)
        axes.plot(xs, ys, color=color, linewidth=width, linestyle=style)
        axes.plot([xs[d] for d in dots], [ys[d] for d in dots], color=color, linestyle="", marker="o", markersize=3)


def _frame(axes: Axes, first: float, last: float) -> None:
    margin = 0.02 * (last - first) or 1.0  # a run of one update has no width
    axes.set_xlim(first - margin, last + margin)
    axes.set_xlabel("update")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _linear(axes: Axes) -> None:
    """What never changes, as many a learning rate, is seen against zero."""
    low, high = float(axes.dataLim.y0), float(axes.dataLim.y1)
    if low == high:
        axes.set_ylim(min(0.0, 2 * low), max(0.0, 2 * high) if low else 1.0)
    axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _logarithmic(axes: Axes) -> None:
    """Wide enough for a number at the axis, whatever the values; what is not positive is not drawn."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = float(axes.dataLim.minposy) / 1.5, float(axes.dataLim.y1) * 1.5
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")


def _drawable(y: float) -> float:
    return (copysign(LARGEST, y) if abs(y) > LARGEST else y) if isfinite(y) else nan


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points that look like all of them: lowest and highest of each stretch, and one gap if it has any.

    Every n-th point would do for a smooth curve, but lose the one spike that somebody opens the report for.
    """
    if len(points) <= most:
        return points
    stretches = (most - 1) // 3
    edges = [k * len(points) // stretches for k in range(stretches + 1)]
    kept = {k for start, end in pairwise(edges) for k in _telling(points, range(start, end))}
    return [points[k] for k in sorted(kept | {len(points) - 1})]


def _telling(points: list[Point], stretch: range) -> Iterator[int]:
    finite = [k for k in stretch if isfinite(points[k][1])]
    if finite:
        yield min(finite, key=lambda k: points[k][1])
        yield max(finite, key=lambda k: points[k][1])
    if len(finite) < len(stretch):
        yield next(k for k in stretch if not isfinite(points[k][1]))


def _marked(points: list[Point]) -> list[int]:
    """Which points get a dot: all if they are few, else those between two gaps, where no line would show them."""
    there = [False, *(isfinite(y) for _, y in points), False]
    few = len(points) <= FEW_POINTS
    return [k for k in range(len(points)) if there[k + 1] and (few or not (there[k] or there[k + 2]))]


def _for_the_page(svg: str, prefix: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # it would style the whole page
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{prefix}">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = _smaller(svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for drawn, meant in CSS.items():
        svg = svg.replace(drawn, meant)
    return svg.replace(f'aria-label="{prefix}"', f'aria-label="{label}"', 1)  # last: a name may hold anything


def _smaller(svg: str) -> str:
    """Half the size, and it looks the same: paths to hundredths of a point, fonts as the page has them, no idle ids."""
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.[0-9]{2})[0-9]+", r"\1", path[0].replace("\n", "")), svg)
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    return re.sub(r'<g id="[^"]*"', "<g", svg)
