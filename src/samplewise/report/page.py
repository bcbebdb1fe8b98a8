"""`write_report`: report of a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from samplewise.core.files import write_bytes
from samplewise.report import settings, training
from samplewise.report.cost import cost
from samplewise.report.html import Section, package_file, text
from samplewise.report.layers import layers
from samplewise.report.noise import noise
from samplewise.report.norms import norms
from samplewise.report.previews import read_previews
from samplewise.report.run_log import RunLog, read_run
from samplewise.report.samples import read_samples
from samplewise.report.scatter import scatter

MAX_WARNINGS = 30


def write_report(run: Path, to: Path | None = None, reload: float | None = None) -> Path:
    """Write the report of a run directory as one HTML file and return its path.

    to: path of the file; default report.html in the run directory
    reload: seconds after which the page reloads itself; default never
    """
    to = Path(run) / "report.html" if to is None else Path(to)
    return write(report(read_run(Path(run)), reload), to)


def write(page: str, to: Path) -> Path:
    """Write a page atomically and return its path."""
    to.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(to, page.encode(errors="replace"))  # a name may hold a lone surrogate
    return to


def report(run: RunLog, reload: float | None = None) -> str:
    """HTML page of a run."""
    samples = read_samples(run)
    previews = read_previews(run.directory)
    charts = training.charts(run)
    of_samples = [scatter(samples, previews), norms(run, samples)]
    of_log = [
        noise(run),
        layers(run),
        cost(run),
        training.best(run),
        training.epochs(run),
        training.skipped(run),
        settings.configuration(run),
    ]
    sections = of_samples if run.ledger_only else [training.curves(run, charts), *of_samples, *of_log]
    messages = run.warnings + settings.warnings(run) + training.warnings(charts) + samples.warnings + previews.warnings
    head = f'<p class="quiet">{text(training.state(run))}</p>\n' + settings.tiles(run, samples.count)
    scripts = ["dom.js", "plot.js", "samples.js"] if samples.table is not None else []
    return page(run.name, head, [warnings_section(messages), *sections], scripts, reload)


def warnings_section(messages: Sequence[str]) -> Section:
    """Section "Warnings" with at most 30 entries; empty without warnings."""
    more = [f"… and {len(messages) - MAX_WARNINGS:,} more."] if len(messages) > MAX_WARNINGS else []
    entries = "".join(f"<li>{text(warning)}</li>" for warning in [*messages[:MAX_WARNINGS], *more])
    return Section("Warnings", f'<ul class="warnings">{entries}</ul>' if messages else "")


def page(
    title: str, head: str, sections: Sequence[Section], scripts: Sequence[str] = (), reload: float | None = None
) -> str:
    """Complete HTML page. `head` is HTML; `scripts` are files of the package, and no other script can run."""
    visible = [section for section in sections if section.content]
    links = "".join(f'<li><a href="#{section.anchor}">{text(section.title)}</a></li>' for section in visible)
    script = _script([*(["reload.js"] if reload else []), *scripts])
    reload_attribute = f' data-reload="{reload:g}"' if reload else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"{reload_attribute}>\n<head>\n<meta charset="utf-8" />\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_security_policy(script)}" />\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1" />\n<title>{text(title)}</title>\n'
        f"<style>{package_file('style.css')}</style>\n</head>\n<body>\n<header>\n<h1>{text(title)}</h1>\n{head}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n'
        f"{''.join(section.html() for section in visible)}</main>\n"
        f"{f'<script>{script}</script>' if script else ''}</body>\n</html>\n"
    )


def _script(names: Sequence[str]) -> str:
    """Scripts of the package joined in one function scope."""
    code = "\n".join(package_file(name) for name in names)
    return f'"use strict";\n(() => {{\n{code}}})();\n' if names else ""


def _security_policy(code: str) -> str:
    """Content security policy: no network access, and only the script with this digest may run."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    scripts = f"'sha256-{digest}'" if code else "'none'"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
