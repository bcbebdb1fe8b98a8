"""Types as users see them, with mypy and pyright: tests/typing/*_types.py and the examples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RIGHT = HERE / "public_types.py"
WRONG = HERE / "wrong_types.py"


def pyright(*paths):
    """(file, line) of each error, with the settings of pyproject.toml."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *paths]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode in (0, 1), run.stderr
    errors = json.loads(run.stdout)["generalDiagnostics"]
    return {(Path(error["file"]), error["range"]["start"]["line"] + 1): error["message"] for error in errors}


def mypy(*options_and_paths):
    """(file, line) of each error. `make lint` has filled the cache with the settings of pyproject.toml."""
    command = [sys.executable, "-m", "mypy", "--output=json", *options_and_paths]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode in (0, 1), run.stderr
    errors = [json.loads(line) for line in run.stdout.splitlines() if line]  # without errors, mypy prints an empty line
    return {(ROOT / error["file"], error["line"]): error["message"] for error in errors}


@pytest.mark.parametrize("check", [pytest.param(mypy, marks=pytest.mark.slow), pyright])  # mypy: `make lint` runs it
def test_public_types(check):
    marked = [k for k, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# wrong")]
    errors = check(RIGHT, WRONG)
    assert marked
    assert sorted(errors) == [(WRONG, line) for line in marked], errors


# --- examples ---------------------------------------------------------------------------------------------------------

# As a user checks a script: without the settings of pyproject.toml.
STRICT = ("--config-file=", "--strict", "--ignore-missing-imports", "--python-version=3.11")
# Not errors of a script: untyped functions of torch and transformers, the result of a module, which torch declares as
# Any, and a base class of a package that is not installed.
OF_OTHERS = (
    "--untyped-calls-exclude=torch",
    "--untyped-calls-exclude=transformers",
    "--no-warn-return-any",
    "--allow-subclassing-any",
)


@pytest.mark.slow
def test_mypy_accepts_the_examples(tmp_path):
    assert mypy(*STRICT, *OF_OTHERS, f"--cache-dir={tmp_path}", "examples") == {}


@pytest.mark.slow
def test_pyright_accepts_the_examples():
    assert pyright("examples") == {}
