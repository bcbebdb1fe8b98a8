"""Build the documentation site into build/site.

    python docs/site/build.py        # make site

The sources are the Markdown pages of docs/, CHANGELOG.md and CONTRIBUTING.md, which also read well on GitHub. This
script copies them to build/site-source, adds what only the site has, and calls Sphinx: navigation, API reference,
outputs of the tutorials, columns of the migration pages, links to names and to source files. Unchanged files are not
written again, so that Sphinx reads only what has changed. Warnings are errors. The index of the search is made from the
pages that Sphinx has written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = DOCS.parent
sys.path[:0] = [str(HERE), str(DOCS)]

import api  # noqa: E402
import markup  # noqa: E402
import outputs  # noqa: E402
import search  # noqa: E402
from navigation import NAVIGATION  # noqa: E402

STAGE = ROOT / "build" / "site-source"
TARGET = ROOT / "build" / "site"
RUNS = ROOT / "build" / "site-outputs"
# Pages that show what their code prints and draws.
EXECUTED = {DOCS / "quick-start.md", *(DOCS / "tutorials").glob("*.md")}
FILES = (".png", ".svg", ".ipynb")  # pictures and notebooks
# Files and directories that are no pages of their own -> the page to which links to them lead.
ALIASES = {
    ROOT / "README.md": "index.md",
    ROOT / "examples": "examples.md",
    DOCS / "reference.md": "reference.md",
}


def main() -> None:
    written = stage()
    for path in STAGE.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()
    options = ["-b", "html", "-W", "--keep-going", "-n", "-q", "-c", str(HERE)]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(ROOT / "build" / "site-doctrees")]
    done = subprocess.run([*command, str(STAGE), str(TARGET)], check=False)
    if done.returncode:
        sys.exit("the site must build without a warning; see the lines above. Paths begin with build/site-source.")
    put(TARGET / "_static" / "search-index.js", search.script(TARGET).encode())
    print(f"site: {TARGET / 'index.html'}")


def stage() -> set[Path]:
    """Write all pages, pictures and notebooks that Sphinx reads; return their paths."""
    sources = pages()
    targets = {path: name for name, path in sources.items()} | ALIASES
    known = api.known()
    scripts: set[Path] = set()
    written = set()
    for target, source in sources.items():
        text = source.read_text(encoding="utf-8")
        if source in EXECUTED:
            text = outputs.shown(text, outputs.run(source, RUNS / source.stem), f"/outputs/{source.stem}")
        text, linked = markup.links(text, source, target, targets)
        scripts |= linked
        text = markup.buttons(markup.columns(markup.names(text, known)))
        written.add(write(target, text + (navigation() if target == "index.md" else "")))
    for target, text in api.pages().items():
        written.add(write(target, markup.names(text, known)))
    written |= {write(markup.script_page(path), markup.script(path)) for path in scripts}
    written |= {put(STAGE / path.relative_to(DOCS), path.read_bytes()) for path in files(DOCS)}
    written |= {put(STAGE / "outputs" / path.relative_to(RUNS), path.read_bytes()) for path in files(RUNS)}
    return written


def pages() -> dict[str, Path]:
    """Path of each page in the site -> its source. The API reference replaces docs/reference.md."""
    found = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
    found |= {"changelog.md": ROOT / "CHANGELOG.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
    return {target: source for target, source in found.items() if target != "reference.md"}


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in FILES]


def navigation() -> str:
    """Hidden tables of contents, which make the sidebar."""
    trees = ["\n".join(["```{toctree}", ":hidden:", f":caption: {c}", "", *p, "```"]) for c, p in NAVIGATION.items()]
    return "\n" + "\n\n".join(trees) + "\n"


def write(target: str, text: str) -> Path:
    return put(STAGE / target, text.encode())


def put(path: Path, content: bytes) -> Path:
    """Write a file unless it has this content."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


if __name__ == "__main__":
    main()
