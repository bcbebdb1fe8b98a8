"""`samplewise train RECIPE`: train the model of a recipe."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from samplewise.cli.arguments import Device, RecipeFile, device_named
from samplewise.cli.completion import complete_run
from samplewise.cli.ids import explain_missing_ids, with_ids
from samplewise.cli.private_training import PrivateOptions
from samplewise.cli.recipe import Recipe, read_source, shortened
from samplewise.core.atomic_io import absolute
from samplewise.core.text import plural
from samplewise.distributed.group import current_group
from samplewise.distributed.launch import join_process_group
from samplewise.ledger.ledger import Ledger
from samplewise.loop.data.rng import seed_everything
from samplewise.loop.trainer import Trainer
from samplewise.step.step import Step
from samplewise.transforms.clip import clip as clip_transform

EPOCHS = 1


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
        typer.Option(metavar="E", help="Train with (E, delta)-differential privacy; with --delta, --batch, --clip."),
    ] = None,
    delta: Annotated[float | None, typer.Option(metavar="D", help="With --epsilon, for example 1e-5.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --epsilon: expected number of samples per update.")
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Record loss and gradient norm of each sample at each visit: sw.Ledger().")
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of log and checkpoints. Default: runs/<name of the recipe>.",
            autocompletion=complete_run,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint of the run.")] = False,
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
    --resume continues from the newest checkpoint; no sample is lost or seen twice. --epochs and --updates count from
    the start of the run: after 2 epochs, --resume --epochs 5 trains for 3 more.

    Several processes: --processes N, or torchrun ... -m -- samplewise train RECIPE. --samples counts the samples of all
    ranks; the batches of the recipe are those of each rank.
    """
    source = read_source(recipe)
    if processes is not None:
        _launch(processes)
    if epochs is not None and updates is not None:
        raise typer.BadParameter("give one of --epochs and --updates; found both.", param_hint="--updates")
    step_options: dict[str, Any] = {"samples": samples, "microbatch": _parse_microbatch(microbatch), "compile": compile}
    private = None
    if epsilon is not None:
        private = PrivateOptions(epsilon, delta, batch, clip, epochs or EPOCHS, updates)
        epochs = None
    elif delta is not None or batch is not None:
        raise typer.BadParameter("--delta and --batch must be used with --epsilon.", param_hint="--epsilon")
    elif clip is not None:
        step_options["transforms"] = (clip_transform(_checked_norm(clip)),)
    fit_options = {"epochs": None if updates or private else epochs or EPOCHS, "updates": updates, "resume": resume}
    recorder = _make_ledger() if ledger else None
    target = join_process_group(device_named(device))
    run = _checked_run(run or Path("runs") / recipe.stem, resume)
    run_path = absolute(run)  # before the recipe is loaded, which may change the working directory
    seed_everything(seed)
    loaded = Recipe(recipe, source)
    if private is None:
        _check_clip(clip, loaded)
    trainer, reason = _fit(loaded, run_path, target, seed, recorder, step_options, fit_options, private)
    _print_summary(reason, trainer, run)


def _fit(
    recipe: Recipe,
    run: Path,
    device: torch.device,
    seed: int,
    ledger: Ledger | None,
    step_options: dict[str, Any],
    fit_options: dict[str, Any],
    private: PrivateOptions | None = None,
) -> tuple[Trainer, str]:
    """Train the model of a recipe; returns the trainer and the reason why the training ended."""
    model = recipe.model()
    loader, validation = recipe.data()
    with recipe.errors():
        model.to(device)  # before the optimizer is made: some create their state on the device of the parameters
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer)
    loss = recipe.loss(model)
    callbacks = recipe.callbacks()
    metrics = recipe.metrics()
    step_options = {"transforms": recipe.transforms(), **step_options}
    if private is not None:
        step_options["privacy"], loader = private.plan(loader)
        if current_group().rank == 0:
            typer.echo(f"privacy      {step_options['privacy']}")
    with recipe.errors(), ExitStack() as stack:
        if ledger is not None and not any(isinstance(callback, Ledger) for callback in callbacks):
            callbacks.append(ledger)
            loader, loss = with_ids(loader, loss)
            stack.enter_context(explain_missing_ids())
        step = Step(model, optimizer, loss, scheduler=scheduler, strategy="ddp", **step_options)
        trainer = Trainer(step, run, callbacks, metrics=metrics, device=device, seed=seed)
        return trainer, trainer.fit(loader, validation, **fit_options)


def _make_ledger() -> Ledger:
    try:
        return Ledger()
    except ImportError as why:
        raise typer.BadParameter(f"{why}.", param_hint="--ledger") from why


def _check_clip(clip: float | None, recipe: Recipe) -> None:
    if clip is not None and recipe.defines("transforms"):
        raise typer.BadParameter(
            f"give one of --clip and transforms() in the recipe; found both. Put sw.clip({clip:g}) into the list that "
            "transforms() returns, where its place among the others counts.",
            param_hint="--clip",
        )


def _launch(processes: int) -> NoReturn:
    """Replace this process with torchrun, which starts this command `processes` times without --processes."""
    # Without the -- torchrun would take --run for an abbreviation of one of its own options.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
    os.execv(sys.executable, [sys.executable, *torchrun, "samplewise", *_without_processes(sys.argv[1:])])


def _without_processes(arguments: Sequence[str]) -> Iterator[str]:
    """Command line arguments without --processes N and --processes=N."""
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--processes":
            next(remaining, None)  # its value
        elif not argument.startswith("--processes="):
            yield argument


def _print_summary(reason: str, trainer: Trainer, run: Path) -> None:
    """Print the summary on rank 0; exit with 128 + signal number if a signal stopped the training."""
    interrupted = reason in signal.Signals.__members__
    if current_group().rank == 0:
        done = trainer.step.counters.updates
        outcome = f"stopped by {reason}" if interrupted else reason
        typer.echo(f"{outcome}: {plural(done, 'update')} in all")
        if trainer.step.privacy is not None:
            typer.echo(f"spent        {trainer.step.privacy.spent()}")
        typer.echo(f"log          {run / 'log.jsonl'}")
        typer.echo(f"checkpoints  {run / 'checkpoints'}")
        if interrupted:
            typer.echo("continue     with --resume")
    if interrupted:
        raise typer.Exit(128 + signal.Signals[reason])


def _parse_microbatch(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"must be a positive number or auto; found {text!r}.", param_hint="--microbatch")
    return int(text)


def _checked_norm(clip: float) -> float:
    if not (clip > 0 and math.isfinite(clip)):
        raise typer.BadParameter(f"must be a positive number; found {clip}.", param_hint="--clip")
    return clip


def _checked_run(run: Path, resume: bool) -> Path:
    try:
        is_file = run.exists() and not run.is_dir()
        used = not is_file and any((run / "checkpoints").glob("*.ckpt"))
    except OSError as why:
        raise typer.BadParameter(
            f"must be an accessible directory; found {shortened(run)}: {why.strerror}.", param_hint="--run"
        ) from why
    if is_file:
        raise typer.BadParameter(f"must be a directory; found a file, {run}.", param_hint="--run")
    if used and not resume:
        raise typer.BadParameter(
            f"a new run must have a directory without checkpoints; found checkpoints in {run}. "
            "Pass --resume to continue that run, or choose another directory.",
            param_hint="--run",
        )
    if resume and not used and current_group().rank == 0:
        typer.echo(f"No checkpoint was found in {run}: a new run is started.", err=True)
    return run
