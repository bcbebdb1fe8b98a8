"""Section "Time and memory": time per update, its phases, and peak memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from samplewise.report.charts import Frame, shares
from samplewise.report.html import Section, aligned, columns, figure, table
from samplewise.report.run import Curve, Line, RunLog, curve, is_number
from samplewise.report.training import drawn

STRETCHES = 100  # intervals of the run in the chart of phases
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class Spent(NamedTuple):
    """Time between two lines of the log."""

    update: float  # at the end
    updates: float  # number of updates
    seconds: dict[str, float]  # by phase


def cost(run: RunLog) -> Section:
    spent = _spent(run.train)
    frame = Frame(*run.span)
    timed = [{"update": s.update, "ms": 1e3 * sum(s.seconds.values()) / s.updates} for s in spent]
    figures = []
    if timed:
        figures.append(drawn("time", "Milliseconds per update", [curve(timed, "ms")], frame))
    phases = list(dict.fromkeys(name for s in spent for name in s.seconds if name))
    if phases:
        parts = _parts(spent, phases)
        drawing = shares(parts, frame, "phases", "Share of time of each phase over updates")
        figures.append(figure("Share of time by phase", drawing, phases if len(phases) > 1 else ()))
    memory = curve(run.train, "memory")
    if memory.finite:
        unit = next((u for u, size in UNITS.items() if max(y for _, y in memory.finite) >= size), "KiB")
        scaled = memory._replace(points=[(x, y / UNITS[unit]) for x, y in memory.points])
        figures.append(drawn("memory", f"Peak memory so far, {unit}", [scaled], frame))
    return Section("Time and memory", columns("".join(figures)) + (_table(spent, phases) if phases else ""))


def _spent(train: list[Line]) -> list[Spent]:
    """Time of each train line: by phase if the line has phases, otherwise its seconds under the name ""."""
    found = []
    before = 0.0
    for line in train:
        update = line.get("update")
        if not is_number(update) or not update > before:
            continue
        phases: Any = line.get("phases")
        named = {k: v for k, v in phases.items() if _is_time(v)} if isinstance(phases, dict) else {}
        seconds = named or ({"": line["seconds"]} if _is_time(line.get("seconds")) else {})
        if seconds:
            found.append(Spent(float(update), update - before, seconds))
        before = float(update)
    return found


def _is_time(value: object) -> bool:
    return is_number(value) and 0 <= value < float("inf")


def _parts(spent: list[Spent], phases: list[str]) -> list[Curve]:
    """Seconds of each phase, summed over intervals of the run."""
    stretches = min(len(spent), STRETCHES)
    edges = [k * len(spent) // stretches for k in range(stretches + 1)]
    pieces = [spent[start:end] for start, end in pairwise(edges)]
    begin = spent[0].update - spent[0].updates
    places = [begin, *(piece[-1].update for piece in pieces)]
    sums = [{p: sum(s.seconds.get(p, 0.0) for s in piece) for p in phases} for piece in [pieces[0], *pieces]]
    return [Curve(p, [(x, total[p]) for x, total in zip(places, sums, strict=True)]) for p in phases]


def _table(spent: list[Spent], phases: list[str]) -> str:
    known = [s for s in spent if "" not in s.seconds]
    updates = sum(s.updates for s in known)
    totals = {p: sum(s.seconds.get(p, 0.0) for s in known) for p in phases}
    whole = sum(totals.values())
    per_update = aligned([1e3 * t / updates for t in (*totals.values(), whole)])
    seconds = aligned([*totals.values(), whole])
    percent = [f"{100 * t / whole if whole else 0:.1f} %" for t in (*totals.values(), whole)]
    rows = list(zip((*phases, "all"), per_update, percent, seconds, strict=True))
    return table(("phase", "ms per update", "share", "total seconds"), rows, words=1)
