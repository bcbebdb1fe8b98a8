"""Comparison of several runs on one page: settings, curves, best values, suspects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samplewise.report import html, training
from samplewise.report.previews import Preview, Previews, as_html, read_previews
from samplewise.report.run_log import Curve, RunLog, read_run
from samplewise.report.samples import Samples, read_samples

MAX_CARDS = 24  # suspects shown as cards
MAX_IDS = 60  # suspects of one run listed by id
NOT_SETTINGS = {"name", "started"}  # fields of run.json that always differ

Ranks = Mapping[str, Mapping[str, int]]  # name of the run -> id of the sample -> rank, from 1


class ComparedRun(NamedTuple):
    """One of the compared runs."""

    name: str  # unique
    run: RunLog
    charts: training.Charts
    samples: Samples
    previews: Previews


def write_comparison(runs: Sequence[Path], to: Path | None = None, reload: float | None = None) -> Path:
    """Write an HTML file that compares several runs and return its path; default ./comparison.html."""
    return html.write(comparison([read_run(Path(run)) for run in runs], reload), Path(to or "comparison.html"))


def comparison(logs: Sequence[RunLog], reload: float | None = None) -> str:
    """HTML page that compares several runs. `reload`: seconds after which the page reloads itself."""
    runs = [
        ComparedRun(name, run, training.charts(run), read_samples(run), read_previews(run.directory))
        for name, run in zip(names(logs), logs, strict=True)
    ]
    different, equal = _settings(runs)
    sections = [different, _curves(runs), _best(runs), _suspects(runs), equal]
    messages = []  # last, because the sections add warnings about previews
    for name, run, charts, samples, previews in runs:
        warnings = run.warnings + training.warnings(charts) + samples.warnings + previews.warnings
        messages += [f"{name}: {warning}" for warning in warnings]
    states = "".join(f"<li><b>{html.text(c.name)}</b> {html.text(training.state(c.run))}</li>" for c in runs)
    title = " and ".join(c.name for c in runs) if len(runs) == 2 else f"{len(runs)} runs"
    head = f'<ul class="states quiet">{states}</ul>\n'
    return html.page(title, head, [html.warnings_section(messages), *sections], reload=reload)


def names(runs: Sequence[RunLog]) -> list[str]:
    """Unique names of runs: with the directory if names are equal, and with a number if these are equal, too."""
    counts = Counter(run.name for run in runs)
    with_directory = [run.name if counts[run.name] == 1 else f"{run.name} ({run.directory})" for run in runs]
    counts = Counter(with_directory)
    return [name if counts[name] == 1 else f"{name} #{k + 1}" for k, name in enumerate(with_directory)]


# --- settings ---------------------------------------------------------------------------------------------------------


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as one flat dict, with keys such as settings.lr."""
    flat_settings: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat_settings |= flat(value, f"{prefix}{name}.")
        else:
            flat_settings[f"{prefix}{name}"] = html.format_value(value)
    return flat_settings


def _settings(runs: Sequence[ComparedRun]) -> tuple[html.Section, html.Section]:
    """Sections "Different settings" and "Equal settings"."""
    settings_of_runs = [flat(c.run.metadata) for c in runs]
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings if name not in NOT_SETTINGS)
    rows = [(name, *(settings.get(name, html.MISSING) for settings in settings_of_runs)) for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    equal = [row[:2] for row in rows if len(set(row[1:])) == 1]
    differences = html.note_paragraph("None.")
    if different:
        differences = html.table(("", *(c.name for c in runs)), different, text_columns=1 + len(runs))
    equal_table = html.table(("", "all"), equal, text_columns=2)
    details = f"<details><summary>{len(equal):,} settings</summary>{equal_table}</details>" if equal else ""
    return html.Section("Different settings", differences), html.Section("Equal settings", details)


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(runs: Sequence[ComparedRun]) -> html.Section:
    """One chart for each title that any run has."""
    charts_of_runs = [c.charts for c in runs]
    titles = dict.fromkeys(title for charts in charts_of_runs for title in charts)
    spans = [c.run.span for c in runs]
    span = min(first for first, _ in spans), max(last for _, last in spans)
    overlaid = {  # a run without a chart gets an empty curve in it, so that each run keeps its color
        title: [Curve(c.name, c.charts[title][0].points if title in c.charts else []) for c in runs] for title in titles
    }
    figures = training.figures(overlaid, span)
    has_groups = any(len(curves) > 1 for charts in charts_of_runs for curves in charts.values())
    note = html.note_paragraph("Only the learning rate of the first parameter group is drawn.") if has_groups else ""
    return html.Section("Curves", figures + note if figures else html.note_paragraph("No data to draw yet."))


def _best(runs: Sequence[ComparedRun]) -> html.Section:
    curves_of_runs = [{curve.name: curve for curve in training.measured_curves(c.run)} for c in runs]
    names = dict.fromkeys(name for curves in curves_of_runs for name in curves)
    rows = []
    for name in names:
        for which in training.better_extremes(name):
            extremes = [training.extreme(curves[name], which) if name in curves else [] for curves in curves_of_runs]
            if any(extremes):
                rows.append((name, which, *html.aligned([extreme[0][1] if extreme else None for extreme in extremes])))
    head = ("", "", *(c.name for c in runs))
    return html.Section("Best values", html.table(head, rows, text_columns=2) if rows else "")


# --- suspects ---------------------------------------------------------------------------------------------------------


def _suspects(runs: Sequence[ComparedRun]) -> html.Section:
    """Suspects compared by id, which identifies a sample only if the runs used the same dataset."""
    with_ledger = [c for c in runs if c.samples.rankings]
    if len(with_ledger) < 2:
        return html.Section("Suspects", html.note_paragraph("Comparing suspects needs two runs with a ledger."))
    ranks = {c.name: {sample_id: k + 1 for k, sample_id in enumerate(c.samples.suspects)} for c in with_ledger}
    only_in_one = html.columns("".join(_only_in_run(c, ranks) for c in with_ledger))
    # Cards of the samples that are suspect in all runs, sorted by the sum of their ranks.
    in_all_runs = set.intersection(*(set(of_run) for of_run in ranks.values()))
    ids = [sample_id for sample_id in ranks[with_ledger[0].name] if sample_id in in_all_runs]
    ids.sort(key=lambda sample_id: sum(of_run[sample_id] for of_run in ranks.values()))
    scope = "both runs" if len(with_ledger) == 2 else f"all {len(with_ledger)} runs"
    are = "sample is" if len(ids) == 1 else "samples are"
    summary = f"{len(ids):,} {are} suspect in {scope}{_limit_note(MAX_CARDS, ids)}, with the rank in each run."
    previews = _previews(ids[:MAX_CARDS], with_ledger)
    cards = "".join(_card(sample_id, previews.get(sample_id, {}), ranks) for sample_id in ids[:MAX_CARDS])
    gallery = f'<ol class="gallery">{cards}</ol>' if cards else ""
    return html.Section("Suspects", f"<p>{summary}</p>{gallery}" + only_in_one)


def _previews(ids: Sequence[str], runs: Sequence[ComparedRun]) -> dict[str, Preview]:
    """Previews of samples, each from the first run that has one."""
    previews: dict[str, Preview] = {}
    for compared_run in runs:
        previews |= compared_run.previews.shown([sample_id for sample_id in ids if sample_id not in previews])
    return previews


def _card(sample_id: str, preview: Preview, ranks: Ranks) -> str:
    ranks_of_sample = html.definition_list([(name, f"{of_run[sample_id]:,}") for name, of_run in ranks.items()])
    title = f"<strong>{html.breakable(html.shortened(sample_id))}</strong>"
    return f'<li><div class="card">{as_html(preview)}{title}{ranks_of_sample}</div></li>'


def _only_in_run(run: ComparedRun, ranks: Ranks) -> str:
    """List of the samples that are suspect in one run only."""
    in_other_runs = {sample_id for name, of_run in ranks.items() if name != run.name for sample_id in of_run}
    suspects = ranks[run.name]
    only_here = [sample_id for sample_id in suspects if sample_id not in in_other_runs]
    score = run.samples.rankings[0].title.replace(" (recommended)", "")
    ids = "".join(f"<li>{html.text(html.shortened(sample_id))}</li>" for sample_id in only_here[:MAX_IDS])
    return (
        f"<figure><figcaption>Only in {html.text(run.name)}: {len(only_here):,} of {len(suspects):,}, by "
        f'{html.text(score)}{_limit_note(MAX_IDS, only_here)}</figcaption><ol class="ids">{ids}</ol></figure>'
    )


def _limit_note(limit: int, ids: Sequence[str]) -> str:
    return f"; the first {limit} are shown" if len(ids) > limit else ""
