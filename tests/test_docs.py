"""Documentation: code blocks and examples run, links have targets, the public names are documented."""

import contextlib
import importlib.util
import io
import itertools
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import forks
import nbformat
import pytest
import torch
from nbclient import NotebookClient

import samplewise
import samplewise.errors

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG_DOCUMENTS = ("export.md",)  # tests/export has the same exports
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
MIGRATION = sorted((ROOT / "docs" / "migration").glob("*.md"))  # benchmarks/migration.py runs their code
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FRAMEWORKS = re.compile(r"^(?:from|import) (?:accelerate|keras|lightning|transformers|trl)\b", re.MULTILINE)
# tests/integrations runs the others.
LONG_EXAMPLES = ("diagonal_fisher.py", "find_wrong_labels.py")
PLAIN_EXAMPLES = [path for path in EXAMPLES if not FRAMEWORKS.search(path.read_text())]

PICTURE_KILOBYTES = 150
CODE_WIDTH = 88

# A text block below a python block is what the python block prints.
OUTPUT = re.compile(r"```\n\n```text\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# Comment before a block that needs a package outside of the extra `dev`.
NEEDS = re.compile(r"<!-- needs: \w+ -->\s+```python\n\Z")
FENCE = re.compile(r"^(?P<indent> *)(?:`{3,}|~{3,})(?P<info>[^`\n]*)$", re.MULTILINE)


def _blocks(text: str):
    """(first line, code) of each python block. A fence that only looks like one is an error."""
    fences = list(FENCE.finditer(text))
    assert len(fences) % 2 == 0, "a code fence is opened and not closed"
    for opening, closing in zip(fences[::2], fences[1::2], strict=True):
        info = opening["info"].strip()
        if info.lower().startswith("py") or opening["indent"]:
            # Blocks such as "python no-run", "py" or indented ones would not be run.
            assert opening.group() == "```python", f"write ```python, found {opening.group()!r}"
        if info == "python":
            yield text.count("\n", 0, opening.end()) + 1, text[opening.end() + 1 : closing.start()]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.name in LONG_DOCUMENTS else ()) for path in DOCUMENTS],
    ids=lambda path: path.name,
)
def test_code_blocks_run_in_order_without_a_warning(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": path.stem}
    text = path.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # transformers 5.23 has renamed what peft 0.21, the latest release, calls.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        for line, code in _blocks(text):
            if NEEDS.search(text, 0, text.index(code)):
                continue  # tests/integrations runs it
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # Leading newlines make a traceback point at the line of the document.
                exec(compile("\n" * line + code, str(path), "exec"), namespace)
            shown = OUTPUT.match(text, text.index(code) + len(code))
            if shown:
                assert printed.getvalue().strip() == shown["text"].strip(), f"{path.name}, line {line}"


def test_every_snippet_shows_what_it_prints():
    text = (ROOT / "docs" / "snippets.md").read_text()
    silent = [code for _, code in _blocks(text) if not OUTPUT.match(text, text.index(code) + len(code))]
    assert len(silent) == 1 and "print(" in silent[0], "only the lines that all blocks share print nothing"
    assert text.count("\n## ") == len(_table(text, "| you want |")) - 2


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
def test_tutorial_runs_without_a_warning(path, tmp_path):
    """Run a page as `make site` does, in a process of its own."""
    command = [sys.executable, str(ROOT / "docs" / "site" / "execute.py"), str(path), str(tmp_path)]
    run = forks.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    assert any(block["text"] for block in json.loads((tmp_path / "outputs.json").read_text())["blocks"])


NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebooks"]()

PRINTED = {
    "first-hour.ipynb": ["most suspicious of 1,797 samples", "bit-identical: True"],
    "gpu-report.ipynb": ["No problems found.", '"format": "samplewise-bench"'],
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == NOTEBOOKS[path], f"{path.name} must contain its page: run `make docs`"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.name == "gpu-report.ipynb" else ()) for path in NOTEBOOKS],
    ids=lambda path: path.name,
)
@pytest.mark.filterwarnings("ignore:Proactor event loop does not implement:RuntimeWarning")  # zmq on Windows
def test_a_notebook_runs_outside_of_the_repository(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in printed if output.get("name") == "stderr"] == []
    text = "".join(output.text for output in printed if output.output_type == "stream")
    assert [line for line in PRINTED[path.name] if line not in text] == []
    assert any("image/png" in output.get("data", {}) for output in printed) == (path.name == "first-hour.ipynb")


def test_the_notebook_of_gpus_installs_the_wheel(tmp_path, monkeypatch):
    """In Colab it opens a dialog; elsewhere the wheel must be there."""
    _, code = next(_blocks((ROOT / "docs" / "tutorials" / "gpu-report.md").read_text()))
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    with pytest.raises(SystemExit, match="Upload samplewise-VERSION"):
        exec(code, {})
    wheel = f"samplewise-{samplewise.__version__}-py3-none-any.whl"
    files = SimpleNamespace(upload=(tmp_path / wheel).touch)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    exec(code, {})
    assert [command[1:] for command in commands] == [["-m", "pip", "install", "-q", f"{wheel}[cli]"]]


def test_links_of_a_notebook_become_paths():
    """A notebook may be opened without the repository."""
    prose = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["prose"]
    page = ROOT / "docs" / "tutorials" / "page.md"
    text = "Before\n\nDownload [it](page.ipynb).\n\nSee [the ledger](../ledger.md#columns) and [torch](https://x.org/)."
    assert prose(text, page) == ("Before\n\nSee the ledger (`docs/ledger.md`) and [torch](https://x.org/).")


HOW_TO = dict(
    re.findall(r"^## (.*?)$.*?^```python$\n(.*?)^```$", (ROOT / "docs" / "how-to.md").read_text(), re.M | re.S)
)


@pytest.mark.slow
@pytest.mark.parametrize("section", HOW_TO)
def test_each_how_to_section_runs_alone(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # transformers 5.23 has renamed what peft 0.21, the latest release, calls.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        exec(compile(HOW_TO[section], section, "exec"), {"__name__": section})


def test_how_to_sections_are_scripts():
    """Each has one block, which imports what it uses."""
    text = (ROOT / "docs" / "how-to.md").read_text()
    assert len(HOW_TO) == text.count("\n## ") == len(list(_blocks(text)))
    assert all("import samplewise as sw" in code for code in HOW_TO.values())


def test_code_fits_the_width_of_a_page():
    """Longer lines are cut off on a screen of 1280 pixels. Write comments above them."""
    pages = [page for page in [*DOCUMENTS, *TUTORIALS, *MIGRATION] if page.name != "reference.md"]
    lines = [(page.name, line) for page in pages for _, code in _blocks(page.read_text()) for line in code.split("\n")]
    assert [(page, line) for page, line in lines if len(line) > CODE_WIDTH] == []


def test_the_readme_has_code_blocks():
    assert list(_blocks((ROOT / "README.md").read_text()))


def test_the_recipe_trains(tmp_path):
    _, recipe = next(_blocks((ROOT / "docs" / "command-line.md").read_text()))
    (tmp_path / "recipe.py").write_text(recipe)
    command = "-m samplewise.cli.main train recipe.py --epochs 1 --samples 64 --ledger".split()
    run = forks.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "3 updates in all" in run.stdout


@pytest.mark.parametrize("fence", ["```py", "```python skip", "```Python", "  ```python", "~~~python"])
def test_a_code_block_without_language_is_refused(fence):
    with pytest.raises(AssertionError, match="write ```python"):
        list(_blocks(f"{fence}\n1 / 0\n```\n"))


def test_a_block_is_found_with_its_line():
    assert list(_blocks("# title\n\n```python\na = 1\n```\n```\nshown\n```\n")) == [(3, "a = 1\n")]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.name in LONG_EXAMPLES else ()) for path in PLAIN_EXAMPLES],
    ids=lambda path: path.name,
)
def test_example_runs_without_a_warning(path, tmp_path, monkeypatch, capsys):
    """Run an example in this process, where torch is already imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path)])
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"


@pytest.mark.slow
@pytest.mark.parametrize("path", PLAIN_EXAMPLES, ids=lambda path: path.name)
def test_example_runs_as_a_script(path, tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"


# ------------------------------------------------------------------------------------------------------------- links


def _links(text: str):
    """Targets of the links and pictures outside of code."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def _anchors(path: Path):
    """Anchors as GitHub makes them from headings: lower case, no punctuation, - for spaces."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _dead_links(path: Path):
    for link in _links(path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *TUTORIALS, *MIGRATION, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name
)
def test_links_have_targets(path):
    assert list(_dead_links(path)) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[gone](other.md) [here](#a-title) [not here](#another) `[code](nowhere.md)`\n")
    assert list(_dead_links(page)) == ["other.md", "#another"]


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    assert index in _targets(ROOT / "README.md")
    pages = [*DOCUMENTS[1:], *TUTORIALS, *MIGRATION]
    assert [page.name for page in pages if page not in _targets(index) | {index}] == []


def _targets(page: Path):
    """Files that a page links to."""
    return {(page.parent / link.partition("#")[0]).resolve() for link in _links(page.read_text())}


def test_each_question_links_to_its_answer_in_the_first_column():
    """On a phone the last column is outside of the screen."""
    text = (ROOT / "docs" / "questions.md").read_text()
    rows = re.findall(r"^\| (?!question|-)(.*?) \|", text.partition("## Which object")[0], re.MULTILINE)
    assert len(rows) > 20 and [row for row in rows if not row.startswith("[")] == []


def test_every_example_has_its_section_in_the_examples_page():
    linked = _links((ROOT / "docs" / "examples.md").read_text())
    assert [path.name for path in EXAMPLES if f"../examples/{path.name}" not in linked] == []


def test_the_picture_is_small():
    assert (ROOT / "docs" / "picture.png").stat().st_size < PICTURE_KILOBYTES * 1024


# -------------------------------------------------------------------------------------------------------- comparison


def _table(text: str, start: str):
    """Rows of the first table that begins with `start`, as lists of cells without emphasis."""
    lines = text[text.index(start) :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[re.sub(r"\*\*|\\|`", "", cell).strip() for cell in row.split("|")[1:-1]] for row in rows]


def _tally():
    """Column of docs/comparison.md -> number of occurrences of each entry."""
    heads, _, *rows = _table((ROOT / "docs" / "comparison.md").read_text(), "| | samplewise | Opacus hooks")
    return {head: Counter(row[k] for row in rows) for k, head in enumerate(heads) if head}


def test_the_counts_of_the_readme_agree_with_the_comparison():
    rows = {row[0]: row[1:] for row in _table((ROOT / "README.md").read_text(), "| | samplewise | Opacus 1.6 hooks")}
    columns = ["samplewise", "Opacus hooks", "Opacus ghost", "BackPACK", "vmap(grad)"]
    assert [head.replace(" 1.6", "").replace(" 1.7", "") for head in rows[""]] == columns
    for k, name in enumerate(columns):
        words = _tally()[name]
        assert rows["right"][k].partition(" + ")[0] == str(words["right"])
        assert rows["right"][k].partition(" + ")[2].partition(" ")[0] == (str(words["right*"] or ""))
        assert rows["error"][k] == str(words["error"])
        assert rows["the replaced layers compute something else"][k] == str(words["other"] or "")
        assert rows["wrong numbers, no error"][k] == str(words["WRONG"])


@pytest.fixture
def benchmark(monkeypatch):
    """Namespace of a benchmark script, in float64."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield lambda name: runpy.run_path(str(ROOT / "benchmarks" / name))
    torch.set_default_dtype(before)


# The columns of other libraries need those libraries: `make comparison`.


def test_our_column_of_the_comparison_is_true(benchmark):
    comparison, text = benchmark("comparison.py"), (ROOT / "docs" / "comparison.md").read_text()
    shown = {row[0]: row[1] for row in _table(text, "| MLP |")}
    found = {case.name: comparison["COLUMNS"]["samplewise"](case).word for case in comparison["CASES"]}
    assert found == shown


@pytest.mark.slow
def test_our_row_of_the_training_loops_is_true(benchmark):
    loops, text = benchmark("loops.py"), (ROOT / "docs" / "comparison.md").read_text()
    heads, _, ours, *_ = _table(text, "| | short window |")
    found = [fact(loops["LIBRARIES"][0]) for fact in loops["FACTS"].values()]
    assert heads[1:] == list(loops["FACTS"])
    assert ours == ["samplewise", *(word.replace("NonFiniteLossError", "error") for word in found)]


# ------------------------------------------------------------------------------------------------------------- speed


def test_a_benchmark_table_replaces_the_one_in_the_document(benchmark, tmp_path):
    tables, page = benchmark("tables.py"), tmp_path / "page.md"
    page.write_text("before\n<!-- small -->\nold\n<!-- /small -->\nafter\n<!-- small-2 -->\nkept\n<!-- /small-2 -->\n")
    table = tables["Table"]("small", "Title", [["", "MLP"], ["ours", "0.5"]], caption="One thread.")
    for _ in range(2):  # the second time replaces what the first time wrote
        assert tables["write"](table, page)
    assert page.read_text().startswith(
        "before\n<!-- small -->\n\n|      | MLP |\n|------|-----|\n| ours | 0.5 |\n\nOne thread."
    )
    assert page.read_text().endswith("\n\n<!-- /small -->\nafter\n<!-- small-2 -->\nkept\n<!-- /small-2 -->\n")
    assert "old" not in page.read_text()
    assert not tables["write"](tables["Table"]("single", "Title", [[""]]), page)


def test_tables_of_measurements_are_of_one_run():
    text = (ROOT / "docs" / "speed.md").read_text() + (ROOT / "README.md").read_text()
    assert re.findall(r"(?i)preliminary|earlier (?:measurement|run)|later run than", text) == []


INSTRUCTIONS = [ROOT / "docs" / f"{name}.md" for name in ("attribution", "diagnostics", "gradients", "how-to", "step")]


@pytest.mark.parametrize("path", INSTRUCTIONS, ids=lambda path: path.name)
def test_instructions_have_no_long_tables_of_numbers(path):
    """Measurements have pages of their own."""
    numbers = re.findall(r"(?:^\|.*\| [-−]?\d[\d.,]* (?:\|.*)?\n){4,}", path.read_text(), re.MULTILINE)
    assert numbers == []


# --------------------------------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def reference():
    return runpy.run_path(str(ROOT / "docs" / "reference.py"))


def test_the_reference_is_up_to_date(reference):
    written = reference["TARGET"].read_text()
    assert written == reference["page"](), "docs/reference.md must say what the docstrings say: run `make docs`"


def test_the_reference_has_every_public_name_once(reference):
    named = [name for names in reference["SECTIONS"].values() for name in names] + reference["errors"]()
    public = {name.split(".")[0] for name in named} | set(MODULES)
    assert len(named) == len(set(named)) and sorted(public) == sorted(samplewise.__all__)


def test_a_docstring_becomes_markdown(reference):
    def function(size, keep):
        """What it does, 2 ** 3.

        size: how large,
        in bytes
        keep: whether
        other: this is no argument

            a = 1
        """

    assert reference["text"](function) == (
        "What it does, 2 \\*\\* 3.\n\n- `size`: how large,\nin bytes\n- `keep`: whether\nother: this is no argument\n\n"
        "```\na = 1\n```"
    )


def test_a_signature_reads_as_in_the_source(reference):
    def function(a: int, *, b: "str | None" = None) -> bool: ...

    assert reference["signatures"]("f", function) == "f(a: int, *, b: str | None = None) -> bool"


# ------------------------------------------------------------------------------------------------------ public names


def _public_errors():
    return {
        name
        for name, value in vars(samplewise.errors).items()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == samplewise.errors.__name__
        and not name.startswith("_")
    }


MODULES = ("attribution", "callbacks", "diagnostics", "loggers", "parallel", "testing")


def test_every_error_is_public():
    assert _public_errors() <= set(samplewise.__all__)


def test_each_public_name_is_exported_once_and_callable():
    assert len(samplewise.__all__) == len(set(samplewise.__all__))
    assert all(callable(getattr(samplewise, name)) for name in samplewise.__all__ if name not in MODULES)


def test_attribution_is_public():
    names = {"ProjectedStore", "hessian", "margin", "select", "evaluate", "influence", "trak", "ekfac"}
    assert names <= {*samplewise.attribution.__all__} <= {*dir(samplewise.attribution)}


def test_callbacks_are_public():
    assert {"EarlyStopping", "ModelCheckpoint", "LRMonitor", "MaxTime"} <= set(vars(samplewise.callbacks))
