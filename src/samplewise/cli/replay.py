"""`samplewise replay RUN --update N`: recompute one update of a recorded run and list its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import Device, complete_run, device_named
from samplewise.cli.recipe_source import read_source
from samplewise.core.files import RECIPE_FILE, absolute, read_json


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", autocompletion=complete_run)],
    update: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of the update, from 0 as in the ledger.", show_default=False)
    ],
    limit: Annotated[
        int, typer.Option(min=1, metavar="K", help="Number of samples, those with the largest norms.")
    ] = 20,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The recipe. Default: the one that the run was started with.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Recompute one update of a run from the checkpoint before it, and list its samples by their gradient norms.

    For the question: what happened at this loss spike? Without a checkpoint before the update, the run is recomputed
    from its beginning. The run must be one of `samplewise train`, in one process and without --epsilon; its directory
    is not changed. If the run has a ledger, the recomputed losses are compared with it.
    """
    directory = absolute(run)
    try:
        options = read_json(directory / RECIPE_FILE, ValueError, "Restore it from a backup.")
    except (OSError, ValueError) as why:
        raise typer.BadParameter(
            f"must be a run of samplewise train, which has a {RECIPE_FILE}; found none that can be read in {run}.",
            param_hint="RUN",
        ) from why
    path = recipe or Path(options["recipe"])
    source = read_source(path)
    from samplewise.cli.training import replay_recipe

    typer.echo(replay_recipe(path, source, directory, update, limit, device_named(device), options))
