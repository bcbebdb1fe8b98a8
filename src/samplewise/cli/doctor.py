"""samplewise doctor RECIPE, or --zoo."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import nn

from samplewise.batches import cut, length
from samplewise.checking import check
from samplewise.cli.arguments import Device, device_named
from samplewise.cli.recipe import Recipe, RecipeError, blaming
from samplewise.cli.zoo import examine, precision_named
from samplewise.engine.gradients import gradients
from samplewise.engine.table import render
from samplewise.errors import SamplewiseError
from samplewise.loop.devices import moved
from samplewise.losses import as_loss_fn, per_sample
from samplewise.step.mistakes import listed, training_batch_norms
from samplewise.step.step import Step
from samplewise.transforms.clip import clip

SAMPLES = 16
PATIENCE = 2.0  # seconds without a word
ROUNDS = 30
LONGEST = 5.0  # seconds of measuring, once each has been measured a few times
FEWEST = 3
KINDS: dict[str, tuple[Any, ...]] = {"plain": (), "with sw.clip(1.0)": (clip(1.0),)}
Times = dict[tuple[str, int | None], float]  # (kind, microbatch) -> milliseconds


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
    of or refuses, and measures what an update costs, plain and with clipping, for several microbatches.

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
        times = _measure(patient)
    _advise(patient, well, times)
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


def _measure(patient: Patient) -> Times:
    """Milliseconds per update; what is refused has none."""
    typer.echo("\nMilliseconds per update")
    with _telling("measuring"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they have been told of
        times = _interleaved({key: update for key in _sizes(patient) if (update := _ready(patient, *key))})
    sizes = list(dict.fromkeys(size for _, size in _sizes(patient)))
    cells = [(kind, *(_milliseconds(times.get((kind, size))) for size in sizes)) for kind in KINDS]
    heads = ["all at once" if size is None else f"microbatch {size}" for size in sizes]
    typer.echo(render(("update", *heads), cells, _how_many(patient)))
    return times


def _sizes(patient: Patient) -> list[tuple[str, int | None]]:
    pieces = [size for size in dict.fromkeys(((patient.samples or 0) // 2, (patient.samples or 0) // 4)) if size]
    return [(kind, size) for kind in KINDS for size in (None, *pieces)]


def _ready(patient: Patient, kind: str, microbatch: int | None) -> Callable[[], object] | None:
    """An update that has been made once, or None if it is refused."""
    model, optimizer, loss = patient.twin()
    try:
        step = Step(model, optimizer, loss, microbatch=microbatch, transforms=KINDS[kind], audit=False)
        step(patient.batch)
    except SamplewiseError:
        return None
    return lambda: step(patient.batch)


def _interleaved(updates: dict[tuple[str, int | None], Callable[[], object]]) -> Times:
    """The fastest of several, in turns: whatever else the machine does only adds to them."""
    seconds: dict[tuple[str, int | None], list[float]] = {key: [] for key in updates}
    began = perf_counter()
    for done in range(ROUNDS):
        if done >= FEWEST and perf_counter() - began > LONGEST:
            break
        for key, update in updates.items():
            _wait()
            started = perf_counter()
            update()
            _wait()
            seconds[key].append(perf_counter() - started)
    return {key: 1000 * min(found) for key, found in seconds.items()}


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _milliseconds(time: float | None) -> str:
    return "refused" if time is None else f"{time:.3g}"


def _how_many(patient: Patient) -> str:
    if patient.samples is None:
        return "a batch that cannot be cut"
    return f"{patient.samples} samples" + (f" of a batch of {patient.of}" if patient.of != patient.samples else "")


# --- the advice -------------------------------------------------------------------------------------------------------


def _advise(patient: Patient, well: bool, times: Times) -> None:
    typer.echo("\nAdvice")
    advice = [*_about_samples(patient, well), *_about_time(times)]
    if patient.complaints:
        advice.append(f"See to what is refused or warned of above ({len(patient.complaints)}) before you train.")
    elif well:
        advice.append("All is well: nothing speaks against training with this recipe.")
    for line in advice:
        typer.echo(f"- {line}")


def _about_samples(patient: Patient, well: bool) -> list[str]:
    norms = training_batch_norms([patient.model])
    if norms:
        return [
            f"BatchNorm in training mode mixes samples (module {listed(norms)}). A sample then has no gradient of its "
            "own. Use GroupNorm, or eval() for these modules; plain training without --clip works as it is."
        ]
    return [] if well else ["Do not rely on gradients of single samples: the check above says why."]


def _about_time(times: Times) -> list[str]:
    plain, clipped = (times.get((kind, None)) for kind in KINDS)
    advice = []
    if plain and clipped:
        advice.append(f"An update that clips each sample takes {clipped / plain:.1f} times as long as a plain one.")
    pieces = {size: time for (kind, size), time in times.items() if kind == "plain" and size is not None}
    if plain and pieces:
        size = max(pieces)
        advice.append(
            f"Microbatches of {size} take {pieces[size] / plain:.1f} times as long as all samples at once: "
            "leave --microbatch away unless memory is short."
            if pieces[size] > plain
            else f"Microbatches of {size} are no slower than all samples at once, and need less memory."
        )
    return advice


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


@contextmanager
def _telling(doing: str) -> Iterator[None]:
    """Says what takes so long, once it does."""
    timer = threading.Timer(PATIENCE, lambda: typer.echo(f"... {doing}", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
