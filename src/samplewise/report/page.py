"""The report: one HTML file that needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from math import floor, isfinite, isnan, log10
from pathlib import Path
from typing import Any

from samplewise.report.curves import draw
from samplewise.report.run import Curve, Line, Run, curve, is_number, read_run

NOTHING = "–"
LOWER_IS_BETTER = set("loss error err mse rmse mae nll ce bce perplexity ppl bpb wer cer fid brier ece regret".split())
HIGHER_IS_BETTER = set(
    "accuracy acc top1 top5 f1 auc auroc precision recall iou miou dice bleu psnr ssim r2 map score reward".split()
)

CSS = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d232b; --quiet: #667080; --rule: #dfe3e8; --tint: #f6f7f9;
  --warn: #9a6700; --line-0: #2563a8; --line-1: #c2571a; --line-2: #2e7d4f; --line-3: #8250a6; }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #14181d; --ink: #e3e7ec; --quiet: #98a2b0; --rule: #2d343d; --tint: #1b2027;
    --warn: #d9a53a; --line-0: #6cb0f5; --line-1: #f0955a; --line-2: #6cc592; --line-3: #c09ae0; } }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.1rem; font-weight: 650; }
p { margin: .4rem 0; }
.quiet { color: var(--quiet); }
.columns { display: grid; align-items: start; gap: 0 2.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
th { font-weight: 500; color: var(--quiet); }
thead th { vertical-align: bottom; font-size: .87rem; }
td { overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
thead th.number { white-space: normal; }
caption { padding-bottom: .2rem; text-align: left; font-weight: 550; font-size: .93rem; }
.facts { margin-bottom: 1rem; }
td.number:first-child, th.number:first-child { width: 3rem; }
.facts th { width: 9rem; overflow-wrap: anywhere; }
figure { margin: 0 0 1.25rem; break-inside: avoid; }
figcaption { font-weight: 550; font-size: .93rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
.warnings { margin: 0; padding: .6rem 1rem .6rem 2rem; background: var(--tint); border-left: 3px solid var(--warn); }
.warnings li { margin: .2rem 0; overflow-wrap: anywhere; }
@media print {
  @page { margin: 15mm; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  .columns { grid-template-columns: 1fr 1fr; gap: 0 1.5rem; }
  .scroll { overflow: visible; }
  .facts th { width: 6rem; }
  h2 { break-after: avoid; }
  tr { break-inside: avoid; }
}
"""


def write_report(run: Path, to: Path | None = None) -> Path:
    """Writes the report of a run directory into one HTML file, `report.html` in it unless `to` says otherwise."""
    to = Path(run) / "report.html" if to is None else Path(to)
    page = _page(read_run(Path(run)))
    to.write_text(page, encoding="utf-8", errors="replace")  # half a surrogate pair in a name is no reason to fail
    return to


def _page(run: Run) -> str:
    sections = [
        _section("Warnings", _warnings(run)),
        _section("Summary", _summary(run)),
        _section("Curves", _curves(run)),
        _section("Best values", _best(run)),
        _section("Epochs", _epochs(run)),
        _section("Skipped updates", _skipped(run)),
    ]
    title = _text(run.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1" />\n<title>{title}</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n"
        f'<p class="quiet">{_text(_state(run))}</p>\n</header>\n{"".join(sections)}</body>\n</html>\n'
    )


def _state(run: Run) -> str:
    if run.end:
        return f"Ended at update {run.reached('update'):,}: {run.end.get('reason', 'no reason given')}"
    if run.lines:
        return f"Not finished: the log reaches update {run.reached('update'):,} and has no end"
    return "Nothing logged yet"


# ------------------------------------------------------------------------------- the sections


def _warnings(run: Run) -> str:
    found = run.left_out + [said for drawn in _all_curves(run) if (said := _not_finite(drawn))]
    if not found:
        return ""
    return '<ul class="warnings">' + "".join(f"<li>{_text(warning)}</li>" for warning in found) + "</ul>"


def _not_finite(drawn: Curve) -> str:
    bad = len(drawn.points) - len(drawn.finite)
    said = f"{drawn.name}: {bad:,} of {len(drawn.points):,} values NaN or infinite, left out of the curve."
    return said if bad else ""


def _summary(run: Run) -> str:
    known = {key: value for key, value in run.about.items() if key not in ("name", "settings")}
    epochs = {line["epoch"] for line in run.lines if is_number(line.get("epoch"))}
    counted = {"epochs": len(epochs), "updates": run.reached("update"), "samples logged": run.reached("samples")}
    settings = run.about.get("settings")
    tables = [_facts("Run", known | counted)] + (
        [_facts("Settings", settings)] if isinstance(settings, dict) and settings else []
    )
    return f'<div class="columns">{"".join(tables)}</div>'


def _facts(title: str, facts: dict[str, Any]) -> str:
    rows = (
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(_fact(value))}</td></tr>' for name, value in facts.items()
    )
    return f'<table class="facts"><caption>{title}</caption><tbody>{"".join(rows)}</tbody></table>'


def _fact(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _charts(run: Run) -> list[tuple[str, list[Curve]]]:
    """Title and curves of each chart; what was never logged has none."""
    metrics = [(f"Validation: {name}", [curve(run.validation, name, f"validation {name}")]) for name in run.metrics()]
    others = [(name, [curve(run.train, name)]) for name in run.other_numbers()]
    charts = [
        ("Train loss", [curve(run.train, "loss", "train loss")]),
        *metrics,
        ("Learning rate", run.learning_rates()),
        ("Samples per second", [curve(run.train, "samples_per_second", "samples per second")]),
        *others,
    ]
    return [(title, curves) for title, curves in charts if any(curve.points for curve in curves)]


def _all_curves(run: Run) -> list[Curve]:
    return [
        drawn._replace(name=f"{title}, {drawn.name}" if len(curves) > 1 else title)
        for title, curves in _charts(run)
        for drawn in curves
    ]


def _curves(run: Run) -> str:
    charts = _charts(run)
    xs = [x for _, curves in charts for drawn in curves for x, _ in drawn.points]
    figures = "".join(_figure(f"chart{k}", (min(xs), max(xs)), *chart) for k, chart in enumerate(charts))
    missing = "" if run.metrics() else '<p class="quiet">This run has no validation.</p>'
    return f'<div class="columns">{figures}</div>{missing}' if figures else '<p class="quiet">Nothing to draw yet.</p>'


def _figure(prefix: str, updates: tuple[float, float], title: str, curves: list[Curve]) -> str:
    caption = f"<figcaption>{_text(title)}</figcaption>"
    if not any(curve.finite for curve in curves):
        return f'<figure>{caption}<p class="quiet">No finite value.</p></figure>'
    return f"<figure>{caption}{draw(curves, updates, prefix, f'{_text(title)} against updates')}</figure>"


def _best(run: Run) -> str:
    curves = [curve(run.train, "loss", "train loss")]
    curves += [curve(run.validation, name, f"validation {name}") for name in run.metrics()]
    rows = [
        (drawn.name, which, _number(value), f"{update:,.0f}", _number(drawn.points[-1][1]))
        for drawn in curves
        for which in _better(drawn.name)
        for update, value in _extreme(drawn, which)
    ]
    unclear = any(len(_better(drawn.name)) > 1 for drawn in curves)
    note = '<p class="quiet">Where the name does not tell which end is good, both are given.</p>' if unclear else ""
    return _table(("", "", "value", "at update", "last"), rows, words=2) + note if rows else ""


def _better(name: str) -> Sequence[str]:
    """Which end of the scale is good, as far as a name tells; both where it does not."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("_", " ")))
    lower, higher = bool(words & LOWER_IS_BETTER), bool(words & HIGHER_IS_BETTER)
    return ("lowest", "highest") if lower == higher else ("lowest",) if lower else ("highest",)


def _extreme(drawn: Curve, which: str) -> Sequence[tuple[float, float]]:
    """The first point that has the value, or none."""
    pick = min if which == "lowest" else max
    return [pick(drawn.finite, key=lambda point: point[1])] if drawn.finite else []


def _epochs(run: Run) -> str:
    epochs = sorted({line["epoch"] for line in run.lines if is_number(line.get("epoch")) and isfinite(line["epoch"])})
    train, validation, ends = _last_of_epoch(run.train), _last_of_epoch(run.validation), _last_of_epoch(run.epoch)
    columns = [("last train loss", train, "loss"), ("epoch loss", ends, "loss")]
    columns += [(f"validation {name}", validation, name) for name in run.metrics()]
    columns += [("seconds", ends, "seconds"), ("train seconds", _seconds_of_epoch(run.train), "seconds")]
    filled = [
        (title, [lines.get(epoch, {}).get(key) for epoch in epochs])
        for title, lines, key in columns
        if any(is_number(line.get(key)) for line in lines.values())
    ]
    rows = list(zip((f"{epoch:,}" for epoch in epochs), *(_aligned(values) for _, values in filled), strict=True))
    return _table(("epoch", *(title for title, _ in filled)), rows, words=0) if rows else ""


def _last_of_epoch(lines: Iterable[Line]) -> dict[Any, Line]:
    return {line["epoch"]: line for line in lines if is_number(line.get("epoch"))}


def _seconds_of_epoch(lines: Iterable[Line]) -> dict[Any, Line]:
    """Added up, because a train line counts from the line before."""
    found = [line for line in lines if is_number(line.get("epoch")) and is_number(line.get("seconds"))]
    sums = dict.fromkeys((line["epoch"] for line in found), 0.0)
    for line in found:
        sums[line["epoch"]] += line["seconds"]
    return {epoch: {"seconds": seconds} for epoch, seconds in sums.items()}


def _skipped(run: Run) -> str:
    noted = [(update, count) for update, count in curve(run.train, "skipped").finite if count > 0]
    if not noted:
        return f'<p class="quiet">{"None." if run.train else "Nothing logged yet."}</p>'
    return (
        f"<p>{sum(count for _, count in noted):,.0f} left out because of NaN or infinity, "
        f"beside {run.reached('update'):,} made: the first noted at update {noted[0][0]:,.0f}, "
        f"the last at update {noted[-1][0]:,.0f}.</p>"
    )


# --------------------------------------------------------------------------- text and numbers


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n" if content else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table whose first columns, as many as `words` says, hold words; the others hold numbers."""
    kinds = ["" if k < words else ' class="number"' for k in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{_text(title)}</th>' for kind, title in zip(kinds, head, strict=True))
    cells = ("".join(f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(words: str) -> str:
    """Escaped; without control characters, which no HTML may hold."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "\N{REPLACEMENT CHARACTER}", words))


def _number(value: object) -> str:
    return _aligned([value])[0]


def _aligned(values: Sequence[Any]) -> list[str]:
    """Numbers of one column with the same count of decimals, so that their points stand below each other."""
    sizes = [abs(value) for value in values if is_number(value) and isfinite(value) and value]
    small, large = min(sizes, default=1.0), max(sizes, default=1.0)
    if large >= 1e7 or small < 1e-4:
        return [_written(value, ".3e") for value in values]
    return [_written(value, f",.{min(6, max(0, 3 - floor(log10(large))))}f") for value in values]


def _written(value: Any, how: str) -> str:
    if not is_number(value):
        return NOTHING
    if isnan(value):
        return "NaN"
    return format(value, how).replace("-", "\N{MINUS SIGN}") if isfinite(value) else ("∞" if value > 0 else "−∞")
