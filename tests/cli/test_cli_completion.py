"""Shell completion."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from samplewise.cli.arguments import complete_recipe, complete_run
from samplewise.cli.main import app


@pytest.fixture(autouse=True)
def _files():
    """Two recipes and two runs in the working directory."""
    runs = ("runs/first/run.json", "runs/a/b/run.json", ".hidden/run.json")
    for name in ("recipe.py", "notes.txt", "more/[x].py", *runs):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("runs/empty").mkdir()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["more/[x].py", "recipe.py"]),
        ("re", ["recipe.py"]),
        ("more/", ["more/[x].py"]),
        ("more/[", ["more/[x].py"]),
        ("none", []),
        ("none/here", []),
    ],
)
def test_recipes(typed, found):
    assert complete_recipe(typed) == [str(Path(path)) for path in found]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["runs/a/b", "runs/first"]),
        ("runs/", ["runs/a/b", "runs/first"]),
        ("runs/f", ["runs/first"]),
        ("runs/empty", []),
    ],
)
def test_run_directories(typed, found):
    assert complete_run(typed) == [str(Path(path)) for path in found]


def completed(line):
    """Answer to the completion script of bash for the last word of a command line."""
    words = line.split(" ")
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_SAMPLEWISE_COMPLETE": "complete_bash"}
    return CliRunner().invoke(app, [], prog_name="samplewise", env=variables).stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("samplewise do", ["doctor"]),
        ("samplewise train --ep", ["--epochs", "--epsilon"]),
        ("samplewise train re", ["recipe.py"]),
        ("samplewise doctor re", ["recipe.py"]),
        ("samplewise train recipe.py --run runs/f", ["runs/first"]),
        ("samplewise report runs/first runs/a", ["runs/a/b"]),
    ],
)
def test_a_command_line_is_completed(line, found):
    assert completed(line) == found


def test_the_script_for_a_shell(monkeypatch):
    # typer otherwise looks for a shell among the parent processes, and there may be none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "True")
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="samplewise")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "_SAMPLEWISE_COMPLETE=complete_bash" in result.stdout
