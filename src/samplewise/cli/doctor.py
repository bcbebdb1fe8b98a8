"""`samplewise doctor`: print the environment; with a recipe or --zoo, check the recipe or this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from samplewise.cli.arguments import Device, OptionalRecipeFile, device_named
from samplewise.cli.recipe_source import read_source

DTYPES = ("fp64", "fp32", "bf16")  # names of the precisions of the zoo


def doctor(
    recipe: OptionalRecipeFile = None,
    zoo: Annotated[bool, typer.Option("--zoo", help="Check this machine instead of a recipe.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With a recipe: print the tables of gradients, time and memory, too.")
    ] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --zoo: fp64, fp32, or bf16 (autocast). Default: fp64."),
    ] = None,
) -> None:
    """Check a recipe before training, or check this machine.

    Without arguments: prints versions, machine and optional packages, for bug reports.

    With a recipe, on one batch (at most 16 samples of it) and on copies of the model: compares each sample's gradient
    with one backward pass per sample, lists warnings and errors of the first update and of the metrics, and says first
    whether the recipe is ready for training. Unless something is refused, it then measures the time and memory of an
    update, plain and with clipping (or the transforms of the recipe), for several microbatch sizes and with
    compile=True, and gives advice. --verbose also prints the tables, and how each parameter's gradients are computed.

    With --zoo: compares the gradients of a few hundred small models, each with a feature that is hard to get right,
    with one backward pass per sample, on the given device and in the given precision.

    The exit code is 0 if no problem was found, and 1 if anything was wrong, refused or warned about.
    """
    if recipe is not None and zoo:
        raise typer.BadParameter("give one of RECIPE and --zoo; found both.", param_hint="RECIPE")
    if verbose and recipe is None:
        raise typer.BadParameter("must be used with a recipe; found none.", param_hint="--verbose")
    if dtype is not None and not zoo:
        other = "neither --zoo nor a recipe" if recipe is None else "a recipe, which has its own dtype"
        raise typer.BadParameter(f"can only be used with --zoo; found {other}.", param_hint="--dtype")
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}; found {dtype!r}.", param_hint="--dtype")
    source = None if recipe is None else read_source(recipe)
    target = device_named(device)
    if zoo:
        from samplewise.cli.zoo import precision_named, run_zoo

        ok = run_zoo(precision_named(dtype, target), target)
    elif recipe is not None and source is not None:
        from samplewise.cli.recipe_check import check_recipe

        ok = check_recipe(recipe, source, target, verbose)
    else:
        from samplewise.cli.environment import environment

        typer.echo(environment())
        ok = True
    if not ok:
        raise typer.Exit(1)
