"""Tables, hints and counts in plain text."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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


def counted(number: int, what: str) -> str:
    """Return a number with its noun: "1 update", "1,200 updates"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
