"""What the run was: headline figures, and everything that run.json says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from samplewise.report.html import Section, columns, facts, number, text
from samplewise.report.run import Run, is_number
from samplewise.report.training import better, extreme, measured

TILES = 6


def tiles(run: Run, samples: int | None) -> str:
    """The few figures that one looks for first."""
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    shown = [("updates", f"{run.reached('update'):,}"), ("epochs", f"{len(epochs):,}")]
    shown += [("samples", f"{samples:,}")] if samples is not None else []
    for found in reversed(measured(run)):  # validation before training
        for which in better(found.name)[:1] if len(better(found.name)) == 1 else ():
            shown += [(f"{which} {found.name}", number(value)) for _, value in extreme(found, which)]
    entries = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in shown[:TILES])
    return f'<dl class="tiles">{"".join(entries)}</dl>\n' if run.lines else ""


def configuration(run: Run) -> Section:
    """Tables within run.json become tables of their own."""
    inner = {name: value for name, value in run.about.items() if isinstance(value, dict) and value}
    known = {name: value for name, value in run.about.items() if name != "name" and not isinstance(value, dict)}
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    counted = {"epochs": len(epochs), "updates": run.reached("update"), "samples logged": run.reached("samples")}
    tables = [facts("Run", known | counted)] + [facts(name.capitalize(), found) for name, found in inner.items()]
    return Section("Configuration", columns("".join(tables)))


def warnings(run: Run) -> list[str]:
    """A run of another version may have meant something else by its words."""
    wrote: Any = run.about.get("samplewise")
    try:
        here = version("samplewise")
    except PackageNotFoundError:  # read from a folder that was never installed
        return []
    if not isinstance(wrote, str) or wrote == here:
        return []
    return [
        f"The run was made by samplewise {wrote} and is read by {here}: what has changed between them may be missing."
    ]
