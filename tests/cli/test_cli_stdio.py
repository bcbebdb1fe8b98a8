"""Output that cannot be written, and names that no file system takes, are not blamed on the recipe."""

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import forks
import pytest
from recipes import HEALTHY, command, one_line

from samplewise.cli import stdio
from samplewise.cli.main import main

FULL = (
    "samplewise: standard output must be writable; found: No space left on device. Free some disk space, or redirect "
    "the output to another place.\n"
)
TALKING = HEALTHY + "\n\nfor _ in range(3000):\n    print('a line of the recipe')\n"


def run(*arguments, start=forks.run, **streams):
    """Run as a process; streams that are not given are captured. `start=subprocess.run`: a new interpreter."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return start([sys.executable, "-m", "samplewise.cli.main", *arguments], **streams, timeout=300)


def error_text(result):
    """Standard error without progress lines and notices of slow operations."""
    lines = result.stderr.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("epoch 1 ", "... ")))


@pytest.fixture
def full():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb", buffering=0) as device:
        yield device


@pytest.fixture
def closed():
    """Write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def trained(recipe):
    name = recipe(HEALTHY)
    assert command("train", name, "--epochs", 1).exit_code == 0
    return name


COMMANDS = pytest.mark.parametrize(
    ("name", "unbuffered"),  # both kinds of streams, each with some commands: a process takes seconds
    [
        pytest.param("train", "", marks=pytest.mark.slow),
        ("a recipe that prints", ""),
        pytest.param("a recipe that prints", "1", marks=pytest.mark.slow),
        ("doctor", "1"),
        ("report", ""),
    ],
)


# --- standard output -------------------------------------------------------------------------------------------------


def commands(recipe):
    return {
        "train": ["train", recipe(HEALTHY, "again.py"), "--epochs", "1"],
        "a recipe that prints": ["train", recipe(TALKING, "talking.py"), "--epochs", "1"],
        "doctor": ["doctor", recipe(HEALTHY, "again.py")],
        "report": ["report", "runs/recipe"],
    }


@pytest.mark.slow
@COMMANDS
def test_a_full_disk_behind_standard_output(name, unbuffered, recipe, trained, full, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    result = run(*commands(recipe)[name], stdout=full)
    assert error_text(result) == FULL
    assert result.returncode == 1


@pytest.mark.sweep(1 / 3)
@COMMANDS
def test_a_closed_pipe_behind_standard_output(name, unbuffered, recipe, trained, closed, monkeypatch):
    """The command ends without a message, like other programs."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    result = run(*commands(recipe)[name], stdout=closed)
    assert error_text(result) == ""
    assert result.returncode == 141


@pytest.mark.slow
def test_a_pipe_that_is_closed_during_output(recipe):
    arguments = [sys.executable, "-m", "samplewise.cli.main", "train", recipe(TALKING * 3), "--epochs", "1"]
    process = forks.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"a line of the recipe\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=300) == 141


def test_files_of_the_run_are_kept_if_output_fails(recipe, full):
    """The summary cannot be written; log and checkpoints can."""
    run("train", recipe(HEALTHY), "--epochs", "1", stdout=full)
    assert [path.name for path in Path("runs/recipe/checkpoints").iterdir()] == ["update-000000003.ckpt"]
    assert not Path("runs/recipe/run.lock").exists()
    assert command("train", "recipe.py", "--epochs", 2, "--resume").exit_code == 0


def test_a_print_in_the_loss_function_that_fails(recipe, full):
    text = HEALTHY + (
        "\n\ndef loss(model, batch):\n    print('x', flush=True)\n"
        "    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction='none')\n"
    )
    result = run("train", recipe(text), "--epochs", "1", stdout=full)
    assert (result.returncode, result.stderr.decode()) == (1, FULL)
    assert not Path("runs/recipe/run.lock").exists()


def test_an_error_of_the_recipe_is_reported_as_such(recipe, full):
    text = HEALTHY.replace("    x = ", "    open('/dev/full', 'w').write('x' * 100_000)\n    x = ")
    result = run("train", recipe(text), stdout=full)
    assert "recipe.py:12: in data" in result.stderr.decode()
    assert "OSError: [Errno 28] No space left on device" in result.stderr.decode()
    assert result.returncode == 1


# --- standard error --------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("stream", ["full", "closed"])
def test_standard_error_that_fails_does_not_end_a_training(recipe, stream, request):
    result = run("train", recipe(HEALTHY), "--epochs", "1", stderr=request.getfixturevalue(stream))
    assert result.returncode == 0
    assert "3 updates in all" in result.stdout.decode()


@pytest.mark.slow
def test_exit_code_if_standard_error_fails(recipe, full, closed):
    assert run("train", "none.py", stderr=full).returncode == 2
    assert run("train", recipe("1 / 0\n"), stderr=closed, start=subprocess.run).returncode == 1


@pytest.mark.slow
def test_help_with_a_full_disk(full):
    result = run("train", "--help", stdout=full, start=subprocess.run)
    assert (result.returncode, result.stderr.decode()) == (1, FULL)


@pytest.mark.slow
def test_both_fail(recipe, full):
    assert run("train", recipe(HEALTHY), "--epochs", "1", stdout=full, stderr=full).returncode == 1


@pytest.mark.slow
def test_streams_that_are_closed(recipe):
    """sys.stdout and sys.stderr are None."""
    shell = f"{sys.executable} -m samplewise.cli.main train {recipe(HEALTHY)} --epochs 1 >&- 2>&-"
    assert subprocess.run(shell, shell=True, timeout=300).returncode == 0
    assert Path("runs/recipe/checkpoints/update-000000003.ckpt").exists()


def test_streams_are_restored(monkeypatch, capsys):
    before = sys.stdout, sys.stderr
    monkeypatch.setattr(sys, "argv", ["samplewise", "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0 and (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\u4eba\\udcff\n"), ("utf-8", b"\xe4\xba\xba\\udcff\n")])
def test_characters_that_the_encoding_lacks(encoding, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors="strict"))
    with stdio.guarded_output():
        print("人" + os.fsdecode(b"\xff"), flush=True)
    assert written.getvalue() == shown


def test_guarded_streams_are_streams(capsys):
    with stdio.guarded_output():
        assert print("a") is None and sys.stdout.writelines(["b\n", "c\n"]) is None
        assert sys.stdout.write("def\n") == 4 and not sys.stdout.isatty()
        print("e", file=sys.stderr)
    assert capsys.readouterr() == ("a\nb\nc\ndef\n", "e\n")


# --- names -----------------------------------------------------------------------------------------------------------

UNREADABLE = "a recipe must be a Python file that can be read; found: {}. Check the path and its permissions."


@pytest.mark.parametrize("verb", ["train", "doctor"])
@pytest.mark.parametrize(
    ("name", "shown", "found"),
    [
        ("a" * 5000, f"{'a' * 100}... (5000 characters)", "File name too long"),
        ("a" * 252 + ".py", f"{'a' * 100}... (255 characters)", "No such file or directory"),
        ("a" * 253 + ".py", f"{'a' * 100}... (256 characters)", "File name too long"),
        ("ä" * 130 + ".py", "ä" * 130 + ".py", "File name too long"),  # 263 bytes
        ("b/" * 3000 + "a.py", f"{'b/' * 50}... (6004 characters)", "File name too long"),
        ("人.py", "人.py", "No such file or directory"),
        (".", ".", "Is a directory"),
        ("", ".", "Is a directory"),
        ("recipe.py/inside.py", "recipe.py/inside.py", "Not a directory"),
    ],
)
def test_paths_that_are_not_a_recipe(verb, name, shown, found, recipe):
    recipe(HEALTHY)
    result = command(verb, name)
    assert one_line(result) == f"{shown}: {UNREADABLE.format(found)}"
    assert result.exit_code == 2 and not Path("runs").exists()


def test_a_missing_recipe_with_several_processes():
    result = command("train", "a" * 5000, "--processes", 2)
    assert result.stderr.endswith(UNREADABLE.format("File name too long") + "\n")
    assert result.exit_code == 2


@pytest.mark.parametrize("verb", ["train", "doctor"])
def test_a_recipe_without_permission_to_read(verb, recipe, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    recipe(HEALTHY)
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read everything
    result = command(verb, "recipe.py")
    assert one_line(result) == f"recipe.py: {UNREADABLE.format('Permission denied')}"


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("name", ["ä 人 🎈.py", "a" * 252 + ".py", b"\xff.py", "-"])
def test_unusual_file_names_of_a_recipe(name, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    Path(os.fsdecode(path)).write_text(HEALTHY)
    result = run(b"train", path, b"--epochs", b"1")
    assert result.returncode == 0, result.stderr.decode()
    assert os.fsencode(Path(os.fsdecode(name)).stem) in result.stdout


def test_names_with_a_null_character(recipe):
    """They are refused before the command sees them."""
    for arguments in (["train", "a\0b.py"], ["doctor", "a\0b.py"], ["train", recipe(HEALTHY), "--run", "a\0b"]):
        result = command(*arguments)
        assert re.search(r"embedded null (byte|character in path)\.$", one_line(result)) and result.exit_code == 2


@pytest.mark.parametrize(("name", "found"), [("a" * 5000, "File name too long"), ("b/" * 3000, "File name too long")])
def test_paths_that_cannot_be_a_run_directory(name, found, recipe):
    result = command("train", recipe(HEALTHY), "--run", name)
    line = one_line(result)
    assert line.startswith("samplewise: Invalid value for --run: must be an accessible directory; found ")
    assert found in line and len(line) < 300 and result.exit_code == 2


def test_a_recipe_that_changes_the_working_directory(recipe):
    Path("elsewhere").mkdir()
    here = Path.cwd()
    result = command("train", recipe("import os\nos.chdir('elsewhere')\n" + HEALTHY), "--epochs", 1)
    assert result.exit_code == 0, result.output
    assert (here / "runs/recipe/log.jsonl").exists() and list((here / "elsewhere").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_recipe_from_a_pipe():
    """A pipe can be read only once."""
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_text, args=[HEALTHY])
    writer.start()
    result = command("train", "pipe", "--epochs", 1, "--run", "here")
    writer.join()
    assert result.exit_code == 0, result.output


def test_a_run_that_is_in_use(recipe, trained):
    """The line names the process that holds it, and the recipe is not blamed."""
    from samplewise.loop.run_dir import run_lock

    lock = run_lock(Path("runs/recipe"))
    lock.acquire()
    result = run("train", trained, "--epochs", "2", "--resume")
    lock.release()
    assert f"in use by process {os.getpid()} on host" in result.stderr.decode()
    assert "recipe.py" not in result.stderr.decode() and result.returncode == 1
