"""Page of an audit: verdict, findings, weights by update, samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplewise.report import html
from samplewise.report.charts import XRange, lines
from samplewise.report.run_log import Curve

MAX_ROWS = 500  # of a table
DIGITS = 6  # of sums of weights in the chart: rounding errors are no curves


def audit_page(audit: Mapping[str, Any]) -> str:
    """HTML page of what `Audit.to_dict` returns."""
    summary = audit["summary"]
    updates = [update for update in summary if update["sum"] is not None]
    tiles = [("updates", f"{len(summary):,}"), ("faults", f"{len(audit['findings']):,}")]
    tiles += [("samples", f"{sum(update['samples'] for update in summary):,}")]
    if updates:
        sums = [update["sum"] for update in updates]
        tiles += [
            ("smallest sum of weights", html.number(min(sums))),
            ("largest sum of weights", html.number(max(sums))),
        ]
    notes = "".join(html.note_paragraph(f"{note}.") for note in audit["notes"])
    head = f'<p class="quiet">{html.text(audit["verdict"])}</p>\n{html.headline_tiles(tiles)}'
    sections = [
        html.Section("Findings", _findings(audit["findings"]) + notes),
        html.Section("Weights", _chart(updates)),
        html.Section("Updates", _updates(summary)),
        html.Section("Samples", _samples(audit["updates"])),
    ]
    return html.page("Audit of a training loop", head, sections)


def _findings(findings: list[Mapping[str, Any]]) -> str:
    if not findings:
        return html.note_paragraph("Nothing was found.")
    rows = ([f["code"], f["message"], f["where"], _ranges(f["updates"])] for f in findings)
    return html.table(("code", "what was seen, and what to do", "where", "updates"), rows, 4)


def _ranges(numbers: list[int]) -> str:
    """Numbers as ranges: 1-3, 7."""
    ranges: list[list[int]] = []
    for k in numbers:
        if ranges and ranges[-1][1] == k - 1:
            ranges[-1][1] = k
        else:
            ranges.append([k, k])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _chart(updates: list[Mapping[str, Any]]) -> str:
    """Sum of the weights, and the smallest and largest one relative to equal weights: right loops have 1 in all."""
    if len(updates) < 2:
        return ""
    frame = XRange(updates[0]["update"], updates[-1]["update"])
    curves = [
        Curve("sum of weights", [(u["update"], round(u["sum"], DIGITS)) for u in updates]),
        Curve("largest weight × targets", [(u["update"], round(u["high"] * u["targets"], DIGITS)) for u in updates]),
        Curve("smallest weight × targets", [(u["update"], round(u["low"] * u["targets"], DIGITS)) for u in updates]),
    ]
    drawing = lines(curves, frame, "weights", "Sum of the weights of each update, largest and smallest weight")
    return html.columns(html.figure("Equal weights with sum 1 are at 1", drawing, [curve.name for curve in curves]))


def _updates(summary: list[Mapping[str, Any]]) -> str:
    head = (
        "update",
        "microbatches",
        "samples",
        "targets",
        "sum of weights",
        "smallest weight",
        "largest weight",
        "norm",
    )
    names = ("update", "microbatches", "samples", "targets", "sum", "low", "high", "norm")
    return _table(head, [[update[name] for name in names] for update in summary], 0)


def _samples(rows: list[Mapping[str, Any]]) -> str:
    names = ("loss", "update", "microbatch", "row", "sample", "targets", "weight")
    return _table(names, [[row[name] for name in names] for row in rows], 1)


def _table(head: tuple[str, ...], rows: list[list[Any]], text_columns: int) -> str:
    cells = [[_cell(value) for value in row] for row in rows[:MAX_ROWS]]
    more = html.note_paragraph(f"… and {len(rows) - MAX_ROWS:,} more rows.") if len(rows) > MAX_ROWS else ""
    return html.table(head, cells, text_columns) + more


def _cell(value: Any) -> str:
    if value is None:
        return html.MISSING
    return f"{value:.6g}" if isinstance(value, float) else str(value)
