"""Sections "Curves", "Best values", "Epochs" and "Skipped updates"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from samplewise.report.charts import MOST_POINTS, Frame, lines
from samplewise.report.html import Section, aligned, columns, figure, number, quiet, table, text
from samplewise.report.run import Curve, Line, RunLog, curve, is_number

LOWER_IS_BETTER = set("loss error err mse rmse mae nll ce bce perplexity ppl bpb wer cer fid brier ece regret".split())
HIGHER_IS_BETTER = set(
    "accuracy acc top1 top5 f1 auc auroc precision recall iou miou dice bleu psnr ssim r2 map score reward".split()
)
MOST_CHARTS = 60
FULL_CHARTS = 20  # with more charts, each has fewer points
MOST_EPOCHS = 200  # rows of the table
Charts = dict[str, list[Curve]]  # by title


def state(run: RunLog) -> str:
    """Sentence about the end of the run."""
    if run.end:
        return f"Ended at update {run.reached('update'):,}: {run.end.get('reason', 'no reason given')}"
    if run.lines:
        return f"Not finished: the log ends at update {run.reached('update'):,} without an end line"
    return "Nothing logged yet"


def charts(run: RunLog) -> Charts:
    """Charts of the numbers in the log, by title; numbers without any value have no chart."""
    metrics = {f"Validation: {name}": [curve(run.validation, name, f"validation {name}")] for name in run.metrics()}
    found = {
        "Train loss": [curve(run.train, "loss", "train loss")],
        **metrics,
        "Learning rate": run.learning_rates(),
        "Samples per second": [curve(run.train, "samples_per_second", "samples per second")],
    }
    found |= {name: [curve(run.train, name)] for name in run.other_numbers() if name not in found}
    return {title: curves for title, curves in found.items() if any(drawn.points for drawn in curves)}


def warnings(found: Charts) -> list[str]:
    """Warnings about curves with non-finite values."""
    said = []
    for title, curves in found.items():
        for drawn in curves:
            name = f"{title}, {drawn.name}" if len(curves) > 1 else title
            said.append(not_finite(drawn._replace(name=name)))
    return [warning for warning in said if warning]


def not_finite(drawn: Curve) -> str:
    """Warning about the non-finite values of a curve; empty if there are none."""
    bad = len(drawn.points) - len(drawn.finite)
    if not bad:
        return ""
    return f"{drawn.name}: {bad:,} of {len(drawn.points):,} values are NaN or infinite and left out of the curve."


def curves(run: RunLog, found: Charts) -> Section:
    missing = "" if run.metrics() else quiet("This run has no validation.")
    content = figures(found, run.span)
    return Section("Curves", content + missing if content else quiet("No data to draw yet."))


def figures(found: Charts, span: tuple[float, float]) -> str:
    """HTML of at most 60 charts."""
    shown = list(found.items())[:MOST_CHARTS]
    frame = Frame(*span, points=MOST_POINTS * min(FULL_CHARTS, len(shown)) // max(1, len(shown)))
    left = f"{len(found) - len(shown):,} more numbers of the log are left out: at most {MOST_CHARTS} are drawn."
    content = columns("".join(drawn(f"chart{k}", *chart, frame) for k, chart in enumerate(shown)))
    return content + (quiet(left) if len(found) > len(shown) else "")


def drawn(prefix: str, title: str, curves: Sequence[Curve], frame: Frame, log: bool = False) -> str:
    """Figure with curves over updates."""
    if not any(curve.finite for curve in curves):
        return figure(title, quiet("No finite values."))
    drawing = lines(curves, frame, prefix, f"{text(title)} over updates", log)
    return figure(title, drawing, [curve.name for curve in curves])


# -------------------------------------------------------------------------------- best values


def measured(run: RunLog) -> list[Curve]:
    """Curves that have a best value: train loss and validation metrics."""
    train = curve(run.train, "loss", "train loss")
    return [train, *(curve(run.validation, name, f"validation {name}") for name in run.metrics())]


def best(run: RunLog) -> Section:
    found = measured(run)
    rows = [
        (drawn.name, which, number(value), f"{update:,.0f}", number(drawn.points[-1][1]))
        for drawn in found
        for which in better(drawn.name)
        for update, value in extreme(drawn, which)
    ]
    unclear = any(len(better(drawn.name)) > 1 for drawn in found)
    note = ""
    if unclear:
        note = quiet("If the name of a metric does not show whether lower or higher is better, both are listed.")
    return Section("Best values", table(("", "", "value", "at update", "last"), rows, words=2) + note if rows else "")


def better(name: str) -> Sequence[str]:
    """("lowest",) or ("highest",), whichever is better by the name of a metric; both if the name does not show it."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("_", " ")))
    lower = bool(words & LOWER_IS_BETTER)
    higher = bool(words & HIGHER_IS_BETTER)
    if lower == higher:
        return ("lowest", "highest")
    return ("lowest",) if lower else ("highest",)


def extreme(drawn: Curve, which: str) -> Sequence[tuple[float, float]]:
    """First point with the lowest or highest finite value, as a sequence of one; empty if there is none."""
    pick = min if which == "lowest" else max
    return [pick(drawn.finite, key=lambda point: point[1])] if drawn.finite else []


# ------------------------------------------------------------------------------------- epochs


def epochs(run: RunLog) -> Section:
    every = sorted({line["epoch"] for line in run.lines if is_number(line.get("epoch")) and isfinite(line["epoch"])})
    found = _spread(every, MOST_EPOCHS)
    train = _last_of_epoch(run.train)
    validation = _last_of_epoch(run.validation)
    ends = _last_of_epoch(run.epoch)
    wanted = [("last train loss", train, "loss"), ("epoch loss", ends, "loss")]
    wanted += [(f"validation {name}", validation, name) for name in run.metrics()]
    wanted += [("seconds", ends, "seconds"), ("train seconds", _seconds_of_epoch(run.train), "seconds")]
    filled = [
        (title, [lines.get(epoch, {}).get(key) for epoch in found])
        for title, lines, key in wanted
        if any(is_number(line.get(key)) for line in lines.values())
    ]
    rows = list(zip((f"{epoch:,}" for epoch in found), *(aligned(values) for _, values in filled), strict=True))
    note = quiet(f"{len(found):,} of {len(every):,} epochs are shown.") if len(found) < len(every) else ""
    return Section("Epochs", table(("epoch", *(title for title, _ in filled)), rows, words=0) + note if rows else "")


def _spread(values: list[Any], most: int) -> list[Any]:
    """At most `most` evenly spaced values, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def _last_of_epoch(lines: Iterable[Line]) -> dict[Any, Line]:
    return {line["epoch"]: line for line in lines if is_number(line.get("epoch"))}


def _seconds_of_epoch(lines: Iterable[Line]) -> dict[Any, Line]:
    """Sum of seconds of each epoch; a train line counts from the previous one."""
    found = [line for line in lines if is_number(line.get("epoch")) and is_number(line.get("seconds"))]
    sums = dict.fromkeys((line["epoch"] for line in found), 0.0)
    for line in found:
        sums[line["epoch"]] += line["seconds"]
    return {epoch: {"seconds": seconds} for epoch, seconds in sums.items()}


def skipped(run: RunLog) -> Section:
    noted = [(update, count) for update, count in curve(run.train, "skipped").finite if count > 0]
    if not noted:
        return Section("Skipped updates", quiet("None." if run.train else "Nothing logged yet."))
    return Section(
        "Skipped updates",
        f"<p>{sum(count for _, count in noted):,.0f} skipped because of NaN or infinity, "
        f"{run.reached('update'):,} made. First logged at update {noted[0][0]:,.0f}, "
        f"last at update {noted[-1][0]:,.0f}.</p>",
    )
