"""`samplewise train RECIPE`: train the model of a recipe."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from samplewise.cli.arguments import Device, RecipeFile, check_one_of, complete_run
from samplewise.cli.recipe_source import read_source, shortened

EPOCHS = 1
Exists = Literal["error", "resume", "overwrite", "new"]  # values of --exists
LEDGERS = ("norms", "losses")  # values of --ledger; the first one may be left out


class TrainCommand(TyperCommand):
    """Command in which the value of --ledger may be left out. It must not take the recipe: train --ledger RECIPE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed = [
            f"{word}={LEDGERS[0]}" if word == "--ledger" and following not in LEDGERS else word
            for word, following in zip_longest(args, args[1:])
        ]
        return super().parse_args(ctx, completed)


@dataclass(frozen=True)
class PrivateOptions:
    """Values of --epsilon, --delta, --batch or --sample-rate, and --clip of a private run, and its duration."""

    epsilon: float
    delta: float | None
    batch: int | None
    sample_rate: float | None
    clip: float | None
    epochs: int | None
    updates: int | None

    def __post_init__(self) -> None:
        for name in ("delta", "clip"):
            if getattr(self, name) is None:
                raise typer.BadParameter(
                    f"--epsilon needs --delta, --clip, and --batch or --sample-rate; found no --{name}.",
                    param_hint="--epsilon",
                )
        check_one_of(batch=self.batch, sample_rate=self.sample_rate)
        assert self.delta is not None and self.clip is not None
        for name, value, limit in (
            ("epsilon", self.epsilon, math.inf),
            ("delta", self.delta, 1.0),
            ("clip", self.clip, math.inf),
        ):
            if not 0 < value < limit:
                bounds = "a finite number above 0" if limit == math.inf else f"a number between 0 and {limit:g}"
                raise typer.BadParameter(f"must be {bounds}; found {value}.", param_hint=f"--{name}")


def train(
    recipe: RecipeFile,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Train until N epochs are done. Default: {EPOCHS}.", show_default=False),
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train until N updates are done, instead of --epochs.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per update. Default: one batch.")
    ] = None,
    microbatch: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Samples per forward pass; auto: as many as fit. Default: one batch."),
    ] = None,
    clip: Annotated[
        float | None, typer.Option(metavar="C", help="Clip each sample's gradient to norm C before summing.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="E", help="Train with (E, delta)-differential privacy; with --delta, --clip, --batch."),
    ] = None,
    delta: Annotated[float | None, typer.Option(metavar="D", help="With --epsilon, for example 1e-5.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --epsilon: expected number of samples per update.")
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(metavar="Q", help="With --epsilon, instead of --batch: probability of a sample to be drawn."),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="[losses]",
            help="Record loss and gradient norm of each sample at each visit: sw.Ledger(); losses: without the norms, "
            "for example for a model with BatchNorm.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of log and checkpoints. Default: runs/<name of the recipe>.",
            autocompletion=complete_run,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint of the run.")] = False,
    exists: Annotated[
        Exists,
        typer.Option(
            help="If DIR has checkpoints: refuse, resume, remove that run, or take the next free name, DIR-2."
        ),
    ] = "error",
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of initial weights, and of sample order and augmentation.")
    ] = 0,
    device: Device = "auto",
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile each update into one graph.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Train with N processes (ranks): torchrun --nproc-per-node N."),
    ] = None,
) -> None:
    """Train the model of a recipe.

    A recipe is a Python file with plain functions. Required: model() and data(), which returns a loader or (loader,
    validation loader). Optional: loss(model, batch), which returns one loss per sample (default: cross entropy),
    optimizer(model) (default: AdamW, lr 1e-3), scheduler(optimizer), which is stepped once per update, transforms(), a
    list such as [sw.clip(1.0)], metrics(), a dict of functions (outputs, batch) or (outputs, y), and callbacks(), a
    list of callbacks of the trainer. loss may also be a criterion: loss = nn.MSELoss().

    Checkpoints are written after each epoch and at the end. Ctrl-C stops after the current update and writes one, too.
    --resume, or --exists resume, continues from the newest checkpoint; no sample is lost or seen twice. --epochs and
    --updates count from the start of the run: after 2 epochs, --resume --epochs 5 trains for 3 more.

    Several processes: --processes N, or torchrun ... -m -- samplewise train RECIPE. --samples counts the samples of all
    ranks; the batches of the recipe are those of each rank.
    """
    source = read_source(recipe)
    if epochs is not None and updates is not None:
        raise typer.BadParameter("give one of --epochs and --updates; found both.", param_hint="--updates")
    step_options: dict[str, Any] = {"samples": samples, "microbatch": _parse_microbatch(microbatch), "compile": compile}
    if ledger is not None and ledger not in LEDGERS:
        raise typer.BadParameter(f"must be {' or '.join(LEDGERS)}; found {ledger!r}.", param_hint="--ledger")
    private = None
    if epsilon is not None:
        if ledger is not None:
            raise typer.BadParameter(
                "--ledger cannot be used with --epsilon: the guarantee does not cover losses and norms of single "
                "samples. Leave it out.",
                param_hint="--ledger",
            )
        duration = None if updates else epochs or EPOCHS
        private = PrivateOptions(epsilon, delta, batch, sample_rate, clip, duration, updates)
        epochs = None
    elif delta is not None or batch is not None or sample_rate is not None:
        raise typer.BadParameter(
            "--delta, --batch and --sample-rate must be used with --epsilon.", param_hint="--epsilon"
        )
    elif clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise typer.BadParameter(f"must be a positive number; found {clip}.", param_hint="--clip")
    if resume and exists in ("overwrite", "new"):
        raise typer.BadParameter(
            f"--resume continues the run, --exists {exists} starts another one; found both.", param_hint="--exists"
        )
    resume = resume or exists == "resume"
    fit_options = {"epochs": None if updates or private else epochs or EPOCHS, "updates": updates, "resume": resume}
    run = run or Path("runs") / recipe.stem
    has_checkpoints = _check_run(run, resume or exists != "error")
    if processes is not None:
        _launch(processes)
    if resume and not has_checkpoints and os.environ.get("RANK", "0") == "0":  # a variable of torchrun
        typer.echo(f"No checkpoint was found in {run}: a new run is started.", err=True)
    from samplewise.cli.training import train_recipe

    train_recipe(recipe, source, run, exists, device, seed, ledger, clip, private, step_options, fit_options)


def _launch(processes: int) -> NoReturn:
    """Replace this process with torchrun, which starts this command `processes` times without --processes."""
    arguments = []
    remaining = iter(sys.argv[1:])
    for argument in remaining:
        if argument == "--processes":
            next(remaining, None)  # its value
        elif not argument.startswith("--processes="):
            arguments.append(argument)
    # Without the -- torchrun would take --run for an abbreviation of one of its own options.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
    os.execv(sys.executable, [sys.executable, *torchrun, "samplewise", *arguments])


def _parse_microbatch(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"must be a positive number or auto; found {text!r}.", param_hint="--microbatch")
    return int(text)


def _check_run(run: Path, may_exist: bool) -> bool:
    """True if the directory has checkpoints; raises typer.BadParameter unless the run can start or resume in it."""
    try:
        is_file = run.exists() and not run.is_dir()
        used = not is_file and any((run / "checkpoints").glob("*.ckpt"))
    except OSError as why:
        raise typer.BadParameter(
            f"must be an accessible directory; found {shortened(run)}: {why.strerror}.", param_hint="--run"
        ) from why
    if is_file:
        raise typer.BadParameter(f"must be a directory; found a file, {run}.", param_hint="--run")
    if used and not may_exist:
        is_private = (run / "privacy.jsonl").exists()  # never overwritten: what is spent would be forgotten
        raise typer.BadParameter(
            f"a new run must have a directory without checkpoints; found checkpoints in {run}. "
            f"Pass --exists resume to continue that run,{'' if is_private else ' --exists overwrite to remove it,'} "
            "or --exists new for the next free name.",
            param_hint="--run",
        )
    return used
