"""Command line arguments shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samplewise.cli.completion import complete_recipe

if TYPE_CHECKING:
    import torch

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

    from samplewise.parallel.launch import resolve_device

    try:
        device = resolve_device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as why:  # AssertionError: torch was built without this backend
        reason = str(why).strip().splitlines()[0]
        raise typer.BadParameter(
            f"must be a device that torch can use; found {name!r}: {reason}", param_hint="--device"
        ) from why
    return device


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
