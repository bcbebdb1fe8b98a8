"""Section "Quarantine": the samples that `sw.guard` has dropped, from quarantine.jsonl."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from samplewise.core.files import QUARANTINE_FILE, read_json_lines
from samplewise.core.text import plural
from samplewise.report.html import Section, aligned, note_paragraph, shortened, table, text
from samplewise.report.previews import Previews, as_html
from samplewise.report.run_log import RunLog

MAX_ROWS = 100
MAX_CARDS = 24
BUDGET = 200_000  # characters of all previews of the section
Line = dict[str, Any]


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
