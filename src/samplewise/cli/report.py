"""`samplewise report RUN ...`: write the HTML report of one run, or the comparison of several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import complete_run


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories of one or more trainings.", autocompletion=complete_run),
    ],
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write the page to.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page whenever the run has changed.")] = False,
) -> None:
    """Write an HTML report of a run: curves, samples, suspects, noise scale, layers, cost, settings.

    The file is report.html in the run directory. It is self-contained: it can be sent, printed and opened offline.
    Runs that are still training or were interrupted work as well. Given several runs, a comparison is written instead,
    to comparison.html in the working directory.
    """
    try:
        from samplewise.report import page
    except ImportError as why:
        typer.echo(f"a report needs {why.name}: pip install 'samplewise[report]'", err=True)
        raise typer.Exit(1) from why
    if to is not None and os.path.isdir(to):
        raise typer.BadParameter(f"must be a file; found a directory, {to}.", param_hint="--to")
    try:
        page.watch(runs, to, typer.echo) if watch else typer.echo(page.write_any(runs, to))
    except OSError as why:
        if why.errno is None:  # raised by read_run: not a run directory; errors of the system have an errno
            raise typer.BadParameter(str(why), param_hint="RUN") from why
        typer.echo(f"the report cannot be written: {why}", err=True)
        raise typer.Exit(1) from why
