"""samplewise doctor RECIPE, or --zoo."""

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

from samplewise.batches import cut, length
from samplewise.checking import check
from samplewise.cli.arguments import Device, device_named
from samplewise.cli.costs import PLAIN, Costs, Key, advice, measured, memory_is, microseconds, table, three_digits
from samplewise.cli.recipe import Recipe, RecipeError, blaming
from samplewise.cli.zoo import examine, precision_named
from samplewise.engine.gradients import gradients
from samplewise.errors import SamplewiseError
from samplewise.loop.devices import moved
from samplewise.losses import as_loss_fn, per_sample
from samplewise.memory import free_memory
from samplewise.patience import telling
from samplewise.step.mistakes import listed, training_batch_norms
from samplewise.step.step import Step
from samplewise.transforms.clip import clip

SAMPLES = 16
COMPILED = {"eager": False, "compiled": True}
KINDS: dict[str, tuple[Any, ...]] = {PLAIN: (), "with sw.clip(1.0)": (clip(1.0),)}


@dataclass
class Patient:
    recipe: Recipe
    model: nn.Module
    loss: Any
    batch: Any
    samples: int | None  # None: the batch cannot be cut
    of: int | None  # samples of the whole batch
    complaints: list[str] = field(default_factory=list)  # each once
    told: int = 0  # how often there was something to say

    def twin(self) -> tuple[nn.Module, Any, Any]:
        """Model, optimizer and loss to try things on."""
        model = copy.deepcopy(self.model)
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        return model, self.recipe.optimizer(model), loss

    def complain(self, message: str) -> None:
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
    zoo: Annotated[bool, typer.Option("--zoo", help="Examine this machine instead of a recipe.")] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --zoo: fp64, fp32, or bf16, which is autocast. Default: fp64."),
    ] = None,
) -> None:
    """Look at a recipe before it is trained, or at this machine.

    With a recipe, on one batch (at most 16 samples of it) and on copies of the model: compares each sample's gradient
    with one backward pass per sample, shows how each parameter's gradients are found, tells what the first update warns
    of or refuses, and measures the time and memory of an update, plain and with clipping, for several microbatches;
    and the time of an update of one sample, compiled and not.

    With --zoo: compares the gradients of a few hundred small models, each of them hard in its own way, with one
    backward pass per sample, on your device and in the precision you train in.

    The exit code is 0 if all is well, 1 if anything was wrong, refused or warned of.
    """
    if (recipe is None) != zoo:
        found = "neither" if recipe is None else "both"
        raise typer.BadParameter(f"give one of RECIPE and --zoo; found {found}.", param_hint="RECIPE")
    if recipe is not None and dtype is not None:
        raise typer.BadParameter("goes with --zoo; found a recipe, which has its own dtype.", param_hint="--dtype")
    where = device_named(device)
    well = examine(precision_named(dtype, where), where) if recipe is None else _consulted(recipe, where)
    if not well:
        raise typer.Exit(1)


def _consulted(recipe: Path, where: torch.device) -> bool:
    patient = _examined(Recipe(recipe))
    with blaming(recipe):
        well = _check(patient)
        patient.model.to(where)
        patient.batch = moved(patient.batch, where)
        _plan(patient)
        _first_update(patient)
        costs = _measure(patient, where)
        _one_by_one(patient)
    _advise(patient, well, costs)
    return well and not patient.complaints


def _examined(recipe: Recipe) -> Patient:
    with _telling("building the model and fetching a batch"):
        model, (loader, _) = recipe.model(), recipe.data()
        with blaming(recipe.path):
            batch = next(iter(loader), None)
            if batch is None:
                raise RecipeError(f"{recipe.path}: the loader of data() must have a batch; found none.")
            total = length(batch)
            samples = None if total is None else min(total, SAMPLES)
            batch = batch if samples is None else cut(batch, 0, samples)
            first = next(model.parameters(), None)
            batch = batch if first is None else moved(batch, first.device)
            return Patient(recipe, model, recipe.loss(), batch, samples, total)


# --- the sections -----------------------------------------------------------------------------------------------------


def _check(patient: Patient) -> bool:
    """On the device where the recipe leaves the model: not every accelerator knows float64."""
    well = False
    with _noting(patient), _telling("comparing the engine with one backward pass per sample"):
        found = check(patient.model, patient.loss, patient.batch)
        typer.echo(found)
        well = found.ok
        if found.refusal is not None:
            patient.complaints.append(f"refused: {found.refusal}")
    return well


def _plan(patient: Patient) -> None:
    typer.echo("\nThe plan")
    with _noting(patient), _telling("planning"), torch.random.fork_rng(devices=[]):
        model, _, loss = patient.twin()
        losses, _ = per_sample(as_loss_fn(loss)(model, patient.batch))
        typer.echo(gradients(losses, model).explain())


def _first_update(patient: Patient) -> None:
    typer.echo("\nThe first update")
    before = patient.told
    for kind, transforms in KINDS.items():
        with _noting(patient, kind), _telling(f"one update, {kind}"):
            model, optimizer, loss = patient.twin()
            step = Step(model, optimizer, loss, transforms=transforms)
            step(patient.batch)
    if patient.told == before:
        typer.echo("nothing to warn of")


def _measure(patient: Patient, where: torch.device) -> Costs:
    """Of an update; what is refused has no cost."""
    typer.echo("\nTime and memory per update")
    keys = _keys(patient)
    with _telling("measuring"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they have been told of
        ready = {key: step for key in keys if (step := _ready(patient, *key))}
        updates = {key: partial(step, patient.batch) for key, step in ready.items()}
        costs = measured(updates, {key: step.model for key, step in ready.items()}, where)
    typer.echo(table(costs, keys, f"{_how_many(patient)}; MB: {memory_is(where)}"))
    return costs


def _keys(patient: Patient) -> list[Key]:
    pieces = [size for size in dict.fromkeys(((patient.samples or 0) // 2, (patient.samples or 0) // 4)) if size]
    return [(kind, size) for kind in KINDS for size in (None, *pieces)]


def _ready(patient: Patient, kind: str, microbatch: int | None) -> Step | None:
    """A step that has been made once, or None if it is refused."""
    model, optimizer, loss = patient.twin()
    try:
        step = Step(model, optimizer, loss, microbatch=microbatch, transforms=KINDS[kind], audit=False)
        step(patient.batch)
    except SamplewiseError:
        return None
    return step


def _one_by_one(patient: Patient) -> None:
    """Updates of one sample, on copies. These gain the most by being compiled, and here is told if they cannot be."""
    if patient.samples is None:
        return
    typer.echo("\nTime per update of one sample")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is told below
        try:
            steps = {(name, 1): _alone(patient, compile) for name, compile in COMPILED.items()}
        except Exception as problem:  # a batch goes: this is about one sample alone
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


def _alone(patient: Patient, compile: bool) -> Step:
    """A step that has made some updates, of which the first is never compiled."""
    model, optimizer, loss = patient.twin()
    step = Step(model, optimizer, loss, samples=1, audit=False, compile=compile)
    with step.telling(lambda line: typer.echo(f"... {line.removesuffix(' ...')}", err=True)):
        for _ in range(2):
            step(patient.batch)
    return step


def _how_many(patient: Patient) -> str:
    if patient.samples is None:
        return "a batch that cannot be cut"
    return f"{patient.samples} samples" + (f" of a batch of {patient.of}" if patient.of != patient.samples else "")


# --- the advice -------------------------------------------------------------------------------------------------------


def _advise(patient: Patient, well: bool, costs: Costs) -> None:
    typer.echo("\nAdvice")
    lines = [*_about_samples(patient, well), *advice(costs, patient.samples, patient.of, free_memory(patient.model))]
    if patient.complaints:
        lines.append(f"See to what is refused or warned of above ({len(patient.complaints)}) before you train.")
    elif well:
        lines.append("All is well: nothing speaks against training with this recipe.")
    for line in lines:
        typer.echo(f"- {line}")


def _about_samples(patient: Patient, well: bool) -> list[str]:
    norms = training_batch_norms([patient.model])
    if norms:
        return [
            f"BatchNorm in training mode mixes samples (module {listed(norms)}). A sample then has no gradient of its "
            "own. Use GroupNorm, or eval() for these modules; plain training without --clip works as it is."
        ]
    return [] if well else ["Do not rely on gradients of single samples: the check above says why."]


# --- saying things ----------------------------------------------------------------------------------------------------


@contextmanager
def _noting(patient: Patient, kind: str = "") -> Iterator[None]:
    """Refusals and warnings become complaints."""
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
    return telling(lambda what: typer.echo(f"... {what}", err=True), doing)
