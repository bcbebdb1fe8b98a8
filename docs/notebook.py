"""Write the tutorials that link to a notebook of their name as notebooks beside them, without outputs.

python docs/notebook.py        # make docs
"""

import os
import re
from pathlib import Path

from nbformat import v4

DOCS = Path(__file__).parent
TUTORIALS = DOCS / "tutorials"
BLOCK = re.compile(r"^```python$\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<path>[^)\s#:]+)(?:#[^)\s]*)?\)")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> dict[Path, str]:
    """Path of each notebook -> its content."""
    pages = sorted(TUTORIALS.glob("*.md"))
    return {
        path.with_suffix(".ipynb"): notebook(path)
        for path in pages
        if f"]({path.stem}.ipynb)" in path.read_text(encoding="utf-8")
    }


def notebook(page: Path) -> str:
    """A Markdown page as a notebook: a code cell per python block, and a Markdown cell of what is between two."""
    cells = []
    # re.split returns texts at even places and the code of the blocks at odd ones.
    for k, part in enumerate(BLOCK.split(page.read_text(encoding="utf-8"))):
        source = part.strip() if k % 2 else prose(part, page)
        if source:
            cell = v4.new_code_cell(source) if k % 2 else v4.new_markdown_cell(source)
            cell.id = f"cell-{len(cells)}"  # instead of a random one
            cells.append(cell)
    return v4.writes(v4.new_notebook(cells=cells, metadata=METADATA)) + "\n"


def prose(text: str, page: Path) -> str:
    """Text of a Markdown cell: without the paragraph that offers the notebook, and with paths in place of links."""
    paragraphs = [part for part in text.strip().split("\n\n") if f"]({page.stem}.ipynb)" not in part]

    def path(match: re.Match[str]) -> str:
        target = os.path.relpath(page.parent / match["path"], DOCS.parent)
        return f"{match['text']} (`{Path(target).as_posix()}`)"

    return LINK.sub(path, "\n\n".join(paragraphs))


if __name__ == "__main__":
    for path, content in notebooks().items():
        path.write_text(content, encoding="utf-8")
        print(path)
