"""`samplewise report --watch`: rewrite the report whenever files of the run have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samplewise.ledger.files import FOLDER
from samplewise.report.compare import write_comparison
from samplewise.report.page import write_report
from samplewise.report.run import read_run

EVERY = 5.0  # seconds
FILES = ("log.jsonl", "run.json", "previews.json", f"{FOLDER}/*.parquet")
Seen = list[tuple[str, int, int]]


def write_any(runs: Sequence[Path], to: Path | None = None, reload: float | None = None) -> Path:
    """Write the report of one run, or the comparison of several; returns the path of the page."""
    return write_report(runs[0], to, reload) if len(runs) == 1 else write_comparison(runs, to, reload)


def watch(
    runs: Sequence[Path],
    to: Path | None,
    tell: Callable[[str], object],
    every: float = EVERY,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Rewrite the page every `every` seconds if a run has changed, until all runs have ended or Ctrl-C is pressed.

    The page reloads itself until then.
    """
    before: Seen | None = None
    try:
        while not _ended(runs):
            now = seen(runs)  # before reading: later changes are noticed in the next round
            if now != before:
                path = write_any(runs, to, every)
            if before is None:
                tell(f"{path} is updated during training and reloads itself. Stop with Ctrl-C.")
            before = now
            sleep(every)
        why = "Training has ended"
    except KeyboardInterrupt:
        why = "Stopped by Ctrl-C"
    tell(f"{why}: {write_any(runs, to)} is not updated any more.")


def seen(runs: Sequence[Path]) -> Seen:
    """Path, modification time and size of each file of the runs. A file that disappears meanwhile is left out."""
    paths = (path for run in runs for pattern in FILES for path in sorted(Path(run).glob(pattern)))
    return [found for path in paths for found in _stamp(path)]


def _stamp(path: Path) -> Seen:
    try:
        about = path.stat()
    except FileNotFoundError:
        return []
    return [(str(path), about.st_mtime_ns, about.st_size)]


def _ended(runs: Sequence[Path]) -> bool:
    return all(read_run(Path(run)).end for run in runs)
