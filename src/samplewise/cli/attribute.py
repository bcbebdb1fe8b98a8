"""`samplewise attribute RECIPE`: the training samples behind the predictions of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import Device, RecipeFile, device_named
from samplewise.cli.attribution_methods import METHODS, method_named
from samplewise.cli.attribution_results import find_quality, require_packages, writable, write_results
from samplewise.cli.attribution_subject import Subject
from samplewise.cli.queries import check_form, choose_queries
from samplewise.cli.recipe import Recipe, read_source
from samplewise.cli.trained_models import read_runs, seed_of
from samplewise.core.atomic_io import absolute
from samplewise.loop.data.rng import seed_everything


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
            help="Run directory of the trained model, or a checkpoint; may be repeated. Default: runs/<name of the "
            "recipe>.",
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Use the N newest checkpoints of each run. Default: all of them."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, metavar="K", help="Training samples on the page: the K highest and K lowest scores.")
    ] = 5,
    trust: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with the measured quality, lds.json. Default: evaluate in the run directory."
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
    check_form(queries)
    chosen = method_named(method)
    require_packages()
    target = device_named(device)
    models = read_runs([absolute(path) for path in run or [Path("runs") / recipe.stem]], checkpoints)
    directory = writable(models[0].run / "attribution" if to is None else absolute(to))
    quality = find_quality(trust, models[0].run)
    seed = seed_of(models[-1])
    seed_everything(seed)  # before the recipe is loaded, as in training: data() may draw random numbers
    subject = Subject(Recipe(recipe, source), models, seed, target)
    indices, outcomes = choose_queries(queries, limit, subject.validation, subject.outcomes)
    scores = subject.scores(chosen, indices)
    write_results(directory, subject, chosen, indices, outcomes, scores, top, quality)
    for name, file in (("scores", "scores.parquet"), ("page", "attribution.html")):
        path = directory / file
        typer.echo(f"{name:<8}{path.relative_to(here) if path.is_relative_to(here) else path}")
