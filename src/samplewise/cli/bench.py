"""`samplewise bench`: measure a device, and write a report that can be sent to others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samplewise.cli.arguments import Device, device_named


def bench(
    device: Device = "auto",
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for the report.", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny networks, in some seconds: tests the command, not the device.")
    ] = False,
) -> None:
    """Measure exactness, time, host waits and memory on a device, for a report that others can read.

    Compares small models and updates with plain PyTorch, and measures updates of ResNet-18, ViT-S and GPT-2 small with
    random weights next to a plain loop. Less than ten minutes on a GPU; on the CPU networks have small batches.
    The report contains versions, processor and device, and no host name, user name or path. docs/gpu.md shows reports,
    and says how to send one.

    The exit code is 0 if all results were right, and 1 if anything was wrong or has failed.
    """
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise typer.BadParameter(f"must be a file in an existing directory; found {json}.", param_hint="--json")
    target = device_named(device)
    if target.type == "meta":
        raise typer.BadParameter("must be a device that computes; found meta.", param_hint="--device")
    from samplewise.bench.bench import run_bench
    from samplewise.bench.report import heading, problems, tables
    from samplewise.core.files import write_json

    report = run_bench(target, quick)
    typer.echo(heading(report))
    for table in tables(report):
        typer.echo(f"\n{table.text()}")
    if json is not None:
        write_json(json, report)
        typer.echo(f"\nReport: {json}")
    lines = problems(report)
    typer.echo("\n" + "\n".join([*lines, f"Problems found: {len(lines)}." if lines else "No problems found."]))
    if lines:
        raise typer.Exit(1)
