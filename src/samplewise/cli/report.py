"""samplewise report RUN ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories that trainings have written to.")],
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the page.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run: write anew whenever it has changed.")] = False,
) -> None:
    """Make one HTML file of a run: curves, samples, suspects, noise scale, layers, cost, settings.

    The file is report.html in the run's directory. It needs nothing but itself: send it, print it, open it anywhere.
    A run that is still going on, or that broke off, can be looked at as well. Several runs are compared instead, in
    comparison.html here.
    """
    try:
        from samplewise.report import watch as report
    except ImportError as why:
        typer.echo(f"a report needs {why.name}: pip install 'samplewise[report]'", err=True)
        raise typer.Exit(1) from why
    try:
        report.watch(runs, to, typer.echo) if watch else typer.echo(report.write_any(runs, to))
    except OSError as why:
        if why.errno is None:  # no run; the others are of the system
            raise typer.BadParameter(str(why), param_hint="RUN") from why
        typer.echo(f"the report cannot be made: {why}", err=True)
        raise typer.Exit(1) from why
