"""Numbers with nouns, lists, hints and tables in plain text."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

SHOWN = 5


def listed(names: Iterable[str]) -> str:
    """Return the first five names, separated by commas, and the number of the others."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def plural(count: int, noun: str, many: str = "") -> str:
    """A number and its noun: "1 update", "2 updates", "1,000 updates". `many`: the plural, if it is not noun + s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def render(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table with left-aligned columns, a rule below the header and an optional title line."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * w for w in widths)
    return "\n".join(([title] if title else []) + [lines[0], rule, *lines[1:]])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the known name that is most similar; empty if none is similar."""
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
