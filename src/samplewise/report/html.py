"""The HTML page: its frame, sections, figures, tables and numbers.

All of the user's data is escaped here before it is put into the page, which has no access to the network and runs no
script but those of the package.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import floor, isfinite, isnan, log10
from pathlib import Path
from typing import Any, NamedTuple

from samplewise.core.files import write_bytes
from samplewise.report.run_log import is_number

MISSING = "–"
MAX_WARNINGS = 30
COLORS = 8  # colors of curves in style.css; further curves are dashed

# Characters that would end a script element, or a line of JavaScript, are escaped in JSON.
IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Section(NamedTuple):
    """Section of the page; left out if it has no content."""

    title: str
    content: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower())

    def html(self) -> str:
        return f'<section id="{self.anchor}">\n<h2>{text(self.title)}</h2>\n{self.content}\n</section>\n'


def page(
    title: str, head: str, sections: Sequence[Section], scripts: Sequence[str] = (), reload: float | None = None
) -> str:
    """Complete HTML page. `head` is HTML; `scripts` are files of the package, and no other script can run.

    reload: seconds after which the page reloads itself; default never
    """
    visible = [section for section in sections if section.content]
    links = "".join(f'<li><a href="#{section.anchor}">{text(section.title)}</a></li>' for section in visible)
    names = [*(["reload.js"] if reload else []), *scripts]
    code = "\n".join(package_file(name) for name in names)
    script = f'"use strict";\n(() => {{\n{code}}})();\n' if names else ""
    # The browser refuses every script but the one with this digest: names and texts of the user cannot run code.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed_script = f"'sha256-{digest}'" if script else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed_script}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )
    reload_attribute = f' data-reload="{reload:g}"' if reload else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"{reload_attribute}>\n<head>\n<meta charset="utf-8" />\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}" />\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1" />\n<title>{text(title)}</title>\n'
        f"<style>{package_file('style.css')}</style>\n</head>\n<body>\n<header>\n<h1>{text(title)}</h1>\n{head}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n'
        f"{''.join(section.html() for section in visible)}</main>\n"
        f"{f'<script>{script}</script>' if script else ''}</body>\n</html>\n"
    )


def write(page: str, to: Path) -> Path:
    """Write a page atomically and return its path."""
    to.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(to, page.encode(errors="replace"))  # a name may hold a lone surrogate
    return to


def warnings_section(messages: Sequence[str]) -> Section:
    """Section "Warnings" with at most 30 entries; empty without warnings."""
    more = [f"… and {len(messages) - MAX_WARNINGS:,} more."] if len(messages) > MAX_WARNINGS else []
    entries = "".join(f"<li>{text(warning)}</li>" for warning in [*messages[:MAX_WARNINGS], *more])
    return Section("Warnings", f'<ul class="warnings">{entries}</ul>' if messages else "")


def headline_tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Tiles of names and values, at the top of the page."""
    items = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f'<dl class="tiles">{"".join(items)}</dl>\n'


# --- content of sections ----------------------------------------------------------------------------------------------


def package_file(name: str) -> str:
    return (files("samplewise.report") / name).read_text(encoding="utf-8")


def text(value: object) -> str:
    """Text escaped for elements and attributes; control characters, which HTML forbids, are replaced."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "\N{REPLACEMENT CHARACTER}", str(value)))


def breakable(name: object) -> str:
    """Escaped name or path that may continue in the next line after / _ and . (breakable of dom.js)."""
    return re.sub(r"(?<=[/_.])(?=.)", "<wbr />", text(name))


def note_paragraph(message: str) -> str:
    """Paragraph in the color of notes."""
    return f'<p class="quiet">{text(message)}</p>'


def embedded(name: str, value: Any) -> str:
    """JSON data element for the script of the page. `value` must not contain NaN or infinity."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(IN_SCRIPT)
    return f'<script type="application/json" id="{name}">{encoded}</script>\n'


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
        f'<li><i class="line-{k % COLORS}{" dashed" if k >= COLORS else ""}"></i>{text(name)}</li>'
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def definition_list(entries: Iterable[Sequence[str]]) -> str:
    """Compact list of names and values."""
    rows = (f"<div><dt>{breakable(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f"<dl>{''.join(rows)}</dl>"


def value_table(title: str, values: Mapping[str, Any]) -> str:
    """Table with one row per name and value."""
    rows = (
        f'<tr><th scope="row">{text(name)}</th><td>{text(format_value(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<table class="facts"><caption>{text(title)}</caption><tbody>{"".join(rows)}</tbody></table>'


def format_value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 1000)


def shortened(value: str, limit: int = 200) -> str:
    return value if len(value) <= limit else value[:limit] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int) -> str:
    """Table; the first `text_columns` columns hold text, the others numbers, aligned to the right."""
    classes = ["" if k < text_columns else ' class="number"' for k in range(len(head))]
    titles = "".join(
        f'<th scope="col"{css_class}>{text(title)}</th>' for css_class, title in zip(classes, head, strict=True)
    )
    cells = (
        "".join(f"<td{css_class}>{text(cell)}</td>" for css_class, cell in zip(classes, row, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: object) -> str:
    return aligned([value])[0]


def aligned(values: Sequence[Any]) -> list[str]:
    """Numbers of one column formatted with the same number of decimals, so that the decimal points align."""
    sizes = [abs(value) for value in values if is_number(value) and isfinite(value) and value]
    smallest, largest = min(sizes, default=1.0), max(sizes, default=1.0)
    if largest >= 1e7 or smallest < 1e-4:
        return [_format_number(value, ".3e") for value in values]
    return [_format_number(value, f",.{min(6, max(0, 3 - floor(log10(largest))))}f") for value in values]


def _format_number(value: Any, format_spec: str) -> str:
    if not is_number(value):
        return MISSING
    if isnan(value):
        return "NaN"
    return (
        format(value, format_spec).replace("-", "\N{MINUS SIGN}") if isfinite(value) else ("∞" if value > 0 else "−∞")
    )
