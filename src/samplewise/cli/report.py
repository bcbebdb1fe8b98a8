"""samplewise report RUN."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory that a training has written to.")],
) -> None:
    """Make one HTML file of a run: curves, summary, best values.

    The file is report.html in the run's directory. It needs nothing but itself: send it, print it, open it anywhere.
    A run that is still going on, or that broke off, can be looked at as well.
    """
    try:
        from samplewise.report.page import write_report
    except ImportError as why:
        typer.echo(f"a report needs {why.name}: pip install 'samplewise[report]'", err=True)
        raise typer.Exit(1) from why
    try:
        typer.echo(write_report(run))
    except FileNotFoundError as why:
        raise typer.BadParameter(str(why), param_hint="RUN") from why
    except OSError as why:
        typer.echo(f"the report cannot be written: {why}", err=True)
        raise typer.Exit(1) from why
