"""`samplewise attribute RECIPE`: the training samples behind the predictions of a trained model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import Device, RecipeFile, device_named
from samplewise.cli.attribution_options import METHODS, Method, check_queries, method_named
from samplewise.cli.recipe_file import read_source
from samplewise.core.files import absolute


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
            min=1, metavar="N", help="Use the N newest checkpoints of each run. Default: all of them; ekfac: 1."
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
            help="With trak and ekfac: multiple of the mean eigenvalue that is added to the eigenvalues. Default: 0.1.",
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
    their index in the dataset.
    """
    source = read_source(recipe)
    here = absolute(".")  # the recipe may change the working directory
    check_queries(queries)
    chosen = method_named(method, dim=dim, damping=_checked_damping(damping))
    runs = [absolute(path) for path in run or [Path("runs") / recipe.stem]]
    number = _checked_number(checkpoints, runs, chosen)
    from samplewise.cli.attribution_results import Results, find_quality, require_packages, shown_path, writable
    from samplewise.cli.attribution_subject import Subject
    from samplewise.cli.queries import choose_queries
    from samplewise.cli.recipe import Recipe
    from samplewise.cli.trained_models import read_runs, seed_of
    from samplewise.core.state import seed_everything

    require_packages()
    target = device_named(device)
    models = read_runs(runs, number)
    directory = writable(models[-1].run / "attribution" if to is None else absolute(to))
    quality = find_quality(trust, models[-1].run)
    seed = seed_of(models[-1])
    seed_everything(seed)  # before the recipe is loaded, as in training: data() may draw random numbers
    subject = Subject(Recipe(recipe, source), models, seed, target)
    indices, outcomes = choose_queries(queries, limit, subject.validation, subject.outcomes)
    scores = subject.scores(chosen, indices)
    Results(subject, chosen, indices, outcomes, scores, top, quality, here).write(directory)
    typer.echo(f"scores  {shown_path(directory / 'scores.parquet', here)}")
    typer.echo(f"page    {shown_path(directory / 'attribution.html', here)}")


def _checked_damping(damping: float | None) -> float | None:
    if damping is not None and not (damping > 0 and math.isfinite(damping)):
        raise typer.BadParameter(f"must be a positive number; found {damping}.", param_hint="--damping")
    return damping


def _checked_number(checkpoints: int | None, runs: list[Path], method: Method) -> int | None:
    """Number of checkpoints per run; None: all. Raises typer.BadParameter if the method cannot use as many."""
    if method.models is None:
        return checkpoints
    wanted = len(runs) * (checkpoints or 1)
    if wanted > method.models:
        raise typer.BadParameter(
            f"{method.name} uses one checkpoint; found {wanted}. Use --method influence or trak for several.",
            param_hint="--run" if len(runs) > 1 else "--checkpoints",
        )
    return 1
