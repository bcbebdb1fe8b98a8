"""`samplewise doctor RECIPE` and `samplewise doctor --zoo`: check a recipe or this machine."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from samplewise.check import check
from samplewise.cli.arguments import Device, device_named
from samplewise.cli.costs import PLAIN, Costs, Key, advice, measured, memory_is, microseconds, table, three_digits
from samplewise.cli.recipe import Recipe, RecipeError, blaming
from samplewise.cli.zoo import examine, precision_named
from samplewise.core.batches import cut, length, to_device
from samplewise.core.losses import as_loss_fn, per_sample
from samplewise.core.memory import free_memory
from samplewise.core.slow_notice import telling
from samplewise.engine.gradients import gradients
from samplewise.errors import SamplewiseError
from samplewise.step.checks import listed, training_batch_norms
from samplewise.step.step import Step
from samplewise.transforms.clip import clip

SAMPLES = 16  # of the first batch, at most
COMPILED = {"eager": False, "compiled": True}
KINDS: dict[str, tuple[Any, ...]] = {PLAIN: (), "with sw.clip(1.0)": (clip(1.0),)}


@dataclass
class RecipeCheck:
    """Recipe under examination: its model, its loss, one batch, and the issues found so far."""

    recipe: Recipe
    model: nn.Module
    loss: Any
    batch: Any
    samples: int | None  # in `batch`; None: the batch cannot be sliced
    of: int | None  # samples of the loader's whole batch
    complaints: list[str] = field(default_factory=list)  # without duplicates
    told: int = 0  # number of issues reported, with duplicates

    def twin(self) -> tuple[nn.Module, Any, Any]:
        """Copy of the model with a new optimizer, and a copy of the loss."""
        model = copy.deepcopy(self.model)
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        return model, self.recipe.optimizer(model), loss

    def complain(self, message: str) -> None:
        """Record and print an issue; a repeated one is shortened."""
        self.told += 1
        if message in self.complaints:
            typer.echo(f"{message.split(':')[0]}, as above")
            return
        self.complaints.append(message)
        typer.echo(message)


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A Python file with functions model() and data().")
    ] = None,
    zoo: Annotated[bool, typer.Option("--zoo", help="Check this machine instead of a recipe.")] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --zoo: fp64, fp32, or bf16 (autocast). Default: fp64."),
    ] = None,
) -> None:
    """Check a recipe before training, or check this machine.

    With a recipe, on one batch (at most 16 samples of it) and on copies of the model: compares each sample's gradient
    with one backward pass per sample, shows how the gradients of each parameter are computed, lists warnings and errors
    of the first update, and measures the time and memory of an update, plain and with clipping, for several microbatch
    sizes, and the time of an update of one sample, eager and compiled.

    With --zoo: compares the gradients of a few hundred small models, each with a feature that is hard to get right,
    with one backward pass per sample, on the given device and in the given precision.

    The exit code is 0 if no problem was found, and 1 if anything was wrong, refused or warned about.
    """
    if (recipe is None) != zoo:
        found = "neither" if recipe is None else "both"
        raise typer.BadParameter(f"give one of RECIPE and --zoo; found {found}.", param_hint="RECIPE")
    if recipe is not None and dtype is not None:
        raise typer.BadParameter(
            "can only be used with --zoo; found a recipe, which has its own dtype.", param_hint="--dtype"
        )
    where = device_named(device)
    if recipe is None:
        well = examine(precision_named(dtype, where), where)
    else:
        well = _consulted(recipe, where)
    if not well:
        raise typer.Exit(1)


def _consulted(recipe: Path, where: torch.device) -> bool:
    """Check a recipe and print the findings; True if there are no issues."""
    patient = _examined(Recipe(recipe))
    with blaming(recipe):
        well = _check(patient)
        patient.model.to(where)
        patient.batch = to_device(patient.batch, where)
        _plan(patient)
        _first_update(patient)
        costs = _measure(patient, where)
        _one_by_one(patient)
    _advise(patient, well, costs)
    return well and not patient.complaints


def _examined(recipe: Recipe) -> RecipeCheck:
    with _telling("building the model and fetching a batch"):
        model, (loader, _) = recipe.model(), recipe.data()
        with blaming(recipe.path):
            batch = next(iter(loader), None)
            if batch is None:
                raise RecipeError(f"{recipe.path}: the loader of data() must yield at least one batch; found none.")
            total = length(batch)
            samples = None if total is None else min(total, SAMPLES)
            batch = batch if samples is None else cut(batch, 0, samples)
            first = next(model.parameters(), None)
            batch = batch if first is None else to_device(batch, first.device)
            return RecipeCheck(recipe, model, recipe.loss(), batch, samples, total)


# --- the sections -----------------------------------------------------------------------------------------------------


def _check(patient: RecipeCheck) -> bool:
    """Compare the engine with one backward pass per sample; True if the gradients agree.

    Runs on the device on which the recipe puts the model, because some accelerators have no float64.
    """
    well = False
    with _noting(patient), _telling("comparing the engine with one backward pass per sample"):
        found = check(patient.model, patient.loss, patient.batch)
        typer.echo(found)
        well = found.ok
        if found.refusal is not None:
            patient.complaints.append(f"refused: {found.refusal}")
    return well


def _plan(patient: RecipeCheck) -> None:
    typer.echo("\nGradient plan")
    with _noting(patient), _telling("planning"), torch.random.fork_rng(devices=[]):
        model, _, loss = patient.twin()
        losses, _ = per_sample(as_loss_fn(loss)(model, patient.batch))
        typer.echo(gradients(losses, model).explain())


def _first_update(patient: RecipeCheck) -> None:
    typer.echo("\nFirst update")
    before = patient.told
    for kind, transforms in KINDS.items():
        with _noting(patient, kind), _telling(f"one update, {kind}"):
            model, optimizer, loss = patient.twin()
            step = Step(model, optimizer, loss, transforms=transforms)
            step(patient.batch)
    if patient.told == before:
        typer.echo("no warnings")


def _measure(patient: RecipeCheck, where: torch.device) -> Costs:
    """Measure updates of each kind and microbatch size; combinations that are refused are left out."""
    typer.echo("\nTime and memory per update")
    keys = _keys(patient)
    with _telling("measuring"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # already reported
        ready = {key: step for key in keys if (step := _ready(patient, *key))}
        updates = {key: partial(step, patient.batch) for key, step in ready.items()}
        costs = measured(updates, {key: step.model for key, step in ready.items()}, where)
    typer.echo(table(costs, keys, f"{_how_many(patient)}; MB: {memory_is(where)}"))
    return costs


def _keys(patient: RecipeCheck) -> list[Key]:
    pieces = [size for size in dict.fromkeys(((patient.samples or 0) // 2, (patient.samples or 0) // 4)) if size]
    return [(kind, size) for kind in KINDS for size in (None, *pieces)]


def _ready(patient: RecipeCheck, kind: str, microbatch: int | None) -> Step | None:
    """A step that has made one update, or None if the update is refused."""
    model, optimizer, loss = patient.twin()
    try:
        step = Step(model, optimizer, loss, microbatch=microbatch, transforms=KINDS[kind], audit=False)
        step(patient.batch)
    except SamplewiseError:
        return None
    return step


def _one_by_one(patient: RecipeCheck) -> None:
    """Measure updates of one sample, eager and compiled, on copies; print the reason if they cannot be compiled.

    Updates of one sample gain the most from compilation.
    """
    if patient.samples is None:
        return
    typer.echo("\nTime per update of one sample")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is printed below
        try:
            steps = {(name, 1): _alone(patient, compile) for name, compile in COMPILED.items()}
        except Exception as problem:  # the model may support batches but not a single sample
            typer.echo(f"not possible: {type(problem).__name__}: {problem}")
            return
        how = steps["compiled", 1].compiled
        if how != "compiled":
            del steps["compiled", 1]
        with _telling("measuring"):
            found = microseconds({key: partial(step, patient.batch) for key, step in steps.items()}, patient.samples)
    for (name, _), each in found.items():
        typer.echo(f"{name:<10}{three_digits(each)} µs")
    if how != "compiled":
        typer.echo(f"uncompiled: {how}")


def _alone(patient: RecipeCheck, compile: bool) -> Step:
    """A step after two passes over the batch; its first update is never compiled."""
    model, optimizer, loss = patient.twin()
    step = Step(model, optimizer, loss, samples=1, audit=False, compile=compile)
    with step.slow_compile_notice(lambda line: typer.echo(f"... {line.removesuffix(' ...')}", err=True)):
        for _ in range(2):
            step(patient.batch)
    return step


def _how_many(patient: RecipeCheck) -> str:
    if patient.samples is None:
        return "a batch that cannot be sliced"
    if patient.of == patient.samples:
        return f"{patient.samples} samples"
    return f"{patient.samples} samples of a batch of {patient.of}"


# --- the advice -------------------------------------------------------------------------------------------------------


def _advise(patient: RecipeCheck, well: bool, costs: Costs) -> None:
    typer.echo("\nAdvice")
    lines = [*_about_samples(patient, well), *advice(costs, patient.samples, patient.of, free_memory(patient.model))]
    if patient.complaints:
        lines.append(f"Fix the errors and warnings listed above ({len(patient.complaints)}) before you train.")
    elif well:
        lines.append("No problems found: the recipe is ready for training.")
    for line in lines:
        typer.echo(f"- {line}")


def _about_samples(patient: RecipeCheck, well: bool) -> list[str]:
    norms = training_batch_norms([patient.model])
    if norms:
        return [
            f"BatchNorm in training mode mixes samples (module {listed(norms)}), so per-sample gradients are not "
            "defined. Use GroupNorm, or eval() for these modules; plain training without --clip works unchanged."
        ]
    return [] if well else ["Do not rely on per-sample gradients of this model: the check above gives the reason."]


# --- output -----------------------------------------------------------------------------------------------------------


@contextmanager
def _noting(patient: RecipeCheck, kind: str = "") -> Iterator[None]:
    """Report warnings and samplewise errors raised in the block as issues."""
    refusal = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except SamplewiseError as error:
            refusal = error
    for warning in caught:
        patient.complain(f"warned{kind and f', {kind}'}: {warning.message}")
    if refusal is not None:
        patient.complain(f"refused{kind and f', {kind}'}: {refusal}")


def _telling(doing: str) -> AbstractContextManager[None]:
    """Print a notice on stderr if the block takes longer than 2 s."""
    return telling(lambda what: typer.echo(f"... {what}", err=True), doing)
