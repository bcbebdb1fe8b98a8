"""Training of `samplewise train RECIPE`, after the arguments are checked."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import typer

from samplewise.cli.arguments import device_named
from samplewise.cli.private_training import PrivateOptions
from samplewise.cli.recipe import Recipe
from samplewise.cli.sample_ids import explain_missing_ids, with_ids
from samplewise.core.files import absolute
from samplewise.core.state import seed_everything
from samplewise.core.text import plural
from samplewise.ledger.ledger import Ledger
from samplewise.loop.stopping import FitResult
from samplewise.loop.trainer import Trainer
from samplewise.parallel import launch
from samplewise.parallel.group import current_group
from samplewise.step.step import Step
from samplewise.transforms.clip import clip as clip_transform


def train_recipe(
    path: Path,
    source: bytes,
    run: Path,
    device: str,
    seed: int,
    ledger: bool,
    clip: float | None,
    private: PrivateOptions | None,
    step_options: dict[str, Any],
    fit_options: dict[str, Any],
) -> None:
    """Train the model of a recipe and print a summary. source: the content of the file."""
    recorder = _make_ledger() if ledger else None
    target = launch.join(device_named(device))
    run_path = absolute(run)  # before the recipe is loaded, which may change the working directory
    seed_everything(seed)
    recipe = Recipe(path, source)
    if clip is not None and private is None:
        _check_clip(clip, recipe)
        step_options["transforms"] = (clip_transform(clip),)
    trainer, result = _fit(recipe, run_path, target, seed, recorder, step_options, fit_options, private)
    _print_summary(result, trainer, run)


def _fit(
    recipe: Recipe,
    run: Path,
    device: torch.device,
    seed: int,
    ledger: Ledger | None,
    step_options: dict[str, Any],
    fit_options: dict[str, Any],
    private: PrivateOptions | None = None,
) -> tuple[Trainer, FitResult]:
    """Train the model of a recipe; returns the trainer and the result of `fit`."""
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
            typer.echo(f"privacy      {step_options['privacy']}".replace("\n", "\n" + " " * 13))
    with recipe.errors(), ExitStack() as stack:
        if ledger is not None and not any(isinstance(callback, Ledger) for callback in callbacks):
            callbacks.append(ledger)
            loader, loss = with_ids(loader, loss)
            stack.enter_context(explain_missing_ids())
        step = Step(model, optimizer, loss, scheduler=scheduler, parallel="ddp", **step_options)
        trainer = Trainer(step, run, callbacks, metrics=metrics, device=device, seed=seed)
        return trainer, trainer.fit(loader, validation, **fit_options)


def _make_ledger() -> Ledger:
    try:
        return Ledger()
    except ImportError as why:
        raise typer.BadParameter(f"{why}.", param_hint="--ledger") from why


def _check_clip(clip: float, recipe: Recipe) -> None:
    if recipe.defines("transforms"):
        raise typer.BadParameter(
            f"give one of --clip and transforms() in the recipe; found both. Put sw.clip({clip:g}) into the list that "
            "transforms() returns, where its place among the others counts.",
            param_hint="--clip",
        )


def _print_summary(result: FitResult, trainer: Trainer, run: Path) -> None:
    """Print the summary on rank 0; exit with 128 + signal number if a signal stopped the training."""
    if current_group().rank == 0:
        typer.echo(f"{result.reason}: {plural(result.updates, 'update')} in all")
        if trainer.step.privacy is not None:
            typer.echo(f"spent        {trainer.step.privacy.spent()}")
        typer.echo(f"log          {run / 'log.jsonl'}")
        typer.echo(f"checkpoints  {run / 'checkpoints'}")
        if result.signal is not None:
            typer.echo("continue     with --resume")
    if result.signal is not None:
        raise typer.Exit(128 + signal.Signals[result.signal])
