"""Scripts that prepare the documentation site and run its code. `make site` builds and tests the pages themselves."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from browsing import chromium

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def markup():
    return runpy.run_path(str(SITE / "markup.py"))


@pytest.fixture(scope="module")
def migration():
    return runpy.run_path(str(ROOT / "benchmarks" / "migration.py"))


# ---------------------------------------------------------------------------------------- pages


def test_links_lead_to_pages_of_the_site(markup):
    source = ROOT / "docs" / "tutorials" / "page.md"
    text = "[a](../step.md#errors) [b](../../examples/fashion_mnist.py) ![c](shown.png) [d](https://e.org/f.md)\n"
    pages = {ROOT / "docs" / "step.md": "step.md"}
    changed, scripts = markup["links"](text, source, "tutorials/page.md", pages)
    assert changed == (
        "[a](../step.md#errors) [b](../scripts/examples/fashion_mnist.md) ![c](shown.png) [d](https://e.org/f.md)\n"
    )
    assert scripts == {ROOT / "examples" / "fashion_mnist.py"}


def test_names_of_the_api_are_linked_in_prose_only(markup):
    text = "# `sw.clip`\n`sw.clip(1.0)` and [`sw.clip`](x.md), `sw.unknown`\n```python\nx = '`sw.clip`'\n```\n"
    changed = markup["names"](text, {"samplewise.clip"})
    assert changed == text.replace("`sw.clip(1.0)`", "{py:obj}`sw.clip(1.0) <samplewise.clip>`")


def test_two_blocks_become_columns(markup):
    text = "<!-- columns: Theirs | ours -->\n\n```python\na = 1\n```\n\n```python\nb = 2\n```\n\n<!-- /columns: a -->\n"
    changed = markup["columns"](text)
    assert changed.count("::::{container} column\n") == 2
    assert changed.index("**Theirs**") < changed.index("a = 1") < changed.index("**ours**") < changed.index("b = 2")


def test_links_below_a_comment_become_buttons(markup):
    assert markup["buttons"]("# Title\n\n<!-- buttons -->\n[a](b.md)\n") == "# Title\n\n{.buttons}\n[a](b.md)\n"


def test_groups_of_the_sidebar_fold(markup):
    """The first group is open, and that of the page."""
    caption = '<p class="caption" role="heading"><span>{0}</span></p><ul><li class="toctree-l1 {1}">{0}</li></ul>\n'
    pages = [("Start", ""), ("Tutorials", ""), ("How-to", "current current-page"), ("Project", "")]
    folded = markup["folded"]("".join(caption.format(*page) for page in pages))
    groups = folded.split("</details>")[:-1]
    assert [group.count("<details class='group' open>") for group in groups] == [1, 0, 1, 0]
    assert [group.count("<details class='group'>") for group in groups] == [0, 1, 0, 1]
    assert groups[2].count("<summary class='caption'><span>How-to</span></summary><ul><li") == 1


def test_the_sidebar_is_folded_after_the_theme_has_made_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # conf.py adds its directory
    connected = []

    class Application:
        def connect(self, event, function, priority):
            connected.append((event, function, priority))

    runpy.run_path(str(SITE / "conf.py"))["setup"](Application())
    [(event, function, priority)] = connected
    assert event == "html-page-context" and priority > 500
    context = {"furo_navigation_tree": '<p class="caption"><span>Start</span></p><ul></ul>'}
    function(None, "index", "page.html", context, None)
    assert context["furo_navigation_tree"].startswith("<details class='group' open>")


def test_the_search_page_loads_the_index_before_the_script_that_reads_it():
    theme = "{% block htmltitle %}{% endblock %}{% block content %}{% endblock %}{% block scripts %}theme{% endblock %}"
    templates = {"page.html": theme, "search.html": (SITE / "templates" / "search.html").read_text()}
    page = jinja2.Environment(loader=jinja2.DictLoader(templates)).get_template("search.html")
    shown = page.render(docstitle="samplewise", pathto=lambda path, resource: path)
    places = ['id="search-results"', "theme", "_static/search-index.js", "_static/search.js"]
    assert sorted(places, key=shown.index) == places


def test_a_page_of_a_script_shows_its_code(markup):
    path = ROOT / "examples" / "fashion_mnist.py"
    assert markup["script_page"](path) == "scripts/examples/fashion_mnist.md"
    assert path.read_text() in markup["script"](path)


# -------------------------------------------------------------------------------------- outputs


def execute(page, tmp_path):
    command = [sys.executable, str(SITE / "execute.py"), str(page), str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_page_is_run_and_its_outputs_are_kept(tmp_path):
    page = tmp_path / "page.md"
    draw = "from matplotlib import pyplot as plt\nplt.plot([1, 2])"
    page.write_text(f"```python\na = 2\n```\n\n```python\nprint(a + 1)\n{draw}\n```\n")
    assert execute(page, tmp_path).returncode == 0
    first, second = json.loads((tmp_path / "out" / "outputs.json").read_text())["blocks"]
    assert first == {"text": "", "figures": []}
    assert second == {"text": "3\n", "figures": ["1-1.png"]}
    assert (tmp_path / "out" / "1-1.png").stat().st_size > 1000


def test_an_error_and_a_warning_of_a_page_name_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nimport warnings\nwarnings.warn('careful')\n```\n")
    run = execute(page, tmp_path)
    assert run.returncode != 0
    assert f'"{page}", line 5' in run.stderr
    assert "UserWarning: careful" in run.stderr
    assert not (tmp_path / "out" / "outputs.json").exists()


def test_outputs_are_shown_below_their_block(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    outputs = runpy.run_path(str(SITE / "outputs.py"))
    result = {"blocks": [{"text": "3\n", "figures": ["0-1.png"]}], "seconds": 1.2}
    shown = outputs["shown"]("```python\nprint(3)\n```\n\nend\n", result, "/outputs/page")
    assert shown.index("print(3)") < shown.index("\n3\n") < shown.index("/outputs/page/0-1.png") < shown.index("end")


def test_outputs_that_a_page_contains_are_kept(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    outputs = runpy.run_path(str(SITE / "outputs.py"))
    result = {"blocks": [{"text": "3\n", "figures": []}, {"text": "", "figures": ["1-1.png"]}], "seconds": 1.2}
    text = "```python\nprint(n)\n```\n\n```text\n4\n```\n\n```python\nplot()\n```\n\n![Lines](full.png)\n"
    assert outputs["shown"](text, result, "/outputs/page") == text


def test_a_block_that_needs_another_package_is_not_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n<!-- needs: trl -->\n```python\n1 / 0\n```\n")
    run = execute(page, tmp_path)
    assert run.returncode == 0, run.stderr
    blocks = json.loads((tmp_path / "out" / "outputs.json").read_text())["blocks"]
    assert [block["text"] for block in blocks] == ["1\n", ""]


# --------------------------------------------------------------------------------------- search


def html(title, *sections, text="Text."):
    """Page as Sphinx writes it. Each section has an id, a heading and a text."""
    parts = "".join(
        f"<section id='{i}'><h2>{h}<a class='headerlink'>¶</a></h2><p>{t}</p></section>" for i, h, t in sections
    )
    return f"<nav>clip</nav><article><section id='top'><h1>{title}</h1><p>{text}</p>{parts}</section></article>"


PAGES = {
    "index": html("samplewise", text="Clip the gradient of each sample."),
    "changelog": html("Changelog", ("v1", "Clip", "clip clip clip clip")),
    "transforms": html("Transforms", ("bounds", "Clip each sample", "Norms are <b>bound</b>ed."), text="clip"),
    "tutorials/one-sample": html("One sample at a time", text="A stream, sample by sample."),
    "reference/transforms": "<article><h1>Transforms</h1><dl><dt class='sig sig-object py' id='samplewise.clip'>"
    "clip(max_norm)</dt><dd><p>Bounds norms.</p></dd></dl></article>",
    "about": html("About time", text="One sample: it takes time at least, and a sample of time."),
    "_modules/samplewise/clip": html("clip"),
}


@pytest.fixture
def search_site(monkeypatch, tmp_path):
    """Directory with PAGES, their index and a search page."""
    monkeypatch.syspath_prepend(SITE)
    search = runpy.run_path(str(SITE / "search.py"))
    for name, text in PAGES.items():
        path = tmp_path / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "search-index.js").write_text(search["script"](tmp_path), encoding="utf-8")
    (tmp_path / "search.js").write_text((SITE / "static" / "search.js").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "search.html").write_text(
        "<meta charset=utf-8><div id='search-results'></div><script src='search-index.js'></script>"
        "<script src='search.js'></script>"
    )
    return tmp_path


def test_the_index_has_each_section_with_its_anchor(search_site):
    text = (search_site / "search-index.js").read_text(encoding="utf-8")
    entries = json.loads(text.removeprefix("window.SEARCH_INDEX = ").removesuffix(";\n"))
    shown = {(entry["page"], entry["anchor"]): entry for entry in entries}
    section = shown["transforms.html", "bounds"]
    assert (section["title"], section["heading"], section["text"]) == (
        "Transforms",
        "Clip each sample",
        "Norms are bounded.",
    )
    assert shown["reference/transforms.html", "samplewise.clip"]["heading"] == "sw.clip"
    assert "minibatch" not in shown["transforms.html", ""]["text"] and shown["transforms.html", ""]["keywords"]
    assert [entry["page"] for entry in entries if entry["last"]] == ["changelog.html"] * 2
    assert not any("_modules" in page or page == "search.html" for page, _ in shown)


def test_titles_and_headings_come_first_and_the_changelog_last(search_site):
    with chromium() as browser:

        def search(query):
            browser.driver.get((search_site / "search.html").as_uri() + f"?q={query}")
            return browser.texts("#search-results li a"), browser.texts("#search-results li p")

        titles, _ = search("clip")
        assert titles[:2] == ["Transforms › sw.clip", "Transforms › Clip each sample"]
        assert titles[-1].startswith("Changelog")
        assert search("one sample at a time")[0][0] == "One sample at a time"
        assert search("class imbalance")[0][0] == "Transforms"  # a keyword, which is not in the text
        titles, excerpts = search("gradients")
        assert (titles[0], excerpts[0]) == ("samplewise", "Clip the gradient of each sample.")
        assert browser.texts("mark") == ["gradient"]
        assert search("xyzzy") == ([], [])
        assert browser.texts(".search-summary")[0].startswith("Nothing found")
        assert browser.complaints() == []


def test_keywords_are_those_of_pages(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    keywords = runpy.run_path(str(SITE / "keywords.py"))["KEYWORDS"]
    assert [page for page in keywords if not (ROOT / "docs" / f"{page}.md").exists()] == []


# ------------------------------------------------------------------------------------ migration


PAGE = """
```python
x = 2.0
```

<!-- columns: Theirs | ours -->

```python
y = x * 2
```

```python
y = x + {}
```

<!-- /columns: {} -->

<!-- measured: y -->
old
<!-- /measured -->
"""


@pytest.mark.parametrize("claim", ["y", "y ~ 0.01"])
def test_both_sides_of_a_page_are_compared(migration, tmp_path, claim):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("2.0", claim))
    left, right = migration["run"](page)
    assert (left["y"], right["y"]) == (4.0, 4.0)


@pytest.mark.parametrize(("added", "claim"), [("2.1", "y"), ("2.1", "y ~ 0.01"), ("torch.ones(2)", "y")])
def test_a_difference_is_an_error(migration, tmp_path, added, claim):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch\n```\n" + PAGE.format(added, claim))
    with pytest.raises(ValueError, match=r"y must have one shape|the page claims: y"):
        migration["run"](page)


def test_a_correlation_is_checked(migration):
    one, two = {"s": torch.arange(9.0)}, {"s": torch.arange(9.0) ** 2}
    migration["compare"]("correlation of s > 0.9", one, two)
    with pytest.raises(ValueError, match=r"the page claims: correlation of s > 0\.99; found 0\.96"):
        migration["compare"]("correlation of s > 0.99", one, two)


def test_the_measured_number_is_written(migration, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("2.0", "y"))
    migration["check"](page, write=True)
    text = page.read_text()
    assert "`y`: **4** with Theirs, **4** with samplewise." in text and "old" not in text
    assert text.endswith("\n<!-- /measured -->\n")


def test_every_migration_page_compares_something_and_has_a_number(migration):
    for page in (ROOT / "docs" / "migration").glob("*.md"):
        text = page.read_text()
        assert any(part.claims for part in migration["parts"](text)), page
        assert migration["MEASURED"].search(text), page
        assert "takes **" in text or "with samplewise." in text, page
