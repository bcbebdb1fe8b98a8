"""Sections about the course of a run: "Curves", "Time and memory", "Best values", "Epochs", "Skipped updates" and
"Quarantine".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import isfinite
from typing import Any, NamedTuple

from samplewise.core.files import QUARANTINE_FILE, read_json_lines
from samplewise.core.text import plural
from samplewise.report.charts import MAX_POINTS, XRange, lines, shares
from samplewise.report.html import Section, aligned, columns, figure, note_paragraph, number, shortened, table, text
from samplewise.report.previews import Previews, as_html
from samplewise.report.run_log import Curve, Line, RunLog, curve, is_number

LOWER_IS_BETTER = set("loss error err mse rmse mae nll ce bce perplexity ppl bpb wer cer fid brier ece regret".split())
HIGHER_IS_BETTER = set(
    "accuracy acc top1 top5 f1 auc auroc precision recall iou miou dice bleu psnr ssim r2 map score reward".split()
)
MAX_CHARTS = 60
MAX_FULL_CHARTS = 20  # with more charts, each has fewer points
MAX_EPOCHS = 200  # rows of the table
INTERVALS = 100  # intervals of the run in the chart of phases
MEMORY_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
Charts = dict[str, list[Curve]]  # by title


def state(run: RunLog) -> str:
    """Sentence about the end of the run."""
    if run.end:
        return f"Ended at update {run.reached('update'):,}: {run.end.get('reason', 'no reason given')}"
    if run.lines:
        return f"Not finished: the log ends at update {run.reached('update'):,} without an end line"
    if run.ledger_only:
        return "Ledger of a training loop without a log of samplewise: curves, times and settings are not known"
    return "Nothing logged yet"


def charts(run: RunLog) -> Charts:
    """Charts of the numbers in the log, by title; numbers without any value have no chart."""
    metrics = {f"Validation: {name}": [curve(run.validation, name, f"validation {name}")] for name in run.metrics()}
    charts = {
        "Train loss": [curve(run.train, "loss", "train loss")],
        **metrics,
        "Learning rate": run.learning_rates(),
        "Samples per update": [curve(run.train, "samples_per_update", "samples per update")],
        "Samples per second": [curve(run.train, "samples_per_second", "samples per second")],
        "Samples per second, computing only": [curve(run.train, "compute_samples_per_second", "samples per second")],
    }
    charts |= {name: [curve(run.train, name)] for name in run.other_numbers() if name not in charts}
    return {title: curves for title, curves in charts.items() if any(c.points for c in curves)}


def warnings(charts: Charts) -> list[str]:
    """Warnings about curves with non-finite values."""
    messages = []
    for title, curves in charts.items():
        for chart_curve in curves:
            name = f"{title}, {chart_curve.name}" if len(curves) > 1 else title
            count = len(chart_curve.points)
            non_finite = count - len(chart_curve.finite)
            if non_finite:
                messages.append(
                    f"{name}: {non_finite:,} of {count:,} values are NaN or infinite and left out of the curve."
                )
    return messages


def curves(run: RunLog, charts: Charts) -> Section:
    validation_note = "" if run.metrics() else note_paragraph("This run has no validation.")
    content = figures(charts, run.span)
    return Section("Curves", content + validation_note if content else note_paragraph("No data to draw yet."))


def figures(charts: Charts, span: tuple[float, float]) -> str:
    """HTML of at most 60 charts."""
    selected = list(charts.items())[:MAX_CHARTS]
    frame = XRange(*span, points=MAX_POINTS * min(MAX_FULL_CHARTS, len(selected)) // max(1, len(selected)))
    left_out_note = (
        f"{len(charts) - len(selected):,} more numbers of the log are left out: at most {MAX_CHARTS} are drawn."
    )
    content = columns("".join(curve_figure(f"chart{k}", *chart, frame) for k, chart in enumerate(selected)))
    return content + (note_paragraph(left_out_note) if len(charts) > len(selected) else "")


def curve_figure(prefix: str, title: str, curves: Sequence[Curve], frame: XRange, log: bool = False) -> str:
    """Figure with curves over updates."""
    if not any(curve.finite for curve in curves):
        return figure(title, note_paragraph("No finite values."))
    drawing = lines(curves, frame, prefix, f"{text(title)} over updates", log)
    return figure(title, drawing, [curve.name for curve in curves])


# --- time and memory --------------------------------------------------------------------------------------------------


class TimeInterval(NamedTuple):
    """Time between two lines of the log."""

    update: float  # at the end
    updates: float  # number of updates
    seconds: dict[str, float]  # by phase


def cost(run: RunLog) -> Section:
    """Section "Time and memory": time per update, its phases, and peak memory."""
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
        peak = max(value for _, value in memory.finite)
        unit = next((name for name, size in MEMORY_UNITS.items() if peak >= size), "KiB")
        scaled = memory._replace(points=[(x, y / MEMORY_UNITS[unit]) for x, y in memory.points])
        figures.append(curve_figure("memory", f"Peak memory so far, {unit}", [scaled], frame))
    content = columns("".join(figures))
    if phases:
        content += _phase_table(intervals, phases)
    return Section("Time and memory", content)


def _time_intervals(train: list[Line]) -> list[TimeInterval]:
    """Time of each train line: by phase if the line has phases, otherwise its seconds under the name ""."""
    intervals = []
    previous = 0.0
    for line in train:
        update = line.get("update")
        if not is_number(update) or not update > previous:
            continue
        phases: Any = line.get("phases")
        seconds = {name: s for name, s in phases.items() if _is_time(s)} if isinstance(phases, dict) else {}
        if not seconds and _is_time(line.get("seconds")):
            seconds = {"": line["seconds"]}
        if seconds:
            intervals.append(TimeInterval(float(update), update - previous, seconds))
        previous = float(update)
    return intervals


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


def _phase_table(intervals: list[TimeInterval], phases: list[str]) -> str:
    with_phases = [s for s in intervals if "" not in s.seconds]
    updates = sum(s.updates for s in with_phases)
    totals = {p: sum(s.seconds.get(p, 0.0) for s in with_phases) for p in phases}
    total = sum(totals.values())
    per_update = aligned([1e3 * t / updates for t in (*totals.values(), total)])
    seconds = aligned([*totals.values(), total])
    percent = [f"{100 * t / total if total else 0:.1f} %" for t in (*totals.values(), total)]
    rows = list(zip((*phases, "all"), per_update, percent, seconds, strict=True))
    return table(("phase", "ms per update", "share", "total seconds"), rows, text_columns=1)


# --- best values ------------------------------------------------------------------------------------------------------


def measured_curves(run: RunLog) -> list[Curve]:
    """Curves that have a best value: train loss and validation metrics."""
    train = curve(run.train, "loss", "train loss")
    return [train, *(curve(run.validation, name, f"validation {name}") for name in run.metrics())]


def best(run: RunLog) -> Section:
    """Lowest or highest value of each metric, with its update; both if the name does not show which is better."""
    rows = []
    unclear = False
    for values in measured_curves(run):
        extremes = better_extremes(values.name)
        unclear = unclear or len(extremes) > 1
        for extreme_name in extremes:
            for update, value in extreme(values, extreme_name):
                last = number(values.points[-1][1])
                rows.append((values.name, extreme_name, number(value), f"{update:,.0f}", last))
    if not rows:
        return Section("Best values", "")
    content = table(("", "", "value", "at update", "last"), rows, text_columns=2)
    if unclear:
        content += note_paragraph(
            "If the name of a metric does not show whether lower or higher is better, both are listed."
        )
    return Section("Best values", content)


def better_extremes(name: str) -> Sequence[str]:
    """("lowest",) or ("highest",), whichever is better by the name of a metric; both if the name does not show it."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("_", " ")))
    lower = bool(words & LOWER_IS_BETTER)
    higher = bool(words & HIGHER_IS_BETTER)
    if lower == higher:
        return ("lowest", "highest")
    return ("lowest",) if lower else ("highest",)


def extreme(values: Curve, extreme_name: str) -> Sequence[tuple[float, float]]:
    """First point with the lowest or highest finite value, as a sequence of one; empty if there is none."""
    pick = min if extreme_name == "lowest" else max
    return [pick(values.finite, key=lambda point: point[1])] if values.finite else []


# --- epochs and skipped updates ---------------------------------------------------------------------------------------


def epochs(run: RunLog) -> Section:
    all_epochs = sorted(epoch for epoch in run.epochs if isfinite(epoch))
    epochs = all_epochs
    if len(all_epochs) > MAX_EPOCHS:  # evenly spaced, with the first and the last
        epochs = [all_epochs[k * (len(all_epochs) - 1) // (MAX_EPOCHS - 1)] for k in range(MAX_EPOCHS)]
    train = _last_of_epoch(run.train)
    validation = _last_of_epoch(run.validation)
    ends = _last_of_epoch(run.epoch)
    seconds: dict[Any, Line] = {}  # sum over the train lines, each of which counts from the previous one
    for line in run.train:
        if is_number(line.get("epoch")) and is_number(line.get("seconds")):
            so_far = seconds.get(line["epoch"], {"seconds": 0.0})
            seconds[line["epoch"]] = {"seconds": so_far["seconds"] + line["seconds"]}
    sources = [("last train loss", train, "loss"), ("epoch loss", ends, "loss")]
    sources += [(f"validation {name}", validation, name) for name in run.metrics()]
    sources += [("seconds", ends, "seconds"), ("train seconds", seconds, "seconds")]
    columns = [
        (title, [lines.get(epoch, {}).get(key) for epoch in epochs])
        for title, lines, key in sources
        if any(is_number(line.get(key)) for line in lines.values())
    ]
    rows = list(zip((f"{epoch:,}" for epoch in epochs), *(aligned(values) for _, values in columns), strict=True))
    if not rows:
        return Section("Epochs", "")
    content = table(("epoch", *(title for title, _ in columns)), rows, text_columns=0)
    if len(epochs) < len(all_epochs):
        content += note_paragraph(f"{len(epochs):,} of {len(all_epochs):,} epochs are shown.")
    return Section("Epochs", content)


def _last_of_epoch(lines: Iterable[Line]) -> dict[Any, Line]:
    return {line["epoch"]: line for line in lines if is_number(line.get("epoch"))}


def skipped(run: RunLog) -> Section:
    skipped_counts = [(update, count) for update, count in curve(run.train, "skipped").finite if count > 0]
    if not skipped_counts:
        return Section("Skipped updates", note_paragraph("None." if run.train else "Nothing logged yet."))
    return Section(
        "Skipped updates",
        f"<p>{sum(count for _, count in skipped_counts):,.0f} skipped because of NaN or infinity, "
        f"{run.reached('update'):,} made. First logged at update {skipped_counts[0][0]:,.0f}, "
        f"last at update {skipped_counts[-1][0]:,.0f}.</p>",
    )


# --- quarantine -------------------------------------------------------------------------------------------------------


MAX_ROWS = 100
MAX_CARDS = 24
BUDGET = 200_000  # characters of all previews of the section


def quarantine(run: RunLog) -> Section:
    """Table of the dropped samples, those that were dropped most often first, with previews of the first ones."""
    lines = read_json_lines(run.directory / QUARANTINE_FILE)
    if not lines:
        return Section("Quarantine", "")
    ordered = sorted(lines, key=_name)
    samples = sorted((list(group) for _, group in groupby(ordered, _name)), key=len, reverse=True)
    shown = samples[:MAX_ROWS]
    numbers = [aligned([visits[-1].get(name) for visits in shown]) for name in ("loss", "norm")]
    rows = [
        (
            shortened(_name(visits[0])),
            ", ".join(dict.fromkeys(str(line.get("reason")) for line in visits)),
            shortened(str(visits[-1].get("layer") or "")),
            f"{visits[0].get('update')}" + (f" to {visits[-1].get('update')}" if len(visits) > 1 else ""),
            f"{len(visits):,}",
            *values,
        )
        for visits, *values in zip(shown, *numbers, strict=True)
    ]
    head = ("sample", "reason", "largest gradient in", "updates", "times", "last loss", "last norm")
    note = (
        f"{plural(len(samples), 'sample')} got weight 0, {plural(len(lines), 'time')} in all: the norm of the gradient "
        "was far above those of earlier updates, or loss or gradient was NaN or infinite."
    )
    left_out = f" The {MAX_ROWS} that were dropped most often are listed." if len(samples) > MAX_ROWS else ""
    return Section(
        "Quarantine", note_paragraph(note + left_out) + table(head, rows, text_columns=4) + _cards(run, shown)
    )


def _name(line: Line) -> str:
    """Id of a sample; without ids, its place."""
    sample_id = line.get("id")
    return f"{line.get('position')} of update {line.get('update')}" if sample_id is None else str(sample_id)


def _cards(run: RunLog, samples: list[list[Line]]) -> str:
    entries = {_name(line): line["preview"] for visits in samples for line in visits if line.get("preview")}
    previews = Previews(entries)
    cards = ""
    for name, preview in previews.shown(list(entries)[:MAX_CARDS], BUDGET).items():
        label = previews.label(name)
        of_label = "" if label is None else f'<span class="label">label {text(label)}</span>'
        title = f"<strong>{text(shortened(name))}</strong>"
        cards += f'<li><div class="card">{as_html(preview)}{title}{of_label}</div></li>'
    run.warnings.extend(previews.warnings)
    return f'<ul class="gallery">{cards}</ul>' if cards else ""
