"""What a run directory holds, read so that a run which broke off can be looked at as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from samplewise.ledger.files import numbered, samples

Line = dict[str, Any]
Point = tuple[float, float]  # update, value

PLACE = {"kind", "epoch", "update", "samples", "seconds", "skipped"}  # where a line stands, not what it measured
KNOWN = {"loss", "lr", "samples_per_second", "memory"}  # numbers of a train line that have a chart of their own


class Curve(NamedTuple):
    name: str
    points: list[Point]

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if isfinite(point[1])]


@dataclass
class Run:
    """The lines of a log by kind, in the order of the log, and what had to be left out.

    Of a train line, `update` and `samples` count from the start; `skipped` and `seconds` from the line before.
    """

    directory: Path
    about: Line = field(default_factory=dict)
    train: list[Line] = field(default_factory=list)
    validation: list[Line] = field(default_factory=list)
    epoch: list[Line] = field(default_factory=list)
    lr: list[Line] = field(default_factory=list)  # of LRMonitor
    layers: list[Line] = field(default_factory=list)  # norms of gradients by layer
    noise: list[Line] = field(default_factory=list)  # the noise scale, and the batch size it belongs to
    end: Line | None = None  # the last line, if it says that the run ended: it may have gone on after others
    left_out: list[str] = field(default_factory=list)  # one sentence a reason

    @property
    def name(self) -> str:
        return str(self.about.get("name") or self.directory.resolve().name)

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last update that something is known of."""
        places = [line.get("update") for line in self.lines + self.lr + self.layers + self.noise]
        known = [float(place) for place in places if is_number(place) and isfinite(place)]
        return min(known, default=0.0), max(known, default=0.0)

    @property
    def lines(self) -> list[Line]:
        return self.train + self.validation + self.epoch + ([self.end] if self.end else [])

    def reached(self, key: str) -> int:
        """The highest of what the lines say, for what counts from the start."""
        found = (line.get(key) for line in self.lines)
        return int(max((total for total in found if is_number(total) and isfinite(total)), default=0))

    def metrics(self) -> list[str]:
        return _measured(self.validation)

    def samples(self, damaged: str = "raise") -> Any:
        """Its ledger, as a pyarrow table: see `sw.samples`."""
        return samples(self.directory, damaged)

    def other_numbers(self) -> list[str]:
        return [name for name in _measured(self.train) if name not in KNOWN]

    def learning_rates(self) -> list[Curve]:
        """One curve for each parameter group; `lr` is a list where there is more than one."""
        lines, key = (self.lr, "rates") if len(self.lr) > len(self.train) else (self.train, "lr")
        lists = [(line.get("update"), lr if isinstance(lr := line.get(key), list) else [lr]) for line in lines]
        groups = max((len(lrs) for _, lrs in lists), default=0)
        return [
            Curve(f"group {g}", points((update, lrs[g]) for update, lrs in lists if g < len(lrs)))
            for g in range(groups)
        ]


def is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)  # and no bool


def curve(lines: Iterable[Line], key: str, name: str | None = None) -> Curve:
    """A value against updates. A line without it is no point; NaN and infinity are points, and stay."""
    return Curve(name or key, points((line.get("update"), line.get(key)) for line in lines))


def points(found: Iterable[tuple[Any, Any]]) -> list[Point]:
    return [(float(x), float(y)) for x, y in found if is_number(x) and isfinite(x) and is_number(y)]


def read_run(directory: Path) -> Run:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"a report needs a run directory; found none at {directory}. Give the directory that the training wrote to."
        )
    log, run = directory / "log.jsonl", Run(directory)
    if not log.is_file() and not numbered(directory):
        raise FileNotFoundError(
            f"a run directory must hold log.jsonl; found none in {directory}. "
            "Give the directory of one run, not the one above it; a run writes its log from the first update on."
        )
    _read_about(run)
    if log.is_file():
        _read_log(run, log)
    else:  # of a loop of one's own
        run.left_out.append("There is no log.jsonl: curves, time and epochs are not known.")
    return run


def _read_about(run: Run) -> None:
    path = run.directory / "run.json"
    if not path.is_file():
        run.left_out.append("There is no run.json: name, versions and settings are not known.")
        return
    try:
        about = _parse(path.read_bytes())
    except OSError:
        about = None
    if about is None:
        run.left_out.append("run.json cannot be read: name, versions and settings are not known.")
    run.about = about or {}


def _read_log(run: Run, log: Path) -> None:
    ends: list[Line] = []
    names = ("train", "validation", "epoch", "lr", "layers", "noise")
    kinds = {"end": ends} | {name: getattr(run, name) for name in names}
    unreadable, unknown, cut = 0, 0, False
    for text in _filled_lines(log):
        line = _parse(text)
        if line is None:
            cut = not text.endswith(b"\n")  # only the last line can lack its end
            unreadable += not cut
        elif (kind := str(line.get("kind"))) in kinds:
            kinds[kind].append(line)
            run.end = line if kind == "end" else None
        else:
            unknown += 1
    if cut:
        run.left_out.append("The last line of the log is cut off and left out: the run was writing it, or was stopped.")
    if unreadable:
        run.left_out.append(f"Lines of the log that cannot be read, and are left out: {unreadable:,}.")
    if unknown:
        run.left_out.append(f"Lines of the log of a kind that this report does not know: {unknown:,}.")


def _filled_lines(log: Path) -> Iterator[bytes]:
    with log.open("rb") as file:
        yield from (text for text in file if text.strip())


def _parse(text: bytes) -> Line | None:
    """One JSON object, or None: bytes, because a line may be cut off in the middle of a letter."""
    try:
        value = json.loads(text.decode(), parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _integer(digits: str) -> int | float:
    """An integer that no float can hold would break the drawing; as a float it is infinite, and said to be."""
    return int(digits) if len(digits) < 300 else float(digits)


def _measured(lines: list[Line]) -> list[str]:
    names = (name for line in lines for name, value in line.items() if is_number(value) and name not in PLACE)
    return list(dict.fromkeys(names))
