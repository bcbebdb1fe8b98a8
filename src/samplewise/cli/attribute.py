"""`samplewise attribute RECIPE`: the training samples behind the predictions of a trained model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import Device, RecipeFile, bad_parameters, device_named
from samplewise.cli.recipe_source import read_source, shortened
from samplewise.core.files import absolute
from samplewise.core.text import did_you_mean

# Names of the methods of sw.attribution.attribute, which imports torch.
METHODS = ("influence", "trak", "ekfac", "metagradient")
QUERIES = re.compile(r"worst|wrong|\s*[0-9]+(-[0-9]+)?\s*(,\s*[0-9]+(-[0-9]+)?\s*)*")


def attribute(
    recipe: RecipeFile,
    queries: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="Validation samples: indices such as 0,5,10-20; worst: highest losses; wrong: misclassified ones.",
        ),
    ] = "worst",
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Largest number of queries with --queries worst and wrong.")
    ] = 10,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(METHODS)}.")] = "influence",
    run: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Run directory of the trained model, or a checkpoint; may be repeated for an ensemble. Default: "
            "runs/<name of the recipe>.",
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Use the N newest checkpoints of each run. Default: all of them; ekfac and metagradient: 1.",
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With trak: dimensions of the projected gradients. Default: a quarter of the number of training "
            "samples, at most 512.",
            show_default=False,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="With trak and ekfac: multiple of the mean eigenvalue that is added to the eigenvalues. Default: 0.1; "
            "with --refine, that of a run with SGD, otherwise 10.",
            show_default=False,
        ),
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With ekfac: at most N iterations of conjugate gradients, each a pass over the training samples. "
            "Default: none.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, metavar="K", help="Training samples on the page: the K highest and K lowest scores.")
    ] = 5,
    trust: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory with the measured quality, lds.json. Default: evaluate in the run directory."
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the results. Default: attribution in the run directory."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Find the training samples behind the predictions of a trained model.

    For some samples of the validation loader, the queries, every training sample gets a score. Positive: training on
    it helps the query; negative: it harms. The scores are written to scores.parquet, and an HTML page shows each query
    with its training samples of highest and lowest scores, and how far to trust them.

    The model is that of a run of `samplewise train RECIPE`; the data are those of the recipe. Samples are numbered by
    their index in the dataset. metagradient repeats the training, with the samples per update, microbatch and clip of
    the run.
    """
    source = read_source(recipe)
    _check(queries, method, damping)
    here = absolute(".")  # the recipe may change the working directory
    from samplewise.attribution.attribution_results import AttributionPlan, shown_path
    from samplewise.cli.recipe import Recipe
    from samplewise.cli.training import rerun_of
    from samplewise.core.state import seed_everything
    from samplewise.errors import CheckpointError

    target = device_named(device)
    with bad_parameters(options=("run", "checkpoints", "dim", "damping", "refine", "trust")):
        try:
            runs = run or [Path("runs") / recipe.stem]
            options = {"dim": dim, "damping": damping, "refine": refine}
            plan = AttributionPlan(runs, queries, limit, method, options, checkpoints, top, trust, str(recipe))
        except CheckpointError as why:
            raise typer.BadParameter(str(why), param_hint="--run") from why
    directory = _writable(plan.run / "attribution" if to is None else absolute(to))
    seed_everything(plan.seed)  # before the recipe is loaded, as in training: data() may draw random numbers
    functions = Recipe(recipe, source)
    model = functions.model()
    train, validation = functions.data()
    rerun = rerun_of(recipe, source, plan.run, train, target) if method == "metagradient" else None
    with functions.errors(), bad_parameters(options=("queries",)):
        results = plan.results(model.to(target), functions.loss(model), train, validation, rerun)
    for note in results.notes:
        typer.echo(note, err=True)
    try:
        results.save(directory)
    except OSError as why:
        typer.echo(f"the results cannot be written: {why}", err=True)
        raise typer.Exit(1) from why
    typer.echo(f"scores  {shown_path(directory / 'scores.parquet', here)}")
    typer.echo(f"page    {shown_path(directory / 'attribution.html', here)}")


def _check(queries: str, method: str, damping: float | None) -> None:
    """Raise typer.BadParameter for a mistake that can be seen without torch."""
    if not QUERIES.fullmatch(queries):
        raise typer.BadParameter(
            f"must be indices of validation samples such as 0,5,10-20, or wrong, or worst; found {queries!r}.",
            param_hint="--queries",
        )
    if method not in METHODS:
        raise typer.BadParameter(
            f"must be one of {', '.join(METHODS)}; found {method!r}. {did_you_mean(method, METHODS)}".rstrip(),
            param_hint="--method",
        )
    if damping is not None and not 0 < damping < math.inf:
        raise typer.BadParameter(f"must be a positive number; found {damping}.", param_hint="--damping")


def _writable(directory: Path) -> Path:
    """Create the directory of the results; raises typer.BadParameter if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise typer.BadParameter(
            f"must be a directory that can be written to; found {shortened(directory)}: {why.strerror}.",
            param_hint="--to",
        ) from why
    return directory
