"""`samplewise report --watch`: rewrite the report whenever files of the run have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samplewise.ledger.files import FOLDER
from samplewise.report.compare import write_comparison
from samplewise.report.page import write_report
from samplewise.report.run_log import read_run

INTERVAL = 5.0  # seconds
FILES = ("log.jsonl", "run.json", "previews.json", f"{FOLDER}/*.parquet")
FileStamps = list[tuple[str, int, int]]


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
        while not _ended(runs):
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
    paths = (path for run in runs for pattern in FILES for path in sorted(Path(run).glob(pattern)))
    return [stamp for path in paths for stamp in _file_stamp(path)]


def _file_stamp(path: Path) -> FileStamps:
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    return [(str(path), status.st_mtime_ns, status.st_size)]


def _ended(runs: Sequence[Path]) -> bool:
    return all(read_run(Path(run)).end for run in runs)
