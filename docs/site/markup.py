"""Changes of a Markdown page on its way to the site: links, names of the API, columns of code, pages of scripts.

`folded` changes the HTML of the sidebar.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Blocks of code. Fences of four and more backticks are directives, whose content is Markdown.
CODE = re.compile(r"^```(?!`).*?^```$", re.M | re.S)
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
# Not in the text of a link and not in a heading.
NAME = re.compile(r"(?<!\[)`sw\.(?P<name>[\w.]+)(?P<call>\([^`<|]*\))?`(?!\])")
CAPTION = '<p class="caption"'
GROUP = re.compile(rf"{CAPTION}[^>]*>(?P<caption>.*?)</p>(?P<pages>.*?)(?={CAPTION}|\Z)", re.S)
COLUMNS = re.compile(
    r"^<!-- columns: (?P<left>.+?) \| (?P<right>.+?) -->$"
    r"\s*(?P<one>^```python$.*?^```$)\s*(?P<two>^```python$.*?^```$)\s*"
    r"^<!-- /columns.*? -->$",
    re.M | re.S,
)


def prose(text: str, change: Callable[[str], str]) -> str:
    """Apply a function to what is outside of code blocks."""
    parts, end = [], 0
    for block in CODE.finditer(text):
        parts += [change(text[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def links(text: str, source: Path, target: str, pages: Mapping[Path, str]) -> tuple[str, set[Path]]:
    """Let links to files of the repository lead to pages of the site; also return the scripts that are linked."""
    scripts: set[Path] = set()

    def follow(match: re.Match[str]) -> str:
        path = (source.parent / match["path"]).resolve()
        if path in pages:
            page = pages[path]
        elif path.suffix == ".py" and path.exists():
            scripts.add(path)
            page = script_page(path)
        else:
            return match.group()  # a picture, or a broken link, which Sphinx reports
        return f"]({os.path.relpath(page, Path(target).parent)}{match['anchor'] or ''})"

    return prose(text, lambda part: LINK.sub(follow, part)), scripts


def names(text: str, known: set[str]) -> str:
    """Link inline code such as `sw.clip(1.0)` to the entry of the name in the API reference."""

    def linked(match: re.Match[str]) -> str:
        target = f"samplewise.{match['name']}"
        return f"{{py:obj}}`{match.group()[1:-1]} <{target}>`" if target in known else match.group()

    def lines(part: str) -> str:
        return "\n".join(line if line.startswith("#") else NAME.sub(linked, line) for line in part.split("\n"))

    return prose(text, lines)


def columns(text: str) -> str:
    """Put two code blocks side by side, each below the name of its library."""

    def side_by_side(match: re.Match[str]) -> str:
        cells = [(match["left"], match["one"]), (match["right"], match["two"])]
        body = "\n".join(f"::::{{container}} column\n**{title}**\n\n{code}\n::::" for title, code in cells)
        return f":::::{{container}} columns\n{body}\n:::::"

    return COLUMNS.sub(side_by_side, text)


def buttons(text: str) -> str:
    """Show the links of the paragraph below a comment as buttons."""
    return re.sub(r"^<!-- buttons -->$", "{.buttons}", text, flags=re.M)


def folded(tree: str) -> str:
    """Sidebar with one group per caption. The first one is open, and the one of the page."""

    def fold(match: re.Match[str]) -> str:
        is_open = match.start() == tree.index(CAPTION) or "current-page" in match["pages"]
        return (
            f"<details class='group'{' open' * is_open}><summary class='caption'>{match['caption']}</summary>"
            f"{match['pages']}</details>"
        )

    return GROUP.sub(fold, tree)


def script_page(path: Path) -> str:
    return f"scripts/{path.relative_to(ROOT).with_suffix('.md')}"


def script(path: Path) -> str:
    """Page that shows a script."""
    name = path.relative_to(ROOT)
    return (
        f"---\norphan: true\n---\n\n# {name.name}\n\n`{name}`\n\n````python\n{path.read_text(encoding='utf-8')}````\n"
    )
