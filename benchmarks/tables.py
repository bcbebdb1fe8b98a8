"""Markdown tables, printed and written into documents."""

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Options:
    """Arguments of all tables."""

    rounds: int
    threads: list[int]
    nets: list[str]  # empty: all networks of the table
    peers: bool = True
    memory: bool = True
    quick: bool = False

    def choose(self, names: Iterable[str], quick: Iterable[str] | None = None) -> list[str]:
        """Chosen networks of `names`; by default all, or those of `quick` in a quick run."""
        if not self.nets:
            return list(quick if self.quick and quick is not None else names)
        return [name for name in names if name in self.nets]

    def caption(self, threads: int) -> str:
        counts = f"{plural(threads, 'thread')}, medians of {plural(self.rounds, 'round')}"
        return f"torch {torch.__version__}, float32, {counts}; {processor()}."


def processor() -> str:
    """Model and number of the processors that this process may use."""
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {plural(len(os.sched_getaffinity(0)), 'logical core')}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Table:
    """`key` names the place of the table in documents: between `<!-- KEY -->` and `<!-- /KEY -->`."""

    key: str
    title: str
    rows: list[list[str]]  # the first one is the header
    caption: str = ""
    notes: tuple[str, ...] = ()  # one list item each, printed but not written

    @property
    def markdown(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        head, *body = ("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in self.rows)
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([head, rule, *body, *(["", self.caption] if self.caption else [])])

    def __str__(self) -> str:
        return "\n".join(["", f"### {self.title}", "", self.markdown, "", *(f"- {note}" for note in self.notes)])


def write(table: Table, path: Path) -> bool:
    """Replace the table between its markers; False if the document has none."""
    return replace_text(table.key, table.markdown, path)


def replace_text(key: str, text: str, path: Path) -> bool:
    """Replace the text between the markers of this key; False if the document has none."""
    document = path.read_text()
    place = re.compile(rf"(<!-- {key} -->\n).*?(<!-- /{key} -->)", re.DOTALL)
    document, places = place.subn(lambda markers: f"{markers[1]}\n{text}\n\n{markers[2]}", document)
    path.write_text(document)
    return places > 0
