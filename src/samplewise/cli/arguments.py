"""Arguments that more than one verb takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from samplewise.loop.devices import resolve

RecipeFile = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="A Python file with functions model() and data().", show_default=False),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps; auto takes the accelerator, if there is one.")
]


def device_named(name: str) -> torch.device:
    try:
        device = resolve(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as why:  # torch asserts that it was compiled for it
        found = str(why).strip().splitlines()[0]
        raise typer.BadParameter(
            f"must be a device that torch can use; found {name!r}: {found}", param_hint="--device"
        ) from why
    return device
