"""`write_report`: report of a run as one self-contained HTML file; `watch` rewrites it while the run is training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from samplewise.core.files import QUARANTINE_FILE
from samplewise.ledger.files import FOLDER
from samplewise.report import html, training
from samplewise.report.compare import write_comparison
from samplewise.report.gradients import importance, layers, noise, norms
from samplewise.report.previews import read_previews
from samplewise.report.run_log import RunLog, read_run
from samplewise.report.samples import read_samples
from samplewise.report.scatter import data_map, scatter
from samplewise.report.training import quarantine

MAX_TILES = 6  # headline figures
INTERVAL = 5.0  # seconds between two looks at a watched run
FILES = ("log.jsonl", "run.json", "previews.json", QUARANTINE_FILE, f"{FOLDER}/*.parquet")
FileStamps = list[tuple[str, int, int]]


def write_report(run: Path, to: Path | None = None, reload: float | None = None) -> Path:
    """Write the report of a run directory as one HTML file and return its path.

    to: path of the file; default report.html in the run directory
    reload: seconds after which the page reloads itself; default never
    """
    to = Path(run) / "report.html" if to is None else Path(to)
    return html.write(report(read_run(Path(run)), reload), to)


def report(run: RunLog, reload: float | None = None) -> str:
    """HTML page of a run."""
    samples = read_samples(run)
    previews = read_previews(run.directory)
    charts = training.charts(run)
    suspects = scatter(samples, previews)
    norm_quantiles = norms(run, samples)
    of_log = [
        noise(run),
        importance(run),
        layers(run),
        quarantine(run),
        training.cost(run),
        training.best(run),
        training.epochs(run),
        training.skipped(run),
        configuration(run),
    ]
    curves = training.curves(run, charts)
    # With a ledger, the suspects come first: they are what most readers look for.
    of_samples = [suspects, data_map(samples)]
    first = [curves, *of_samples] if samples.table is None else [*of_samples, curves]
    sections = [*of_samples, norm_quantiles] if run.ledger_only else [*first, norm_quantiles, *of_log]
    # Last, because the sections add warnings about previews.
    messages = run.warnings + training.warnings(charts) + samples.warnings + previews.warnings
    head = f'<p class="quiet">{html.text(training.state(run))}</p>\n' + tiles(run, samples.count)
    scripts = ["dom.js", "plot.js", "samples.js"] if samples.table is not None else []
    return html.page(run.name, head, [html.warnings_section(messages), *sections], scripts, reload)


def tiles(run: RunLog, samples: int | None) -> str:
    """Headline figures at the top of the page: updates, epochs, samples, best values."""
    entries = [("updates", f"{run.reached('update'):,}"), ("epochs", f"{len(run.epochs):,}")]
    entries += [("samples", f"{samples:,}")] if samples is not None else []
    for measured_curve in reversed(training.measured_curves(run)):  # validation before training
        extremes = training.better_extremes(measured_curve.name)
        if len(extremes) == 1:  # otherwise the name does not show which one is better
            entries += [
                (f"{extremes[0]} {measured_curve.name}", html.number(value))
                for _, value in training.extreme(measured_curve, extremes[0])
            ]
    return html.headline_tiles(entries[:MAX_TILES]) if run.lines else ""


def configuration(run: RunLog) -> html.Section:
    """Section "Configuration" with the content of run.json; each nested object becomes a table of its own."""
    nested = {name: value for name, value in run.metadata.items() if isinstance(value, dict) and value}
    values = {name: value for name, value in run.metadata.items() if name != "name" and not isinstance(value, dict)}
    counters = {"epochs": len(run.epochs), "updates": run.reached("update"), "samples logged": run.reached("samples")}
    tables = [html.value_table("Run", values | counters)]
    tables += [html.value_table(name.capitalize(), nested_values) for name, nested_values in nested.items()]
    return html.Section("Configuration", html.columns("".join(tables)))


# --- one run or several, once or until they end -----------------------------------------------------------------------


def write_any(runs: Sequence[Path], to: Path | None = None, reload: float | None = None) -> Path:
    """Write the report of one run, or the comparison of several; returns the path of the page."""
    return write_report(runs[0], to, reload) if len(runs) == 1 else write_comparison(runs, to, reload)


def watch(
    runs: Sequence[Path],
    to: Path | None,
    print_line: Callable[[str], object],
    interval: float = INTERVAL,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Rewrite the page every `interval` seconds if a run has changed, until all runs have ended or Ctrl-C is pressed.

    The page reloads itself until then.
    """
    previous: FileStamps | None = None
    try:
        while not all(read_run(Path(run)).end for run in runs):
            current = file_stamps(runs)  # before reading: later changes are noticed in the next round
            if current != previous:
                path = write_any(runs, to, interval)
            if previous is None:
                print_line(f"{path} is updated during training and reloads itself. Stop with Ctrl-C.")
            previous = current
            sleep(interval)
        reason = "Training has ended"
    except KeyboardInterrupt:
        reason = "Stopped by Ctrl-C"
    print_line(f"{reason}: {write_any(runs, to)} is not updated any more.")


def file_stamps(runs: Sequence[Path]) -> FileStamps:
    """Path, modification time and size of each file of the runs. A file that disappears meanwhile is left out."""
    stamps: FileStamps = []
    for path in (path for run in runs for pattern in FILES for path in sorted(Path(run).glob(pattern))):
        with suppress(FileNotFoundError):
            status = path.stat()
            stamps.append((str(path), status.st_mtime_ns, status.st_size))
    return stamps
