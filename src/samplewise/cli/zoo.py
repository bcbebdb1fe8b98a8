"""`samplewise doctor --zoo`: compare the engine with plain autograd on a collection of small models."""

from __future__ import annotations

import torch
import typer

from samplewise.core.memory import has_float64
from samplewise.core.text import render, with_progress
from samplewise.testing.cases import CASES
from samplewise.testing.runner import (
    NOT_RUN,
    PRECISIONS,
    REFUSED,
    RIGHT,
    WRONG,
    ZooPrecision,
    count_outcomes,
    one_thread,
    run_case,
)

LEGEND = """
refused  samples depend on each other: the engine must detect it, and be right when allowed to continue
not run  PyTorch itself fails on the model, on this machine and in this precision
"""


def precision_named(name: str | None, device: torch.device) -> ZooPrecision:
    """Precision for the value of --dtype; default fp64, or fp32 on a device without float64."""
    precision = PRECISIONS[name or ("fp64" if has_float64(device) else "fp32")]
    if precision.dtype == torch.float64 and not has_float64(device):
        raise typer.BadParameter(
            f"must be a precision that the device supports; found fp64 on {device}. Use fp32.", param_hint="--dtype"
        )
    if precision.autocast is not None and not torch.amp.is_autocast_available(device.type):
        raise typer.BadParameter(
            f"must be a precision that the device supports; found bf16 on {device}, which has no autocast. Use fp32.",
            param_hint="--dtype",
        )
    return precision


def run_zoo(precision: ZooPrecision, device: torch.device) -> bool:
    """Judge every case and print the results; True if something was compared and nothing was wrong."""
    typer.echo(f"Zoo: {len(CASES)} small models on {device}, {precision.describe(device)}\n")
    with one_thread():
        results = [run_case(case, precision, device) for case in with_progress(CASES.values(), "models")]
    rows = [(result.case.name, result.outcome) for result in results]
    typer.echo(render(("model", "gradients"), rows) + "\n" + LEGEND)
    for result in results:
        if result.outcome in (WRONG, NOT_RUN):
            typer.echo(f"{result.outcome}: {result.case.name}: {result.reason}")
    counts = count_outcomes(results)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    compared = counts[RIGHT] + counts[REFUSED] > 0
    if counts[WRONG]:
        typer.echo(f"Wrong gradients found: {summary}. Do not rely on gradients of models like those named above.")
    elif not compared:
        typer.echo(f"Nothing was compared: {summary}. Choose another device or precision.")
    else:
        typer.echo(f"No problems found: {summary}.")
    return compared and not counts[WRONG]
