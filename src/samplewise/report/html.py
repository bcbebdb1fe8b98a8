"""Text, numbers and tables as HTML. All of the user's data is escaped here before it is put into the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import floor, isfinite, isnan, log10
from typing import Any, NamedTuple

from samplewise.report.run import is_number

NOTHING = "–"
COLOURS = 8  # colours of curves in style.css; further curves are dashed

# Characters that would end a script element, or a line of JavaScript, are escaped in JSON.
IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Section(NamedTuple):
    """Section of the page; left out if it has no content."""

    title: str
    content: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.title.lower())

    def html(self) -> str:
        return f'<section id="{self.anchor}">\n<h2>{text(self.title)}</h2>\n{self.content}\n</section>\n'


def package_file(name: str) -> str:
    return (files("samplewise.report") / name).read_text(encoding="utf-8")


def text(words: object) -> str:
    """Text escaped for elements and attributes; control characters, which HTML forbids, are replaced."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "\N{REPLACEMENT CHARACTER}", str(words)))


def quiet(words: str) -> str:
    """Paragraph in the colour of notes."""
    return f'<p class="quiet">{text(words)}</p>'


def embedded(name: str, value: Any) -> str:
    """JSON data element for the script of the page. `value` must not contain NaN or infinity."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(IN_SCRIPT)
    return f'<script type="application/json" id="{name}">{written}</script>\n'


def columns(content: str) -> str:
    return f'<div class="columns">{content}</div>' if content else ""


def beside(drawing: str, content: str) -> str:
    """A figure with its explanation beside it, or below it on narrow screens."""
    return f'<div class="beside">{drawing}<div>{content}</div></div>'


def figure(title: str, drawing: str, names: Sequence[str] = ()) -> str:
    """Figure with title, drawing, and a legend if there are several curves."""
    return f"<figure><figcaption>{text(title)}</figcaption>{legend(names)}{drawing}</figure>"


def legend(names: Sequence[str]) -> str:
    """Legend as HTML text outside of the drawing, so that it can wrap and names are escaped; empty for one curve."""
    if len(names) < 2:
        return ""
    entries = (
        f'<li><i class="line-{k % COLOURS}{" dashed" if k >= COLOURS else ""}"></i>{text(name)}</li>'
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def pairs(known: Iterable[Sequence[str]]) -> str:
    """Compact list of names and values."""
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in known) + "</dl>"


def facts(title: str, known: Mapping[str, Any]) -> str:
    """Table with one row per name and value."""
    rows = (f'<tr><th scope="row">{text(name)}</th><td>{text(fact(value))}</td></tr>' for name, value in known.items())
    return f'<table class="facts"><caption>{text(title)}</caption><tbody>{"".join(rows)}</tbody></table>'


def fact(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 1000)


def shortened(words: str, longest: int = 200) -> str:
    return words if len(words) <= longest else words[:longest] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Table; the first `words` columns hold text, the others numbers, aligned to the right."""
    kinds = ["" if k < words else ' class="number"' for k in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{text(title)}</th>' for kind, title in zip(kinds, head, strict=True))
    cells = ("".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: object) -> str:
    return aligned([value])[0]


def aligned(values: Sequence[Any]) -> list[str]:
    """Numbers of one column formatted with the same number of decimals, so that the decimal points align."""
    sizes = [abs(value) for value in values if is_number(value) and isfinite(value) and value]
    small, large = min(sizes, default=1.0), max(sizes, default=1.0)
    if large >= 1e7 or small < 1e-4:
        return [_written(value, ".3e") for value in values]
    return [_written(value, f",.{min(6, max(0, 3 - floor(log10(large))))}f") for value in values]


def _written(value: Any, how: str) -> str:
    if not is_number(value):
        return NOTHING
    if isnan(value):
        return "NaN"
    return format(value, how).replace("-", "\N{MINUS SIGN}") if isfinite(value) else ("∞" if value > 0 else "−∞")
