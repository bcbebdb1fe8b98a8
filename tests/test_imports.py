"""Imports of the engine and of the package without its extras."""

import ast
import contextlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import samplewise as sw

ENGINE = Path(__file__).parents[1] / "src" / "samplewise" / "engine"
ALLOWED = ("torch", "samplewise.errors", "samplewise.core", "samplewise.parallel", "samplewise.engine")


def _imported(path: Path):
    """Absolute names of the modules that `path` imports, wherever in the file."""
    package = ["samplewise", "engine", *path.relative_to(ENGINE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from .. import errors` names the module on the right, `from ..errors import E` left.
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from names if module == "samplewise" else [module]


def _is_allowed(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names or any(
        name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED
    )


def _files():
    return sorted(ENGINE.rglob("*.py"))


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_the_engine_imports_only_the_standard_library_torch_and_lower_layers(path):
    assert [name for name in _imported(path) if not _is_allowed(name)] == []


def test_the_engine_has_modules():
    assert _files()


EXTRAS = ("safetensors", "rich", "typer", "matplotlib", "sklearn", "torchmetrics", "transformers", "tensorboard")


def test_everything_but_runs_works_without_the_extras(tmp_path):
    """The error of a missing package names the command that installs it."""
    script = f"""
import subprocess
import sys
import typing
sys.modules.update(dict.fromkeys({EXTRAS}))
import torch
import samplewise as sw
import samplewise.loop.checkpoint.directory

model = torch.nn.Linear(2, 1)
step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b)[:, 0], transforms=[sw.clip(1.0)])
sw.Trainer(step, device="cpu").fit([torch.randn(4, 2)], epochs=1)
try:
    sw.Trainer(step, run={str(tmp_path)!r}, progress=False, device="cpu").fit([torch.randn(4, 2)], epochs=2)
except ImportError as missing:
    print(missing)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "checkpoints need safetensors: pip install 'samplewise[train]'"


def test_slow_imports_are_deferred():
    slow = [*(f"torch.distributed.{name}" for name in ("fsdp", "tensor", "checkpoint")), "samplewise.testing.cases"]
    script = f"import sys, samplewise; print([name for name in {slow} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert run.stdout.strip() == "[]", run.stderr


LAZY = """
import pickle, sys
import samplewise
assert "torch" not in sys.modules
assert set(samplewise.__all__) < set(dir(samplewise))
assert not hasattr(samplewise, "__wrapped__")  # of inspect; does not import torch
assert "torch" not in sys.modules
samplewise.gradients
assert not any(f"samplewise.{name}" in sys.modules for name in ("step", "loop", "attribution", "privacy", "ledger"))
import samplewise.check
before = samplewise.check
from samplewise import *
assert Step is samplewise.Step and pickle.loads(pickle.dumps(samplewise.Step)) is samplewise.Step
assert before is samplewise.check is check is sys.modules["samplewise.check"].check
assert samplewise.callbacks is callbacks is samplewise.loop.callbacks
assert samplewise.loggers is loggers is samplewise.loop.loggers
assert samplewise.attribution.trak is trak
assert samplewise.parallel is parallel and callable(parallel.fsdp) and callable(parallel.join)
assert [name for name in dir(samplewise) if not name.startswith("_")] == sorted(samplewise.__all__)  # no modules
import samplewise.exports
assert sorted(name for name in vars(samplewise.exports) if not name.startswith("_")) == samplewise.__all__
try:
    samplewise.Steps
except AttributeError as error:
    print(error)
"""


def test_public_names_are_imported_at_their_first_use():
    """A submodule that is imported before does not take the place of the function of its name."""
    run = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=600)
    assert run.stdout == "module 'samplewise' has no attribute 'Steps'\n", run.stderr


def objects():
    model = nn.Linear(2, 1)
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b)[:, 0])
    yield step, set()
    yield sw.Trainer(step, device="cpu"), {"model", "loader", "fast_dev_run", "expected_updates"}  # for callbacks
    yield sw.gradients(model(torch.randn(3, 2))[:, 0], model), set()
    yield sw.Ledger(), set()


def test_objects_list_public_names():
    """TAB shows members of the class and arguments of the constructor, and nothing that a user must not touch."""
    for value, others in objects():
        cls = type(value)
        names = {name for name in dir(value) if not name.startswith("_")}
        assert names <= {*dir(cls), *inspect.signature(cls).parameters, *others}, cls
        assert {"run", "over"} <= names or cls is not sw.Step


def test_no_property_has_a_literal_type():
    """jedi 0.20 fails at them, and TAB then shows nothing."""
    for cls in (value for name in sw.__all__ if isinstance(value := getattr(sw, name), type)):
        for name, member in inspect.getmembers(cls, lambda member: isinstance(member, property)):
            with contextlib.suppress(NameError):  # a name of type checkers, which is not looked at
                hint = typing.get_type_hints(member.fget).get("return")
                assert typing.get_origin(hint) is not typing.Literal, (cls, name)
