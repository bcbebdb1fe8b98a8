"""Headline figures of a run, and section "Configuration" with the content of run.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samplewise.core.package import UNKNOWN, installed_version
from samplewise.report.html import Section, columns, number, text, value_table
from samplewise.report.run_log import RunLog, is_number
from samplewise.report.training import better_extremes, extreme, measured_curves

MAX_TILES = 6  # headline figures


def tiles(run: RunLog, samples: int | None) -> str:
    """Headline figures at the top of the page: updates, epochs, samples, best values."""
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    entries = [("updates", f"{run.reached('update'):,}"), ("epochs", f"{len(epochs):,}")]
    entries += [("samples", f"{samples:,}")] if samples is not None else []
    for measured_curve in reversed(measured_curves(run)):  # validation before training
        for extreme_name in (
            better_extremes(measured_curve.name)[:1] if len(better_extremes(measured_curve.name)) == 1 else ()
        ):
            entries += [
                (f"{extreme_name} {measured_curve.name}", number(value))
                for _, value in extreme(measured_curve, extreme_name)
            ]
    return headline_tiles(entries[:MAX_TILES]) if run.lines else ""


def headline_tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Tiles of names and values."""
    items = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f'<dl class="tiles">{"".join(items)}</dl>\n'


def configuration(run: RunLog) -> Section:
    """Content of run.json; each nested object becomes a table of its own."""
    nested = {name: value for name, value in run.metadata.items() if isinstance(value, dict) and value}
    values = {name: value for name, value in run.metadata.items() if name != "name" and not isinstance(value, dict)}
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    counters = {"epochs": len(epochs), "updates": run.reached("update"), "samples logged": run.reached("samples")}
    tables = [value_table("Run", values | counters)]
    tables += [value_table(name.capitalize(), nested_values) for name, nested_values in nested.items()]
    return Section("Configuration", columns("".join(tables)))


def warnings(run: RunLog) -> list[str]:
    """Warning if the run was written by another version of samplewise."""
    written_by: Any = run.metadata.get("samplewise")
    installed = installed_version()
    if not isinstance(written_by, str) or written_by == installed or UNKNOWN in (written_by, installed):
        return []
    return [
        f"The run was written by samplewise {written_by} and is read by {installed}: data whose format changed may be "
        "missing."
    ]
