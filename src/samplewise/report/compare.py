"""Comparison of several runs on one page: settings, curves, best values, suspects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samplewise.report import settings, training
from samplewise.report.html import NOTHING, Section, aligned, columns, fact, pairs, quiet, shortened, table, text
from samplewise.report.page import page, warned, write
from samplewise.report.previews import Preview, Previews, as_html, read_previews
from samplewise.report.run import Curve, RunLog, read_run
from samplewise.report.samples import Samples, read_samples

MOST_CARDS = 24  # suspects shown as cards
MOST_IDS = 60  # suspects of one run listed by id
UNSET = {"name", "started"}  # not settings: they always differ


class Compared(NamedTuple):
    """One of the compared runs."""

    name: str  # unique
    run: RunLog
    charts: training.Charts
    samples: Samples
    previews: Previews


def write_comparison(runs: Sequence[Path], to: Path | None = None, reload: float | None = None) -> Path:
    """Write an HTML file that compares several runs and return its path; default ./comparison.html."""
    return write(comparison([read_run(Path(run)) for run in runs], reload), Path(to or "comparison.html"))


def comparison(runs: Sequence[RunLog], reload: float | None = None) -> str:
    """HTML page that compares several runs. `reload`: seconds after which the page reloads itself."""
    compared = [
        Compared(name, run, training.charts(run), read_samples(run), read_previews(run))
        for name, run in zip(names(runs), runs, strict=True)
    ]
    sections = [
        _differences(compared),
        _curves(compared),
        _best(compared),
        _suspects(compared),
        _same(compared),
    ]
    said = [f"{c.name}: {words}" for c in compared for words in _warnings(c)]  # last: sections add warnings
    states = "".join(f"<li><b>{text(c.name)}</b> {text(training.state(c.run))}</li>" for c in compared)
    title = " and ".join(c.name for c in compared) if len(compared) == 2 else f"{len(compared)} runs"
    return page(title, f'<ul class="states quiet">{states}</ul>\n', [warned(said), *sections], reload=reload)


def names(runs: Sequence[RunLog]) -> list[str]:
    """Unique names of runs: with the directory if names are equal, and with a number if these are equal, too."""
    counts = Counter(run.name for run in runs)
    placed = [run.name if counts[run.name] == 1 else f"{run.name} ({run.directory})" for run in runs]
    counts = Counter(placed)
    return [name if counts[name] == 1 else f"{name} #{k + 1}" for k, name in enumerate(placed)]


def _warnings(compared: Compared) -> list[str]:
    run = compared.run
    found = run.left_out + settings.warnings(run) + training.warnings(compared.charts)
    return found + compared.samples.warnings + compared.previews.warnings


# ------------------------------------------------------------------------------------ settings


def flat(known: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested dicts as one flat dict, with keys such as settings.lr."""
    found: dict[str, str] = {}
    for name, value in known.items():
        inner = isinstance(value, dict) and value
        found |= flat(value, f"{above}{name}.") if inner else {f"{above}{name}": fact(value)}
    return found


def _settings(compared: Sequence[Compared]) -> dict[str, list[str]]:
    """Name -> value of each run."""
    each = [flat(c.run.about) for c in compared]
    known = dict.fromkeys(name for found in each for name in found if name not in UNSET)
    return {name: [found.get(name, NOTHING) for found in each] for name in known}


def _differences(compared: Sequence[Compared]) -> Section:
    rows = [(name, *found) for name, found in _settings(compared).items() if len(set(found)) > 1]
    content = table(("", *(c.name for c in compared)), rows, words=1 + len(compared)) if rows else quiet("None.")
    return Section("Different settings", content)


def _same(compared: Sequence[Compared]) -> Section:
    rows = [(name, found[0]) for name, found in _settings(compared).items() if len(set(found)) == 1]
    content = table(("", "all"), rows, words=2) if rows else ""
    said = f"<details><summary>{len(rows):,} settings</summary>{content}</details>"
    return Section("Equal settings", said if rows else "")


# -------------------------------------------------------------------------------------- curves


def _curves(compared: Sequence[Compared]) -> Section:
    """One chart for each title that any run has."""
    each = [c.charts for c in compared]
    titles = dict.fromkeys(title for charts in each for title in charts)
    spans = [c.run.span for c in compared]
    span = min(first for first, _ in spans), max(last for _, last in spans)
    found = training.figures({title: _overlaid(title, compared, each) for title in titles}, span)
    several = any(len(curves) > 1 for charts in each for curves in charts.values())
    note = quiet("Only the learning rate of the first parameter group is drawn.") if several else ""
    return Section("Curves", found + note if found else quiet("No data to draw yet."))


def _overlaid(title: str, compared: Sequence[Compared], each: Sequence[training.Charts]) -> list[Curve]:
    """One curve per run; a run without this chart gets an empty curve, so that each run keeps its colour."""
    found = [charts[title][0].points if title in charts else [] for charts in each]
    return [Curve(c.name, points) for c, points in zip(compared, found, strict=True)]


def _best(compared: Sequence[Compared]) -> Section:
    each = [{drawn.name: drawn for drawn in training.measured(c.run)} for c in compared]
    known = dict.fromkeys(name for found in each for name in found)
    rows = []
    for name in known:
        for which in training.better(name):
            ends = [training.extreme(found[name], which) if name in found else [] for found in each]
            if any(ends):
                rows.append((name, which, *aligned([end[0][1] if end else None for end in ends])))
    head = ("", "", *(c.name for c in compared))
    return Section("Best values", table(head, rows, words=2) if rows else "")


# ------------------------------------------------------------------------------------ suspects


def _suspects(compared: Sequence[Compared]) -> Section:
    """Suspects compared by id, which identifies a sample only if the runs used the same dataset."""
    known = [c for c in compared if c.samples.scores]
    if len(known) < 2:
        return Section("Suspects", quiet("Comparing suspects needs two runs with a ledger."))
    ranked = [{one: place + 1 for place, one in enumerate(c.samples.suspects)} for c in known]
    common = [one for one in ranked[0] if all(one in places for places in ranked)]
    common.sort(key=lambda one: sum(places[one] for places in ranked))
    whose = "both runs" if len(known) == 2 else f"all {len(known)} runs"
    are = "sample is" if len(common) == 1 else "samples are"
    said = f"{len(common):,} {are} suspect in {whose}{_first(MOST_CARDS, common)}, with the rank in each run."
    shown = _previews(common[:MOST_CARDS], known)
    cards = "".join(_card(one, shown.get(one, {}), known, ranked) for one in common[:MOST_CARDS])
    gallery = f'<ol class="gallery">{cards}</ol>' if cards else ""
    alone = columns("".join(_alone(k, known, ranked) for k in range(len(known))))
    return Section("Suspects", f"<p>{said}</p>{gallery}{alone}")


def _previews(ids: Sequence[str], known: Sequence[Compared]) -> dict[str, Preview]:
    """Previews of samples, each from the first run that has one."""
    shown: dict[str, Preview] = {}
    for c in known:
        shown |= c.previews.shown([one for one in ids if one not in shown])
    return shown


def _card(one: str, preview: Preview, known: Sequence[Compared], ranked: Sequence[dict[str, int]]) -> str:
    places = [(c.name, f"{found[one]:,}") for c, found in zip(known, ranked, strict=True)]
    return f'<li><div class="card">{as_html(preview)}<strong>{text(shortened(one))}</strong>{pairs(places)}</div></li>'


def _alone(k: int, known: Sequence[Compared], ranked: Sequence[dict[str, int]]) -> str:
    others = {one for j, places in enumerate(ranked) if j != k for one in places}
    alone = [one for one in ranked[k] if one not in others]
    by = known[k].samples.scores[0].title.replace(" (recommended)", "")
    ids = "".join(f"<li>{text(shortened(one))}</li>" for one in alone[:MOST_IDS])
    return (
        f"<figure><figcaption>Only in {text(known[k].name)}: {len(alone):,} of {len(ranked[k]):,}, by {text(by)}"
        f'{_first(MOST_IDS, alone)}</figcaption><ol class="ids">{ids}</ol></figure>'
    )


def _first(most: int, ids: Sequence[str]) -> str:
    return f"; the first {most} are shown" if len(ids) > most else ""
