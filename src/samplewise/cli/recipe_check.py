"""Checks of `samplewise doctor RECIPE`: gradients, first update, costs; on one batch and on copies of the model.

The verdict and the problems are printed first. Costs are measured after that, and only if nothing is refused or
wrong, because compiling takes long. The tables are printed with --verbose.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from samplewise.check import check
from samplewise.cli.recipe import Recipe
from samplewise.cli.recipe_source import RecipeError
from samplewise.cli.stdio import slow_notice
from samplewise.core.batches import cut, keep_whole, length, to_device
from samplewise.core.losses import as_loss_fn, constants_of, per_sample
from samplewise.core.memory import free_memory
from samplewise.core.modes import mixing_batch_norms
from samplewise.core.state import random_state_restored
from samplewise.core.text import listed, plural
from samplewise.diagnostics import profile
from samplewise.engine.gradients import gradients, plan_table, time_profile
from samplewise.engine.slow_paths import slow_paths_collected
from samplewise.errors import SamplewiseError
from samplewise.loop.trainer import Trainer
from samplewise.step.step import Step
from samplewise.transforms.clip import clip

MAX_SAMPLES = 16  # of the first batch


@dataclass
class RecipeCheck:
    """Recipe under examination: its model, its loss, one batch, and the issues found so far."""

    recipe: Recipe
    model: nn.Module
    loss: Any
    batch: Any
    samples: int | None  # in `batch`; None: the batch cannot be sliced
    batch_size: int | None  # samples of the loader's whole batch
    updates: Mapping[str, Any]  # name -> transforms
    metrics: Mapping[str, Any]
    validation: Iterable[Any] | None  # batches
    problems: dict[str, str] = field(default_factory=dict)  # message -> "refused", "warned" or "wrong", and the update
    slow: set[str] = field(default_factory=set)  # causes of slow paths that are among the problems
    details: list[str] = field(default_factory=list)  # sections of the output with --verbose

    @property
    def usable(self) -> bool:
        """False if something is refused or wrong."""
        return all(kind.startswith("warned") for kind in self.problems.values())

    def fresh_copy(self) -> tuple[nn.Module, Any, Any]:
        """Copy of the model with a new optimizer, and a copy of the loss."""
        model = copy.deepcopy(self.model)
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        return model, self.recipe.optimizer(model), loss

    def make_step(self, **options: Any) -> Step:
        """Step of a fresh copy, for measurements."""
        return Step(*self.fresh_copy(), recheck=False, **options)


def check_recipe(path: Path, source: bytes, device: torch.device, verbose: bool) -> bool:
    """Check a recipe and print the findings; True if there are no problems. source: the content of the file."""
    recipe_check = _prepare(Recipe(path, source))
    problems = recipe_check.problems
    with recipe_check.recipe.errors():
        _compare_gradients(recipe_check)
        recipe_check.model.to(device)
        recipe_check.batch = to_device(recipe_check.batch, device)
        # Plan the gradients of a batch. With `verbose`, also measure the stages of the plan.
        with _problems_collected(recipe_check), slow_notice("planning"), random_state_restored():
            model, _, loss = recipe_check.fresh_copy()
            losses, _ = per_sample(as_loss_fn(loss)(model, recipe_check.batch))
            g = gradients(losses, model)
            recipe_check.details.append(f"Gradient plan\n{plan_table(g)}")
            times = (
                time_profile(g, lambda: per_sample(as_loss_fn(loss)(model, recipe_check.batch))) if verbose else None
            )
            if times is not None:
                recipe_check.details.append(f"Where the time goes\n{times.table}")
        for name, transforms in recipe_check.updates.items():
            with _problems_collected(recipe_check, name), slow_notice(f"one update, {name}"):
                model, optimizer, loss = recipe_check.fresh_copy()
                step = Step(model, optimizer, loss, transforms=transforms)
                step(recipe_check.batch)
        _validate(recipe_check, device)

        if problems:
            typer.echo(f"Not ready for training: {plural(len(problems), 'problem')}.")
        else:
            typer.echo("No problems found: the recipe is ready for training.")
        for message, kind in problems.items():
            typer.echo(f"- {kind}: {message}")
        for section in recipe_check.details if verbose else ():
            typer.echo(f"\n{section}")

        if recipe_check.usable:
            advice = [*_profile(recipe_check, device, verbose), *_profile_compiled(recipe_check, verbose)]
        else:
            advice = [*_batch_norm_advice(recipe_check), "Fix the problems first: time and memory were not measured."]
    typer.echo("\nAdvice")
    for line in advice:
        typer.echo(f"- {line}")
    return not problems


def _prepare(recipe: Recipe) -> RecipeCheck:
    """Build the model and fetch the first batch, at most 16 samples of it."""
    with slow_notice("building the model and fetching a batch"):
        model = recipe.model()
        loader, validation = recipe.data()
        updates = _updates(recipe)
        metrics = recipe.metrics()
        recipe.callbacks()  # raises if they cannot be used, like the scheduler
        recipe.scheduler(recipe.optimizer(model))
        with recipe.errors():
            batch = next(iter(loader), None)
            if batch is None:
                raise RecipeError(f"{recipe.path}: the loader of data() must yield at least one batch; found none.")
            loss = recipe.loss(model)
            batch = keep_whole(batch, constants_of(loss))
            batch_size = length(batch)
            samples = None
            if batch_size is not None:
                samples = min(batch_size, MAX_SAMPLES)
                batch = cut(batch, 0, samples)
            parameter = next(model.parameters(), None)
            if parameter is not None:
                batch = to_device(batch, parameter.device)
            return RecipeCheck(recipe, model, loss, batch, samples, batch_size, updates, metrics, validation)


def _updates(recipe: Recipe) -> dict[str, Any]:
    """Updates to examine: plain, and with the transforms of the recipe or, if it has none, with clipping."""
    if recipe.defines("transforms"):
        return {profile.PLAIN: (), "with transforms()": recipe.transforms()}
    return {profile.PLAIN: (), profile.CLIPPED: (clip(1.0),)}


# --- checks -----------------------------------------------------------------------------------------------------------


def _compare_gradients(recipe_check: RecipeCheck) -> None:
    """Compare the engine with one backward pass per sample.

    Runs on the device on which the recipe puts the model, because some accelerators have no float64.
    """
    with _problems_collected(recipe_check), slow_notice("comparing the engine with one backward pass per sample"):
        with slow_paths_collected():  # those of the first update are reported
            result = check(recipe_check.model, recipe_check.loss, recipe_check.batch)
        recipe_check.details.append(str(result))
        if result.refusal is not None:
            recipe_check.problems[str(result.refusal)] = "refused"
        elif not result.ok:
            recipe_check.problems[f"do not rely on per-sample gradients of this model. {result}"] = "wrong"


def _validate(recipe_check: RecipeCheck, device: torch.device) -> None:
    """Compute the metrics of one validation batch: an error in them would end a training run after its first epoch."""
    if not recipe_check.metrics or recipe_check.validation is None:
        return
    with _problems_collected(recipe_check, "metrics"), slow_notice("validation"):
        model, optimizer, loss = recipe_check.fresh_copy()
        step = Step(model, optimizer, loss)
        trainer = Trainer(step, metrics=recipe_check.metrics, device=device, progress=False)
        trainer.evaluate(list(islice(recipe_check.validation, 1)))


@contextmanager
def _problems_collected(recipe_check: RecipeCheck, update: str = "") -> Iterator[None]:
    """Add warnings, samplewise errors and slow paths of the block to the problems; a repeated one counts once."""
    suffix = f", {update}" if update else ""
    problems = recipe_check.problems
    refusal = None
    with warnings.catch_warnings(record=True) as caught, slow_paths_collected() as slow_paths:
        warnings.simplefilter("always")
        try:
            yield
        except SamplewiseError as error:
            refusal = error
    for warning in caught:
        problems.setdefault(str(warning.message), f"warned{suffix}")
    for path in slow_paths:
        if path.cause not in recipe_check.slow:  # its cost depends on the number of samples
            recipe_check.slow.add(path.cause)
            problems.setdefault(path.warning, f"warned{suffix}")
    if refusal is not None:
        problems.setdefault(str(recipe_check.recipe.explained(refusal)), f"refused{suffix}")


# --- costs and advice -------------------------------------------------------------------------------------------------


def _profile(recipe_check: RecipeCheck, device: torch.device, verbose: bool) -> list[str]:
    """Measure updates with each transform and microbatch size; returns advice."""
    samples = recipe_check.samples
    with slow_notice("measuring"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # already reported
        costs = profile.update_costs(recipe_check.make_step, recipe_check.batch, samples, recipe_check.updates, device)
    if verbose:
        count = "a batch that cannot be sliced" if samples is None else plural(samples, "sample")
        if recipe_check.batch_size != samples:
            count += f" of a batch of {recipe_check.batch_size}"
        table = profile.table(costs, f"{count}; MB: {profile.memory_description(device)}")
        typer.echo(f"\nTime and memory per update\n{table}")
    return profile.cost_advice(costs, samples, recipe_check.batch_size, free_memory(recipe_check.model))


def _profile_compiled(recipe_check: RecipeCheck, verbose: bool) -> list[str]:
    """Measure updates of one sample and of the batch, eager and compiled; returns advice."""
    with slow_notice("compiling and measuring"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is printed below
        gains = profile.measure_compile_gain(recipe_check.make_step, recipe_check.batch, recipe_check.samples)
    if verbose:
        typer.echo("\nTime per update with compile=True")
        for gain in gains:
            typer.echo(gain)
    return profile.compile_advice(gains)


def _batch_norm_advice(recipe_check: RecipeCheck) -> list[str]:
    norms = mixing_batch_norms([recipe_check.model])
    if not norms:
        return []
    return [
        f"BatchNorm in training mode mixes samples (module {listed(norms)}), so per-sample gradients are not defined. "
        "Plain training works unchanged, also with --ledger losses. For --clip, --ledger with norms and transforms(), "
        "return sw.freeze_batchnorm(model) from model(), or use GroupNorm."
    ]
