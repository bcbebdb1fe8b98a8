"""Loading of a recipe: a Python file with plain functions.

def model(): ...                 returns an nn.Module
def data(): ...                  returns a loader, or (loader, validation loader)
def loss(model, batch): ...      losses (B,) or (losses, counts); or a criterion; default nn.CrossEntropyLoss(), for a
                                 model of transformers the loss that it computes itself
def optimizer(model): ...        default AdamW, lr 1e-3
def scheduler(optimizer): ...    stepped once per update; default none
def transforms(): ...            list of transforms of per-sample gradients; default none
def metrics(): ...               name -> function (outputs, batch) or (outputs, y); default none
def callbacks(): ...             list of callbacks of the trainer; default none
"""

from __future__ import annotations

import inspect
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
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samplewise.cli.recipe_source import RecipeError, read_definitions, read_source
from samplewise.core.batches import check_loader
from samplewise.core.validate import accepts
from samplewise.errors import BatchError, LossesError, SamplewiseError
from samplewise.integrations.transformers_losses import ModelLoss, computes_its_loss
from samplewise.loop.events import Listeners
from samplewise.step.config import check_scheduler
from samplewise.transforms.chain import Chain, as_chain

PACKAGE_DIRECTORY = Path(__file__).resolve().parents[1]
LIBRARY_DIRECTORIES = [
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
ARGUMENTS = {  # of the functions of a recipe
    "model": (),
    "data": (),
    "loss": ("model", "batch"),
    "optimizer": ("model",),
    "scheduler": ("optimizer",),
    "transforms": (),
    "metrics": (),
    "callbacks": (),
}
REQUIRED = {"model": "returns the model", "data": "returns a loader, or (loader, validation loader)"}
NO_LOSS = (
    "The recipe defines no loss, so nn.CrossEntropyLoss() is used, which is for class labels. A recipe for regression "
    "must define loss, for example loss = nn.MSELoss()."
)
NO_EXIT = "A recipe must not end the process, as sys.exit does. Raise an exception, or call trainer.stop in a callback."


class Recipe:
    """The functions of a recipe, with defaults for those it does not define."""

    def __init__(self, path: Path, source: bytes | None = None):
        """Load the recipe. `source`: the content of the file, if it has been read already."""
        self.path = path
        source = read_source(path) if source is None else source
        self._module = _load(path, source)
        self._definitions = read_definitions(source)
        self._model_has_loss = False  # known when `loss` is called
        # Raise RecipeError if a required name is missing, or if a name is a near miss of one that the recipe lacks.
        missing = [name for name in ARGUMENTS if not self.defines(name)]
        near_misses = self._definitions.near_misses(missing)
        for name, description in REQUIRED.items():
            if name in missing:
                near = near_misses.get(name)
                question = f" Did you mean {near}, in line {self._definitions.lines[near]}?" if near else ""
                raise RecipeError(
                    f"{self.path}: a recipe must have a function {name}() that {description}; found none.{question}"
                )
        for name, near in near_misses.items():
            raise RecipeError(
                f"{self._location(near)}: {near} is not a name of a recipe and would be ignored; did you mean {name}? "
                "Rename it, or begin its name with an underscore if it is not part of the recipe."
            )
        for name in filter(self.defines, ARGUMENTS):
            self._check_function(name)

    def defines(self, name: str) -> bool:
        """True if the recipe has something of this name; a module, as in `from torchvision import transforms`, is not
        of the recipe.
        """
        return hasattr(self._module, name) and not isinstance(getattr(self._module, name), ModuleType)

    def model(self) -> nn.Module:
        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise self._wrong_return("model", "a torch.nn.Module", model)
        return model

    def data(self) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """The training loader, and the validation loader or None."""
        returned = self._call("data")
        loaders = returned if isinstance(returned, tuple) else (returned, None)
        if len(loaders) == 2 and _is_loader(loaders[0]) and (loaders[1] is None or _is_loader(loaders[1])):
            return loaders
        remedy = ""
        if isinstance(returned, list):
            remedy = "Return a tuple of two loaders."
        elif any(map(_is_data, loaders)):
            remedy = "Wrap it in a DataLoader, for example DataLoader(dataset, batch_size=64, shuffle=True)."
        raise self._wrong_return("data", "a loader, or (loader, validation loader)", returned, remedy)

    def loss(self, model: nn.Module) -> Any:
        """The loss of the recipe. Default: cross entropy, or for a model of transformers the loss that it computes."""
        if self.defines("loss"):
            return self._module.loss
        self._model_has_loss = computes_its_loss(model)
        if self._model_has_loss:
            return ModelLoss()
        criterion = nn.CrossEntropyLoss()
        criterion.register_forward_pre_hook(_check_probabilities)
        return criterion

    def optimizer(self, model: nn.Module) -> Any:
        if not self.defines("optimizer"):
            with recipe_errors(self.path):
                return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        optimizer = self._call("optimizer", model)
        is_rule = callable(optimizer) and not isinstance(optimizer, type)  # sw.sgd(0.1) is a function
        if not (isinstance(optimizer, torch.optim.Optimizer) or is_rule):
            raise self._wrong_return("optimizer", "a torch.optim.Optimizer", optimizer)
        return optimizer

    def scheduler(self, optimizer: Any) -> Any:
        """The learning rate scheduler, or None."""
        if not self.defines("scheduler"):
            return None
        scheduler = self._call("scheduler", optimizer)
        if scheduler is None:
            raise self._wrong_return("scheduler", "a torch.optim.lr_scheduler of the optimizer", scheduler)
        with self._located("scheduler"):
            check_scheduler(scheduler, optimizer)
        return scheduler

    def transforms(self) -> Chain:
        if not self.defines("transforms"):
            return as_chain(())
        transforms = self._call("transforms")
        if transforms is None:
            raise self._wrong_return("transforms", "a list of transforms, such as [sw.clip(1.0)]", transforms)
        with self._located("transforms"):
            return as_chain(transforms)

    def metrics(self) -> Mapping[str, Any]:
        metrics = self._call("metrics") if self.defines("metrics") else {}
        if not isinstance(metrics, Mapping):
            raise self._wrong_return("metrics", "a dict of names and functions (outputs, batch)", metrics)
        return metrics

    def callbacks(self) -> list[Any]:
        callbacks = self._call("callbacks") if self.defines("callbacks") else []
        if not isinstance(callbacks, (list, tuple)):
            raise self._wrong_return("callbacks", "a list of callbacks, such as [sw.Ledger()]", callbacks)
        with self._located("callbacks"):
            Listeners(callbacks)  # raises TypeError for an object that is not a callback
        return list(callbacks)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise any Exception of the block as a RecipeError that shows the user's lines."""
        with recipe_errors(self.path):
            try:
                yield
            except LossesError as error:
                raise self.explained(error) from error

    def explained(self, error: SamplewiseError) -> SamplewiseError:
        """The error; if it is about the default loss, with a sentence that says so."""
        if isinstance(error, LossesError) and not self.defines("loss") and not self._model_has_loss:
            explained = LossesError(f"{error} {NO_LOSS}").with_traceback(error.__traceback__)
            for note in getattr(error, "__notes__", ()):
                explained.add_note(note)
            return explained
        return error

    def _check_function(self, name: str) -> None:
        """Raise RecipeError unless this name is a function with the right number of arguments; `loss` may be a
        criterion.
        """
        value = getattr(self._module, name)
        is_module = isinstance(value, nn.Module)
        if name == "loss" and is_module:
            return
        arguments = ARGUMENTS[name]
        accepted = callable(value) and not is_module and accepts(value, len(arguments))
        if accepted and not (name == "loss" and isinstance(value, type)):
            return
        description = f"{name}{inspect.signature(value)}" if inspect.isroutine(value) else _describe(value)
        signature = f"{name}({', '.join(arguments)})"
        criterion = ", or a criterion such as nn.MSELoss()" if name == "loss" else ""
        rename = "" if name in REQUIRED else " Rename it if it is not part of the recipe."
        raise RecipeError(
            f"{self._location(name)}: {name} must be a function {signature}{criterion}; found {description}. "
            f"Write def {signature} instead.{rename}"
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        with recipe_errors(self.path):
            return getattr(self._module, name)(*arguments)

    def _location(self, name: str) -> str:
        line = self._definitions.lines.get(name)
        return str(self.path) if line is None else f"{self.path}:{line}"

    @contextmanager
    def _located(self, name: str) -> Iterator[None]:
        """Raise errors about what a function has returned as a RecipeError with the line of the function."""
        try:
            yield
        except (TypeError, SamplewiseError) as error:
            raise RecipeError(f"{self._location(name)}: {error}") from error

    def _wrong_return(self, name: str, expected: str, returned: object, remedy: str = "") -> RecipeError:
        message = f"{self._location(name)}: {name}() must return {expected}; found {_describe(returned)}."
        return RecipeError(f"{message} {remedy}".rstrip())


def _describe(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, tuple) and len(value) != 2:
        return f"a tuple of {len(value)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__


def _is_loader(value: object) -> bool:
    try:
        check_loader(value)
    except BatchError:
        return False
    loaders = isinstance(value, list) and any(isinstance(item, DataLoader) for item in value)
    return not (loaders or _is_data(value))


def _is_data(value: object) -> bool:
    """True for data that a DataLoader can make batches of."""
    return isinstance(value, (Dataset, Tensor))


def _check_probabilities(criterion: nn.Module, arguments: tuple[Tensor, Tensor]) -> None:
    """Refuse targets of a regression in the default loss: they have the form of class probabilities."""
    target = arguments[1].detach()
    if target.is_floating_point() and bool((target < 0).any() | ((target.sum(1) - 1).abs() > 0.01).any()):
        raise LossesError(
            "CrossEntropyLoss needs class indices, or class probabilities that sum to one; found a target of "
            f"{target.dtype} whose values are not probabilities. Use target.long() for class indices."
        )


@contextmanager
def recipe_errors(path: Path) -> Iterator[None]:
    """Raise any Exception of the block, and sys.exit, as a RecipeError that shows the user's lines."""
    try:
        yield
    except (RecipeError, typer.BadParameter):
        raise
    except SystemExit as error:
        # The exit code 0 would mean that the command has done its work.
        ended = RecipeError(f"{_describe_error(error, path)}\n{NO_EXIT}")
        ended.code = error.code if isinstance(error.code, int) and error.code else 1
        raise ended from error
    except Exception as error:
        raise RecipeError(_describe_error(error, path)) from error


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


def _describe_error(error: BaseException, path: Path) -> str:
    """Text of an error: the traceback frames in the user's files, and the message."""
    frames, message = _parse_worker_traceback(str(error))
    if not message:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [(frame.filename, str(frame.lineno), frame.name, str(frame.line)) for frame in stack]
        message = "".join(traceback.format_exception_only(error)).strip().removeprefix("samplewise.errors.")
    lines = []
    for file, line, name, code in frames:
        directories = (PACKAGE_DIRECTORY, *LIBRARY_DIRECTORIES)
        is_library = any(Path(file).resolve().is_relative_to(directory) for directory in directories)
        if not (file.startswith("<") or is_library):
            lines.append(f"{file}:{line}: in {name}\n    {code}")
    if not lines and not isinstance(error, SamplewiseError):  # messages of samplewise need no location
        lines = [f"{path}: an error was raised while the objects of the recipe were used:"]
    return "\n".join([*lines, message])


def _parse_worker_traceback(text: str) -> tuple[list[tuple[str, str, str, str]], str]:
    """Parse the traceback text sent by a DataLoader worker: (file, line, function, code) of each frame, and message."""
    _, separator, worker_traceback = text.partition("Original Traceback (most recent call last):\n")
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)\n    (.*)', worker_traceback, re.MULTILINE)
    if not separator:
        return [], ""
    message = re.split(r"^  File .*\n(?:    .*\n)*", worker_traceback, flags=re.MULTILINE)[-1].strip()
    return frames, message
