"""`samplewise audit SCRIPT ...`: run a training script and audit its updates."""

from __future__ import annotations

import shlex
import traceback
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True}  # options of the script


def audit(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="Python file that trains a model.")
    ],
    per: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT",
            help="What has equal weight, and 1 in sum: token, sample, or a number that the losses are divided by. "
            "Default: token or sample.",
            show_default=False,
        ),
    ] = None,
    max_updates: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End the script after N updates.", show_default=False)
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGUMENTS",
            help="Run the script with these arguments more, and compare its updates with those of the first --vary; "
            "used at least twice.",
            show_default=False,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Finding that is intended; may be repeated.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the result: .html for a page, .json for numbers."),
    ] = None,
) -> None:
    """Run an unmodified training script, and audit the weight of every sample in its updates.

    Arguments that are not options of this command are those of the script; after --, all are. Every model that an
    optimizer trains is audited: weights of samples and tokens, accumulation, zero_grad, schedules, modes. With --vary,
    the script is run once for each, and the updates are compared: they must not depend on how batches are cut.

    The exit code is 0 if nothing was found, 1 if something was found or the script has failed, and 2 if no update was
    seen.

    \b
        samplewise audit train.py --epochs 1 --max-updates 20
        samplewise audit train.py --vary "--batch 8 --accumulate 1" --vary "--batch 2 --accumulate 4"
    """
    unit = _unit(per)
    if vary:
        if len(vary) < 2:
            raise typer.BadParameter("must be used at least twice; found one.", param_hint="--vary")
        if to is not None:
            raise typer.BadParameter("cannot be combined with --vary.", param_hint="--to")
        options = ["--per", per] if per else []
        options += ["--max-updates", str(max_updates)] if max_updates else []
        options += [word for code in allow or () for word in ("--allow", code)]
        _compare([*options, "--", str(script), *context.args], vary)
        return
    from samplewise.audit.script import audit_script

    try:
        result, error = audit_script(script, context.args, unit, allow or (), max_updates)
    except ValueError as why:
        raise typer.BadParameter(str(why), param_hint="--allow") from why
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    typer.echo(result)
    if to is not None:
        result.save(to)
    if error is not None or not result.ok:
        raise typer.Exit(1 if result.sums else 2)


def _unit(per: str | None) -> str | float | None:
    if per in (None, "token", "sample"):
        return per
    try:
        number = float(per or "")
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise typer.BadParameter(f"must be token, sample or a positive number; found {per!r}.", param_hint="--per")
    return number


def _compare(command: list[str], vary: list[str]) -> None:
    from samplewise.audit.script import ScriptError, compare_variations

    equal = True
    try:
        for variation, comparison in compare_variations(command, [shlex.split(words) for words in vary]):
            typer.echo(f"\n{vary[0]} against {shlex.join(variation)}\n{comparison}")
            equal = equal and comparison.ok
    except ScriptError as why:
        typer.echo(f"samplewise: {why}", err=True)
        equal = False
    if not equal:
        raise typer.Exit(1)
