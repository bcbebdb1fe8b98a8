"""Plain text tables."""

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    rule = "  ".join("-" * w for w in widths)
    return "\n".join(([title] if title else []) + [lines[0], rule, *lines[1:]])
