"""Reading of run.json and log.jsonl of a run directory, including incomplete files of interrupted runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from samplewise.core.files import RUN_VERSION, other_version
from samplewise.core.package import UNKNOWN, installed_version
from samplewise.ledger.files import list_parts

Line = dict[str, Any]
Point = tuple[float, float]  # update, value

# Position of a line, not a measured value.
POSITION_FIELDS = {"kind", "epoch", "update", "samples", "seconds", "skipped"}
# Numbers of a train line that have their own chart.
CHARTED_FIELDS = {"loss", "lr", "samples_per_second", "compute_samples_per_second", "memory", "samples_per_update"}


class Curve(NamedTuple):
    """Values over updates."""

    name: str
    points: list[Point]

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if isfinite(point[1])]


@dataclass
class RunLog:
    """Content of a run directory, filled by `read_run`: lines of the log by kind, in their order, and warnings.

    In a train line, `update` and `samples` count from the start of the run, `skipped` and `seconds` from the previous
    train line.
    """

    directory: Path
    metadata: Line = field(init=False, default_factory=dict)
    train: list[Line] = field(init=False, default_factory=list)
    validation: list[Line] = field(init=False, default_factory=list)
    epoch: list[Line] = field(init=False, default_factory=list)
    lr: list[Line] = field(init=False, default_factory=list)  # written by LRMonitor
    layers: list[Line] = field(init=False, default_factory=list)  # gradient norm of each layer
    noise: list[Line] = field(init=False, default_factory=list)  # noise scale and batch size
    importance: list[Line] = field(init=False, default_factory=list)  # variance ratio of sw.ImportanceSampler
    end: Line | None = field(init=False, default=None)  # set if it is the last line
    warnings: list[str] = field(init=False, default_factory=list)  # one warning per reason
    ledger_only: bool = False  # True: another training loop than the Trainer wrote the ledger, and no log

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or self.directory.resolve().name)

    @property
    def span(self) -> tuple[float, float]:
        """First and last update in the log; zeros without any."""
        lines = self.lines + self.lr + self.layers + self.noise + self.importance
        updates = [line.get("update") for line in lines]
        finite = [float(update) for update in updates if is_number(update) and isfinite(update)]
        return min(finite, default=0.0), max(finite, default=0.0)

    @property
    def lines(self) -> list[Line]:
        return self.train + self.validation + self.epoch + ([self.end] if self.end else [])

    @property
    def epochs(self) -> set[int | float]:
        """Numbers of the epochs in the log."""
        return {line["epoch"] for line in self.lines if is_number(line.get("epoch"))}

    def reached(self, key: str) -> int:
        """Largest value of a counter such as `update` over all lines."""
        values = (line.get(key) for line in self.lines)
        return int(max((value for value in values if is_number(value) and isfinite(value)), default=0))

    def metrics(self) -> list[str]:
        """Names of the validation metrics."""
        return _numeric_fields(self.validation)

    def other_numbers(self) -> list[str]:
        """Names of the numbers in train lines that have no chart of their own."""
        return [name for name in _numeric_fields(self.train) if name not in CHARTED_FIELDS]

    def learning_rates(self) -> list[Curve]:
        """One curve per parameter group. In the log, `lr` is a list if there are several groups."""
        lines, key = (self.lr, "rates") if len(self.lr) > len(self.train) else (self.train, "lr")
        lists = []
        for line in lines:
            lr = line.get(key)
            lists.append((line.get("update"), lr if isinstance(lr, list) else [lr]))
        groups = max((len(lrs) for _, lrs in lists), default=0)
        return [
            Curve(f"group {g}", points((update, lrs[g]) for update, lrs in lists if g < len(lrs)))
            for g in range(groups)
        ]


def is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)  # bool is excluded


def curve(lines: Iterable[Line], key: str, name: str | None = None) -> Curve:
    """Curve of a value over updates. Lines without the value are left out; NaN and infinity are kept as points."""
    return Curve(name or key, points((line.get("update"), line.get(key)) for line in lines))


def points(pairs: Iterable[tuple[Any, Any]]) -> list[Point]:
    return [(float(x), float(y)) for x, y in pairs if is_number(x) and isfinite(x) and is_number(y)]


def read_run(directory: Path) -> RunLog:
    """Read run.json and log.jsonl of a run directory; what cannot be read becomes one of its warnings."""
    if not directory.is_dir():
        raise FileNotFoundError(
            f"a report needs a run directory; found none at {directory}. Pass the directory that the training wrote to."
        )
    log = directory / "log.jsonl"
    run = RunLog(directory, ledger_only=not log.is_file() and not (directory / "run.json").is_file())
    if not log.is_file() and not list_parts(directory):
        raise FileNotFoundError(
            f"a run directory must contain log.jsonl; found none in {directory}. "
            "Pass the directory of one run, not its parent; the log is written from the first update on."
        )
    if run.ledger_only:
        return run
    _read_metadata(run)
    if log.is_file():
        _read_log(run, log)
    else:
        run.warnings.append("There is no log.jsonl: curves, time and epochs are not known.")
    written_by = run.metadata.get("samplewise")
    installed = installed_version()
    if isinstance(written_by, str) and written_by != installed and UNKNOWN not in (written_by, installed):
        run.warnings.append(
            f"The run was written by samplewise {written_by} and is read by {installed}: data whose format changed may "
            "be missing."
        )
    return run


def _read_metadata(run: RunLog) -> None:
    path = run.directory / "run.json"
    if not path.is_file():
        run.warnings.append("There is no run.json: name, versions and settings are not known.")
        return
    try:
        metadata = _parse(path.read_bytes())
    except OSError:
        metadata = None
    if metadata is None:
        run.warnings.append("run.json cannot be read: name, versions and settings are not known.")
        return
    version = metadata.pop("format_version", RUN_VERSION)
    if version != RUN_VERSION:
        run.warnings.append(other_version("run.json", version, RUN_VERSION))
        return
    run.metadata = metadata


def _read_log(run: RunLog, log: Path) -> None:
    ends: list[Line] = []
    names = ("train", "validation", "epoch", "lr", "layers", "noise", "importance")
    lines_by_kind = {"end": ends} | {name: getattr(run, name) for name in names}
    unreadable = 0
    unknown = 0
    truncated = False
    with log.open("rb") as file:
        for text in file:
            if not text.strip():
                continue
            line = _parse(text)
            if line is None:
                truncated = not text.endswith(b"\n")  # only possible in the last line
                unreadable += not truncated
            elif (kind := str(line.get("kind"))) in lines_by_kind:
                lines_by_kind[kind].append(line)
                run.end = line if kind == "end" else None
            elif kind == "note":
                run.warnings.append(str(line.get("text")))
            else:
                unknown += 1
    if truncated:
        run.warnings.append(
            "The last line of the log is incomplete and left out: the run is writing it or was interrupted."
        )
    if unreadable:
        run.warnings.append(f"Unreadable lines of the log, left out: {unreadable:,}.")
    if unknown:
        run.warnings.append(f"Lines of the log of an unknown kind, left out: {unknown:,}.")


def _parse(text: bytes) -> Line | None:
    """JSON object of a line, or None if it is invalid. Takes bytes, because a line may end within a character."""
    try:
        # An integer of 300 digits or more is read as float: the charts cannot draw larger values.
        value = json.loads(text.decode(), parse_int=lambda digits: (int if len(digits) < 300 else float)(digits))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _numeric_fields(lines: list[Line]) -> list[str]:
    names = (name for line in lines for name, value in line.items() if is_number(value) and name not in POSITION_FIELDS)
    return list(dict.fromkeys(names))
