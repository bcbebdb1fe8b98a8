"""Command line arguments shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from samplewise.cli.completion import complete_recipe
from samplewise.distributed.launch import resolve_device

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
    try:
        device = resolve_device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as why:  # AssertionError: torch was built without this backend
        reason = str(why).strip().splitlines()[0]
        raise typer.BadParameter(
            f"must be a device that torch can use; found {name!r}: {reason}", param_hint="--device"
        ) from why
    return device
