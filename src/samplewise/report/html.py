"""Text, numbers and tables as HTML. What comes from the user's data gets onto the page through here, or not at all."""

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
COLOURS = 8  # that style.css has for curves; later ones are dashed

# Characters that would end a script element, or a line of JavaScript, stand in JSON as escapes.
IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Section(NamedTuple):
    """A part of the page. Without content it is left out."""

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
    """Escaped, for attributes too; without control characters, which no HTML may hold."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "\N{REPLACEMENT CHARACTER}", str(words)))


def quiet(words: str) -> str:
    return f'<p class="quiet">{text(words)}</p>'


def embedded(name: str, value: Any) -> str:
    """Data for the script of the page; `value` must be without NaN, which JSON does not know."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(IN_SCRIPT)
    return f'<script type="application/json" id="{name}">{written}</script>\n'


def columns(content: str) -> str:
    return f'<div class="columns">{content}</div>' if content else ""


def beside(drawing: str, content: str) -> str:
    """What a figure means, at its side where there is room."""
    return f'<div class="beside">{drawing}<div>{content}</div></div>'


def figure(title: str, drawing: str, names: Sequence[str] = ()) -> str:
    """A drawing with its title, and the names of its curves if there are several."""
    return f"<figure><figcaption>{text(title)}</figcaption>{legend(names)}{drawing}</figure>"


def legend(names: Sequence[str]) -> str:
    """Outside of the drawing, where it can wrap, and where a name is text and nothing else."""
    if len(names) < 2:
        return ""
    entries = (
        f'<li><i class="line-{k % COLOURS}{" dashed" if k >= COLOURS else ""}"></i>{text(name)}</li>'
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def pairs(known: Iterable[Sequence[str]]) -> str:
    """Names and values, in little room."""
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in known) + "</dl>"


def facts(title: str, known: Mapping[str, Any]) -> str:
    rows = (f'<tr><th scope="row">{text(name)}</th><td>{text(fact(value))}</td></tr>' for name, value in known.items())
    return f'<table class="facts"><caption>{text(title)}</caption><tbody>{"".join(rows)}</tbody></table>'


def fact(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 1000)


def shortened(words: str, longest: int = 200) -> str:
    return words if len(words) <= longest else words[:longest] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table whose first columns, as many as `words` says, hold words; the others hold numbers."""
    kinds = ["" if k < words else ' class="number"' for k in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{text(title)}</th>' for kind, title in zip(kinds, head, strict=True))
    cells = ("".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: object) -> str:
    return aligned([value])[0]


def aligned(values: Sequence[Any]) -> list[str]:
    """Numbers of one column with the same count of decimals, so that their points stand below each other."""
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
