"""Loading of a recipe: a Python file with plain functions.

def model(): ...                 returns an nn.Module
def data(): ...                  returns a loader, or (loader, validation loader)
def loss(model, batch): ...      losses (B,) or (losses, counts); default nn.CrossEntropyLoss()
def optimizer(model): ...        default AdamW, lr 1e-3
def metrics(): ...               name -> function (outputs, batch); default none
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from samplewise.errors import SamplewiseError

PACKAGE_DIRECTORY = Path(__file__).resolve().parents[1]
LIBRARY_DIRECTORIES = [
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
REQUIRED = {"model": "returns the model", "data": "returns a loader, or (loader, validation loader)"}


class RecipeError(Exception):
    """Raised for an error in the recipe; the message is shown to the user without a traceback of samplewise."""

    code = 1


class NoRecipeError(RecipeError):
    """Raised if the recipe file cannot be read; exit code 2, as for a bad argument."""

    code = 2


class Recipe:
    """The functions of a recipe, with defaults for those it does not define."""

    def __init__(self, path: Path, source: bytes | None = None):
        """Load the recipe. `source`: the content of the file, if it has been read already."""
        self.path = path
        self._module = _load(path, read_source(path) if source is None else source)
        for name, description in REQUIRED.items():
            if not callable(getattr(self._module, name, None)):
                raise RecipeError(f"{path}: a recipe must have a function {name}() that {description}; found none.")

    def model(self) -> nn.Module:
        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise self._wrong_return("model", "a torch.nn.Module", model)
        return model

    def data(self) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """The training loader, and the validation loader or None."""
        returned = self._call("data")
        loaders = returned if isinstance(returned, tuple) else (returned, None)
        if len(loaders) != 2 or not _is_iterable(loaders[0]) or not (loaders[1] is None or _is_iterable(loaders[1])):
            raise self._wrong_return("data", "a loader, or (loader, validation loader)", returned)
        return loaders

    def loss(self) -> Any:
        return getattr(self._module, "loss", nn.CrossEntropyLoss())

    def optimizer(self, model: nn.Module) -> Any:
        if not hasattr(self._module, "optimizer"):
            with recipe_errors(self.path):
                return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        optimizer = self._call("optimizer", model)
        if not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):  # sw.sgd(0.1) is a function
            raise self._wrong_return("optimizer", "a torch.optim.Optimizer", optimizer)
        return optimizer

    def metrics(self) -> Mapping[str, Any]:
        metrics = self._call("metrics") if hasattr(self._module, "metrics") else {}
        if not isinstance(metrics, Mapping):
            raise self._wrong_return("metrics", "a dict of names and functions (outputs, batch)", metrics)
        return metrics

    def _call(self, name: str, *arguments: Any) -> Any:
        with recipe_errors(self.path):
            return getattr(self._module, name)(*arguments)

    def _wrong_return(self, name: str, wanted: str, returned: object) -> RecipeError:
        code = getattr(getattr(self._module, name), "__code__", None)
        location = f"{self.path}:{code.co_firstlineno}" if code else str(self.path)
        description = type(returned).__name__
        if isinstance(returned, tuple) and len(returned) != 2:
            description = f"a tuple of {len(returned)}"
        return RecipeError(f"{location}: {name}() must return {wanted}; found {description}.")


@contextmanager
def recipe_errors(path: Path) -> Iterator[None]:
    """Raise any Exception of the block as a RecipeError that shows the user's lines."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(_describe_error(error, path)) from error


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def read_source(path: Path) -> bytes:
    """The content of a recipe's file."""
    try:
        return path.read_bytes()
    except OSError as why:
        raise NoRecipeError(
            f"{shortened(path)}: a recipe must be a Python file that can be read; found: {why.strerror}. Check the "
            "path and its permissions."
        ) from why


def shortened(path: Path) -> str:
    """A path for a message, of at most about 200 characters."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"


def _load(path: Path, source: bytes) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"recipe_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and loader workers look it up there
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: modules in its directory can be imported
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        text = (getattr(error, "text", None) or "").strip()
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        lines = [f"{path}:{line}" if line else str(path), *([f"    {text}"] if text else [])]
        raise RecipeError("\n".join([*lines, f"{type(error).__name__}: {message}"])) from error
    with recipe_errors(path):
        exec(code, module.__dict__)
    return module


# --- error messages ---------------------------------------------------------------------------------------------------


def _describe_error(error: Exception, path: Path) -> str:
    """Text of an error: the traceback frames in the user's files, and the message."""
    frames, message = _parse_worker_traceback(str(error))
    if not message:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [(frame.filename, str(frame.lineno), frame.name, str(frame.line)) for frame in stack]
        message = "".join(traceback.format_exception_only(error)).strip().removeprefix("samplewise.errors.")
    lines = [f"{file}:{line}: in {name}\n    {code}" for file, line, name, code in frames if _is_user_file(file)]
    if not lines and not isinstance(error, SamplewiseError):  # messages of samplewise need no location
        lines = [f"{path}: error while using the objects that it returns:"]
    return "\n".join([*lines, message])


def _parse_worker_traceback(text: str) -> tuple[list[tuple[str, str, str, str]], str]:
    """Parse the traceback text sent by a DataLoader worker: (file, line, function, code) of each frame, and message."""
    _, separator, worker_traceback = text.partition("Original Traceback (most recent call last):\n")
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)\n    (.*)', worker_traceback, re.MULTILINE)
    if not separator:
        return [], ""
    message = re.split(r"^  File .*\n(?:    .*\n)*", worker_traceback, flags=re.MULTILINE)[-1].strip()
    return frames, message


def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    file = Path(filename).resolve()
    return not any(file.is_relative_to(directory) for directory in (PACKAGE_DIRECTORY, *LIBRARY_DIRECTORIES))
