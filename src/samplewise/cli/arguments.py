"""Command line arguments shared by several commands, and the completion of their paths by shells."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samplewise.core.files import RUN_FILE

if TYPE_CHECKING:
    import torch

DEPTH = 3  # directories below the one that was typed


def complete_recipe(incomplete: str) -> list[str]:
    """Return the Python files that begin with what was typed, there and one directory below."""
    return _shown(path for depth in range(2) for path in _matches(incomplete, depth, "*.py"))


def complete_run(incomplete: str) -> list[str]:
    """Return the run directories that begin with what was typed, at most three levels below."""
    return _shown(path.parent for depth in range(1, DEPTH + 1) for path in _matches(incomplete, depth, RUN_FILE))


def _matches(incomplete: str, depth: int, name: str) -> Iterator[Path]:
    """Paths `incomplete*/.../name` with `depth` directories between, or `incomplete*` that match `name` for depth 0."""
    start = glob.escape(incomplete)
    pattern = f"{start}{name}" if depth == 0 else os.path.join(f"{start}*", *["*"] * (depth - 1), name)
    return map(Path, glob.iglob(pattern))  # without hidden files


def _shown(paths: Iterable[Path]) -> list[str]:
    return sorted(str(path) for path in paths)


recipe_argument = typer.Argument(
    metavar="RECIPE",
    help="A Python file with functions model() and data().",
    show_default=False,
    autocompletion=complete_recipe,
)
RecipeFile = Annotated[Path, recipe_argument]
OptionalRecipeFile = Annotated[Path | None, recipe_argument]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps; auto: the accelerator if there is one, else cpu.")
]


def device_named(name: str) -> torch.device:
    """The device for the value of --device; raises typer.BadParameter if torch cannot use it."""
    import torch

    from samplewise.core.memory import device_function
    from samplewise.parallel.launch import resolve_device

    try:
        device = resolve_device(name)
        torch.empty(0, device=device)
        choose = None if device.index is None else device_function(device, "set_device")
        if choose is not None:
            choose(device)  # for functions that refer to the current device
    except (RuntimeError, AssertionError) as why:  # AssertionError: torch was built without this backend
        reason = str(why).strip().splitlines()[0]
        raise typer.BadParameter(
            f"must be a device that torch can use; found {name!r}: {reason}", param_hint="--device"
        ) from why
    return device


def check_one_of(**options: object) -> None:
    """Raise typer.BadParameter unless exactly one of two options, name -> value, is given."""
    names = [f"--{name.replace('_', '-')}" for name in options]
    flags = [value is not None for value in options.values()]
    if sum(flags) != 1:
        count = "both" if any(flags) else "neither"
        raise typer.BadParameter(f"give one of {' and '.join(names)}; found {count}.", param_hint=names[0])


@contextmanager
def bad_parameters(default: str | None = None, options: tuple[str, ...] = ()) -> Iterator[None]:
    """Report arguments that a function of the library refuses as errors of the command line.

    The first word of a message names the option.
    options: names of options; default: any
    default: option to name if the first word is not one; without it, other errors are not changed
    """
    try:
        yield
    except ValueError as why:
        name = re.split(r"\W", str(why), maxsplit=1)[0]
        if options and name not in options:
            if default is None:
                raise
            name = default
        raise typer.BadParameter(str(why), param_hint=f"--{name.replace('_', '-')}") from why
