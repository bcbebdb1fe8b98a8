"""Headline figures of a run, and section "Configuration" with the content of run.json."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from samplewise.report.html import Section, columns, facts, number, text
from samplewise.report.run import RunLog, is_number
from samplewise.report.training import better, extreme, measured

TILES = 6  # headline figures


def tiles(run: RunLog, samples: int | None) -> str:
    """Headline figures at the top of the page: updates, epochs, samples, best values."""
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    shown = [("updates", f"{run.reached('update'):,}"), ("epochs", f"{len(epochs):,}")]
    shown += [("samples", f"{samples:,}")] if samples is not None else []
    for found in reversed(measured(run)):  # validation before training
        for which in better(found.name)[:1] if len(better(found.name)) == 1 else ():
            shown += [(f"{which} {found.name}", number(value)) for _, value in extreme(found, which)]
    entries = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in shown[:TILES])
    return f'<dl class="tiles">{"".join(entries)}</dl>\n' if run.lines else ""


def configuration(run: RunLog) -> Section:
    """Content of run.json; each nested object becomes a table of its own."""
    inner = {name: value for name, value in run.about.items() if isinstance(value, dict) and value}
    known = {name: value for name, value in run.about.items() if name != "name" and not isinstance(value, dict)}
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    counted = {"epochs": len(epochs), "updates": run.reached("update"), "samples logged": run.reached("samples")}
    tables = [facts("Run", known | counted)] + [facts(name.capitalize(), found) for name, found in inner.items()]
    return Section("Configuration", columns("".join(tables)))


def warnings(run: RunLog) -> list[str]:
    """Warning if the run was written by another version of samplewise."""
    wrote: Any = run.about.get("samplewise")
    try:
        here = version("samplewise")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return []
    if not isinstance(wrote, str) or wrote == here:
        return []
    return [
        f"The run was written by samplewise {wrote} and is read by {here}: data whose format changed may be missing."
    ]
