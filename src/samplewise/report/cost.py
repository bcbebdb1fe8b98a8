"""Section "Time and memory": time per update, its phases, and peak memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from samplewise.report.charts import XRange, shares
from samplewise.report.html import Section, aligned, columns, figure, table
from samplewise.report.run_log import Curve, Line, RunLog, curve, is_number
from samplewise.report.training import curve_figure

INTERVALS = 100  # intervals of the run in the chart of phases
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class TimeInterval(NamedTuple):
    """Time between two lines of the log."""

    update: float  # at the end
    updates: float  # number of updates
    seconds: dict[str, float]  # by phase


def cost(run: RunLog) -> Section:
    intervals = _time_intervals(run.train)
    frame = XRange(*run.span)
    timed = [{"update": s.update, "ms": 1e3 * sum(s.seconds.values()) / s.updates} for s in intervals]
    figures = []
    if timed:
        figures.append(curve_figure("time", "Milliseconds per update", [curve(timed, "ms")], frame))
    phases = list(dict.fromkeys(name for s in intervals for name in s.seconds if name))
    if phases:
        drawing = shares(_phase_curves(intervals, phases), frame, "phases", "Share of time of each phase over updates")
        figures.append(figure("Share of time by phase", drawing, phases if len(phases) > 1 else ()))
    memory = curve(run.train, "memory")
    if memory.finite:
        figures.append(_memory_figure(memory, frame))
    content = columns("".join(figures))
    if phases:
        content += _table(intervals, phases)
    return Section("Time and memory", content)


def _memory_figure(memory: Curve, frame: XRange) -> str:
    peak = max(value for _, value in memory.finite)
    unit = next((name for name, size in UNITS.items() if peak >= size), "KiB")
    scaled = memory._replace(points=[(x, y / UNITS[unit]) for x, y in memory.points])
    return curve_figure("memory", f"Peak memory so far, {unit}", [scaled], frame)


def _time_intervals(train: list[Line]) -> list[TimeInterval]:
    """Time of each train line: by phase if the line has phases, otherwise its seconds under the name ""."""
    intervals = []
    previous = 0.0
    for line in train:
        update = line.get("update")
        if not is_number(update) or not update > previous:
            continue
        seconds = _seconds(line)
        if seconds:
            intervals.append(TimeInterval(float(update), update - previous, seconds))
        previous = float(update)
    return intervals


def _seconds(line: Line) -> dict[str, float]:
    phases: Any = line.get("phases")
    if isinstance(phases, dict):
        valid = {name: seconds for name, seconds in phases.items() if _is_time(seconds)}
        if valid:
            return valid
    return {"": line["seconds"]} if _is_time(line.get("seconds")) else {}


def _is_time(value: object) -> bool:
    return is_number(value) and 0 <= value < float("inf")


def _phase_curves(intervals: list[TimeInterval], phases: list[str]) -> list[Curve]:
    """Seconds of each phase, summed over intervals of the run."""
    count = min(len(intervals), INTERVALS)
    edges = [k * len(intervals) // count for k in range(count + 1)]
    groups = [intervals[start:end] for start, end in pairwise(edges)]
    start = intervals[0].update - intervals[0].updates
    updates = [start, *(group[-1].update for group in groups)]
    sums = [{p: sum(s.seconds.get(p, 0.0) for s in group) for p in phases} for group in [groups[0], *groups]]
    return [Curve(p, [(x, total[p]) for x, total in zip(updates, sums, strict=True)]) for p in phases]


def _table(intervals: list[TimeInterval], phases: list[str]) -> str:
    with_phases = [s for s in intervals if "" not in s.seconds]
    updates = sum(s.updates for s in with_phases)
    totals = {p: sum(s.seconds.get(p, 0.0) for s in with_phases) for p in phases}
    total = sum(totals.values())
    per_update = aligned([1e3 * t / updates for t in (*totals.values(), total)])
    seconds = aligned([*totals.values(), total])
    percent = [f"{100 * t / total if total else 0:.1f} %" for t in (*totals.values(), total)]
    rows = list(zip((*phases, "all"), per_update, percent, seconds, strict=True))
    return table(("phase", "ms per update", "share", "total seconds"), rows, text_columns=1)
