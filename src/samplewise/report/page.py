"""The report: one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from samplewise.files import whole
from samplewise.report import settings, training
from samplewise.report.cost import cost
from samplewise.report.html import Section, package_file, text
from samplewise.report.layers import layers
from samplewise.report.noise import noise
from samplewise.report.norms import norms
from samplewise.report.previews import read_previews
from samplewise.report.run import Run, read_run
from samplewise.report.samples import read_samples
from samplewise.report.scatter import scatter

MOST_WARNINGS = 30


def write_report(run: Path, to: Path | None = None, reload: float | None = None) -> Path:
    """Writes the report of a run directory into one HTML file, `report.html` in it unless `to` says otherwise.

    reload: the page looks at itself again after so many seconds
    """
    to = Path(run) / "report.html" if to is None else Path(to)
    return write(report(read_run(Path(run)), reload), to)


def write(page: str, to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    with whole(to, to.with_name(f".{to.name}.partial")) as file:
        file.write(page.encode(errors="replace"))  # half a surrogate pair in a name is no reason to fail
    return to


def report(run: Run, reload: float | None = None) -> str:
    samples, previews, charts = read_samples(run), read_previews(run), training.charts(run)
    sections = [
        training.curves(run, charts),
        scatter(samples, previews),
        norms(run, samples),
        noise(run),
        layers(run),
        cost(run),
        training.best(run),
        training.epochs(run),
        training.skipped(run),
        settings.configuration(run),
    ]
    said = run.left_out + settings.warnings(run) + training.warnings(charts) + samples.warnings + previews.warnings
    head = f'<p class="quiet">{text(training.state(run))}</p>\n' + settings.tiles(run, samples.count)
    scripts = ["words.js", "plot.js", "samples.js"] if samples.each is not None else []
    return page(run.name, head, [warned(said), *sections], scripts, reload)


def warned(said: Sequence[str]) -> Section:
    more = [f"… and {len(said) - MOST_WARNINGS:,} more."] if len(said) > MOST_WARNINGS else []
    entries = "".join(f"<li>{text(warning)}</li>" for warning in [*said[:MOST_WARNINGS], *more])
    return Section("Warnings", f'<ul class="warnings">{entries}</ul>' if said else "")


def page(
    title: str, head: str, sections: Sequence[Section], scripts: Sequence[str] = (), reload: float | None = None
) -> str:
    """A whole page; `head` is HTML already. It may run these scripts of the package, and nothing else."""
    shown = [section for section in sections if section.content]
    links = "".join(f'<li><a href="#{section.anchor}">{text(section.title)}</a></li>' for section in shown)
    code = _script([*(["reload.js"] if reload else []), *scripts])
    timed = f' data-reload="{reload:g}"' if reload else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"{timed}>\n<head>\n<meta charset="utf-8" />\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_allowed(code)}" />\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1" />\n<title>{text(title)}</title>\n'
        f"<style>{package_file('style.css')}</style>\n</head>\n<body>\n<header>\n<h1>{text(title)}</h1>\n{head}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n'
        f"{''.join(section.html() for section in shown)}</main>\n"
        f"{f'<script>{code}</script>' if code else ''}</body>\n</html>\n"
    )


def _script(names: Sequence[str]) -> str:
    """As one, whose names are its own."""
    code = "\n".join(package_file(name) for name in names)
    return f'"use strict";\n(() => {{\n{code}}})();\n' if names else ""


def _allowed(code: str) -> str:
    """Nothing is fetched from anywhere, and no script runs but ours, told by its digest."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    scripts = f"'sha256-{digest}'" if code else "'none'"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
