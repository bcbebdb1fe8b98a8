"""The typer application, and samplewise report."""

from pathlib import Path
from platform import python_version

import pytest
import torch
from recipes import HEALTHY, command, one_line, process

import samplewise
from samplewise.attribution.methods import METHODS
from samplewise.cli import attribute
from samplewise.cli.doctor import DTYPES
from samplewise.testing.runner import PRECISIONS

WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
from samplewise.cli.main import main
main()
"""

# Runs commands one after the other in a process, until one of them imports torch.
UNTIL_TORCH = """
import os
import runpy
import sys

# typer otherwise looks for a shell among the parent processes, and there may be none.
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "True"
for line in sys.argv[1:]:
    os.environ.pop("_SAMPLEWISE_COMPLETE", None)
    if line.startswith("samplewise"):  # the command line of a shell that asks for completion
        os.environ |= {"_SAMPLEWISE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        line = ""
    sys.argv = ["samplewise", *line.split()]
    try:
        runpy.run_module("samplewise", run_name="__main__")
    except SystemExit:
        print("SystemExit", line)
    if "torch" in sys.modules:
        sys.exit(f"torch was imported by: {line}")
"""
WITHOUT_TORCH = [
    "",
    "--help",
    "--version",
    "--show-completion bash",
    *(f"{name} --help" for name in ("train", "doctor", "report", "replay", "attribute", "privacy", "demo")),
    "dance",
    "train --dance",
    "train",
    "train missing.py",
    "train recipe.py --epochs x",
    "train recipe.py --epochs 1 --updates 1",
    "train recipe.py --microbatch x",
    "train recipe.py --clip -1",
    "train recipe.py --epsilon 1",
    "train recipe.py --run recipe.py",
    "doctor missing.py",
    "doctor --zoo --dtype x",
    "report",
    "report missing",
    "replay missing --update 1",
    "replay runs --update -1",
    "attribute missing.py",
    "attribute recipe.py --queries x",
    "attribute recipe.py --method x",
    "attribute recipe.py --damping -1",
    "privacy --epsilon 1",
    "privacy --delta 1e-5 --dataset-size 10 --batch 1 --epochs 1",
    "samplewise do",
    "samplewise train --ep",
    "samplewise train re",
    "samplewise report r",
]


def test_help_errors_and_completion_do_not_import_torch(recipe):
    recipe(HEALTHY)
    result = process(*WITHOUT_TORCH, code=UNTIL_TORCH, new=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("SystemExit") == len(WITHOUT_TORCH)
    errors = [line for line in result.stderr.splitlines() if not line.startswith(("samplewise: ", "missing.py: "))]
    assert errors == []


def test_a_command_that_computes_imports_torch():
    result = process("--version", "doctor", "--help", code=UNTIL_TORCH, new=True)
    assert result.stderr == "torch was imported by: doctor\n"


def test_the_names_of_the_precisions_of_the_zoo():
    assert tuple(PRECISIONS) == DTYPES


def test_the_names_of_the_methods_of_attribution():
    assert tuple(METHODS) == attribute.METHODS


def test_without_typer():
    result = process(code=WITHOUT_TYPER, new=True)
    assert result.stderr == "the command line needs typer: pip install 'samplewise[cli]'\n"
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "samplewise: Missing command. See samplewise --help."),
        (["dance"], "samplewise: No such command 'dance'. See samplewise --help."),
        (["train"], "samplewise: Missing argument 'RECIPE'."),
    ],
)
def test_bad_commands_get_one_line(arguments, output):
    result = command(*arguments)
    assert one_line(result) == output
    assert result.exit_code == 2


def test_a_process_ends_with_the_same_code():
    result = process("train", "recipe.py", "--epochs", "x", new=True)
    assert one_line(result).startswith("samplewise: Invalid value for '--epochs': ")
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (
            [],
            [
                "Write a recipe first",
                "Train the model of a recipe.",
                "Find wrong labels in a small dataset with a per-sample ledger.",
                "Check a recipe before training, or check this",
                "--install-completion",
            ],
        ),
        (["train"], ["--resume", "loss(model, batch)", "cross entropy", "AdamW", "runs/<name"]),
        (["doctor"], ["The exit code is 0 if no problem was found, and 1 if"]),
        (["report"], ["report.html", "comparison.html", "--to FILE", "--watch"]),
    ],
)
def test_help_texts(arguments, output):
    result = command(*arguments, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert [words for words in output if words not in text] == []


def test_the_version():
    result = command("--version")
    assert (result.exit_code, result.stderr) == (0, "")
    version = f"samplewise {samplewise.__version__}, torch {torch.__version__}, Python {python_version()}"
    assert result.stdout == f"{version}\n"


def test_a_report(recipe):
    command("train", recipe(HEALTHY), "--epochs", 2)
    result = command("report", "runs/recipe")
    assert (result.exit_code, result.stdout) == (0, "runs/recipe/report.html\n")
    assert "<title>recipe</title>" in Path("runs/recipe/report.html").read_text()


def test_a_report_without_a_run_directory():
    result = command("report", "runs/none")
    assert one_line(result).startswith("samplewise: Invalid value for RUN: a report needs a run directory; found none")
    assert result.exit_code == 2


def test_a_report_to_an_impossible_path(recipe):
    command("train", recipe(HEALTHY), "--epochs", 1)
    Path("file").touch()
    result = command("report", "runs/recipe", "--to", "file/page.html")
    assert one_line(result).startswith("the report cannot be written: [Errno 17] File exists")


def test_a_report_of_two_runs(recipe):
    for name in ("one.py", "two.py"):
        command("train", recipe(HEALTHY, name), "--epochs", 1)
    result = command("report", "runs/one", "runs/two")
    assert (result.exit_code, result.stdout) == (0, "comparison.html\n")
    assert "<title>one and two</title>" in Path("comparison.html").read_text()
    assert command("report", "runs/one", "--to", "some/place/page.html").stdout == "some/place/page.html\n"
    assert "<title>one</title>" in Path("some/place/page.html").read_text()


def test_watching_a_run_that_has_ended(recipe):
    command("train", recipe(HEALTHY), "--epochs", 1)
    result = command("report", "--watch", "runs/recipe")
    assert result.exit_code == 0
    assert result.stdout == "Training has ended: runs/recipe/report.html is not updated any more.\n"


def test_a_report_to_a_directory(recipe):
    command("train", recipe(HEALTHY), "--epochs", 1)
    Path("page.html").mkdir()
    result = command("report", "runs/recipe", "--to", "page.html")
    assert one_line(result) == "samplewise: Invalid value for --to: must be a file; found a directory, page.html."
    assert result.exit_code == 2
