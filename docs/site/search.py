"""Index of the site's search: the sections of the built pages, as a script that browsers also load from files.

docs/site/static/search.js ranks them. A section is a heading, or an entry of the API reference, with the text below it.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from keywords import KEYWORDS

# Elements whose text is separated from its neighbors by a space.
BLOCKS = frozenset("p li td th tr pre div dt dd br ul ol table section".split())
# Pages that are found by nearly every word, and seldom meant: shown after all others.
LAST = re.compile(r"changelog|contributing|scripts/")
NOT_INDEXED = re.compile(r"_modules/|genindex|search|py-modindex")
HEADINGS = ("h1", "h2", "h3", "h4")


class Sections(HTMLParser):
    """Sections of the article of a page: heading, id and text of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[dict[str, str]] = []
        self._ids: list[str] = []
        self._in_article = False
        self._in_heading = ""
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self._separate(tag)
        if tag == "article":
            self._in_article = True
        elif not self._in_article:
            return
        elif tag == "section":
            self._ids.append(attributes.get("id") or "")
        elif tag in HEADINGS:
            self._begin(tag, self._ids[-1] if self._ids else "")
        elif tag == "dt" and "sig" in (attributes.get("class") or "") and attributes.get("id"):
            self._begin(tag, attributes["id"] or "")
            self.sections[-1]["heading"] = re.sub(r"^samplewise\.(loop\.)?", "sw.", attributes["id"] or "")
        elif tag == "a" and "headerlink" in (attributes.get("class") or ""):
            self._skip = 1

    def _begin(self, tag: str, anchor: str) -> None:
        self.sections.append({"anchor": anchor, "heading": "", "text": ""})
        self._in_heading = tag

    def _separate(self, tag: str) -> None:
        if tag in BLOCKS and self.sections:
            self.sections[-1]["text"] += " "

    def handle_endtag(self, tag: str) -> None:
        self._separate(tag)
        if tag == "article":
            self._in_article = False
        elif tag == "section" and self._ids:
            self._ids.pop()
        elif tag == self._in_heading:
            self._in_heading = ""
        elif tag == "a":
            self._skip = 0

    def handle_data(self, data: str) -> None:
        if not self._in_article or not self.sections or self._skip or self._in_heading == "dt":
            return  # outside, the sign of a link to a heading, or a signature
        self.sections[-1]["heading" if self._in_heading in HEADINGS else "text"] += data


def entries(site: Path) -> list[dict[str, Any]]:
    """All sections of the pages in a directory, each with its page, title and keywords."""
    found = []
    for path in sorted(site.rglob("*.html")):
        address = path.relative_to(site).as_posix()
        if NOT_INDEXED.match(address):
            continue
        parser = Sections()
        parser.feed(path.read_text(encoding="utf-8"))
        title = parser.sections[0]["heading"].strip() if parser.sections else address
        for k, section in enumerate(parser.sections):
            found.append(
                {
                    "page": address,
                    "title": title,
                    "anchor": section["anchor"] if k else "",
                    "heading": section["heading"].strip() if k else "",
                    "text": " ".join(section["text"].split()),
                    "keywords": KEYWORDS.get(address.removesuffix(".html"), "") if not k else "",
                    "last": bool(LAST.match(address)),
                }
            )
    return found


def script(site: Path) -> str:
    """JavaScript that assigns the index to a global variable."""
    return f"window.SEARCH_INDEX = {json.dumps(entries(site), ensure_ascii=False)};\n"
