"""Training of `samplewise train RECIPE`, after the arguments are checked.

With --ledger, the batches of a DataLoader with a map-style dataset get the index of each sample, as with `sw.Indexed`:
batch.id, or batch["id"] for a dict. The recipe's collate_fn and loss get the same items and batches as without ids.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from samplewise.attribution.methods import Rerun
from samplewise.cli.arguments import bad_parameters, device_named
from samplewise.cli.recipe import Recipe
from samplewise.cli.train import Exists, PrivateOptions
from samplewise.core.files import RECIPE_FILE, absolute, write_json
from samplewise.core.losses import as_criterion
from samplewise.core.state import RandomState, seed_everything
from samplewise.core.text import plural
from samplewise.errors import BatchError
from samplewise.ledger.ledger import Ledger
from samplewise.ledger.previews import indexed_items
from samplewise.ledger.sample_ids import IdCollator, NumberedDataset, numbered, without_id
from samplewise.loop.checkpoint.trained import run_settings
from samplewise.loop.data.adapters import is_map_style, loader_with
from samplewise.loop.replay import ReplayedUpdate, replay
from samplewise.loop.trainer import Trainer
from samplewise.parallel import collectives, launch
from samplewise.privacy.accounting import sampling_plan
from samplewise.privacy.privacy import Privacy
from samplewise.step.step import Step
from samplewise.transforms.chain import as_chain
from samplewise.transforms.clip import clip as clip_transform


def train_recipe(
    path: Path,
    source: bytes,
    run: Path,
    exists: Exists,
    device: str,
    seed: int,
    ledger: str | None,
    clip: float | None,
    private: PrivateOptions | None,
    step_options: dict[str, Any],
    fit_options: dict[str, Any],
) -> None:
    """Train the model of a recipe and print a summary. source: the content of the file."""
    target = launch.join(device_named(device))
    run_path = absolute(run)  # before the recipe is loaded, which may change the working directory
    options = {"recipe": str(absolute(path)), "seed": seed, "ledger": ledger, "clip": clip, "step": dict(step_options)}
    prepared = prepare(path, source, target, seed, ledger, clip, private, step_options)
    if private is None:
        prepared.callbacks.append(RecipeRecord(options))
    with prepared.recipe.errors(), explain_missing_ids() if prepared.adds_ids else nullcontext():
        trainer = Trainer(
            prepared.step(),
            run_path,
            prepared.callbacks,
            metrics=prepared.metrics,
            device=target,
            seed=seed,
            exists=exists,
        )
        result = trainer.fit(prepared.loader, prepared.validation, **fit_options)
    if exists == "new" and trainer.run is not None:
        run = run.with_name(trainer.run.name)
    # Print the summary on rank 0; exit with 128 + signal number if a signal stopped the training.
    if collectives.rank() == 0:
        typer.echo(f"{result.reason}: {plural(result.updates, 'update')} in all")
        if trainer.step.privacy is not None:
            typer.echo(f"spent        {trainer.step.privacy.spent()}")
        typer.echo(f"log          {run / 'log.jsonl'}")
        typer.echo(f"checkpoints  {run / 'checkpoints'}")
        if result.signal is not None:
            typer.echo("continue     with --resume")
    if result.signal is not None:
        raise typer.Exit(128 + signal.Signals[result.signal])


def replay_recipe(
    path: Path, source: bytes, run: Path, update: int, limit: int, device: torch.device, options: dict[str, Any]
) -> ReplayedUpdate:
    """Recompute an update of a run that was trained with these options, as in `recipe.json`."""
    prepared = prepare(path, source, device, options["seed"], options["ledger"], options["clip"], None, options["step"])
    has_ids = indexed_items(prepared.loader) is not None
    with prepared.recipe.errors():
        step = prepared.step()
        return replay(step, run, update, prepared.loader, "id" if has_ids else None, options["seed"], device, limit)


class RecipeRecord:
    """Callback that writes recipe.json."""

    def __init__(self, options: dict[str, Any]):
        self._options = options

    def on_fit_start(self, trainer: Trainer) -> None:
        if collectives.rank() == 0 and trainer.run is not None:
            write_json(trainer.run / RECIPE_FILE, self._options)


@dataclass
class Prepared:
    """What a recipe and the options of the command give for a training run. step: function that makes the step."""

    recipe: Recipe
    step: Callable[[], Step]
    loader: Any
    validation: Any
    callbacks: list[Any]
    metrics: Any
    adds_ids: bool


def prepare(
    path: Path,
    source: bytes,
    target: torch.device,
    seed: int,
    ledger: str | None,
    clip: float | None,
    private: PrivateOptions | None,
    step_options: dict[str, Any],
) -> Prepared:
    """Call the functions of a recipe, in the order of a training run, after seeding the random numbers."""
    try:
        recorder = None if ledger is None else Ledger(norms=ledger == "norms")
    except ImportError as why:
        raise typer.BadParameter(f"{why}.", param_hint="--ledger") from why
    seed_everything(seed)
    recipe = Recipe(path, source)
    if clip is not None and private is None:
        if recipe.defines("transforms"):
            raise typer.BadParameter(
                f"give one of --clip and transforms() in the recipe; found both. Put sw.clip({clip:g}) into the list "
                "that transforms() returns, where its place among the others counts.",
                param_hint="--clip",
            )
        step_options["transforms"] = (clip_transform(clip),)

    model = recipe.model()
    loader, validation = recipe.data()
    with recipe.errors():
        model.to(target)  # before the optimizer is made: some create their state on the device of the parameters
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer)
    loss = recipe.loss(model)
    callbacks = recipe.callbacks()
    metrics = recipe.metrics()
    step_options = {"transforms": recipe.transforms(), **step_options}
    if private is not None:
        step_options["privacy"], loader = plan_privacy(private, loader)
        if collectives.rank() == 0:
            typer.echo(f"privacy      {step_options['privacy']}".replace("\n", "\n" + " " * 13))
    adds_ids = recorder is not None and not any(isinstance(callback, Ledger) for callback in callbacks)
    if adds_ids:
        callbacks.append(recorder)
        with recipe.errors():
            loader, loss = with_ids(loader, loss)

    def step() -> Step:
        return Step(model, optimizer, loss, scheduler=scheduler, parallel="ddp", **step_options)

    return Prepared(recipe, step, loader, validation, callbacks, metrics, adds_ids)


# --- privacy ----------------------------------------------------------------------------------------------------------


def plan_privacy(options: PrivateOptions, loader: Any) -> tuple[Privacy, DataLoader[Any]]:
    """Plan for the dataset of a loader, and a loader that draws from it as the accountant assumes."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise typer.BadParameter(
            "the recipe must return a DataLoader with a map-style dataset, from which samples are drawn; found "
            f"{type(loader).__name__}.",
            param_hint="--epsilon",
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    assert options.delta is not None and options.clip is not None
    if options.batch is not None and options.batch > samples:
        raise typer.BadParameter(f"must be at most {samples}, the number of samples.", param_hint="--batch")
    with bad_parameters("epsilon", ("delta", "sample_rate", "clip", "updates")):
        sample_rate, updates = sampling_plan(
            options.sample_rate, options.batch, options.updates, options.epochs, samples
        )
        privacy = Privacy(
            epsilon=options.epsilon, delta=options.delta, updates=updates, sample_rate=sample_rate, clip=options.clip
        )
    names = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "timeout")  # batches are drawn otherwise
    arguments = {name: getattr(loader, name) for name in names}
    return privacy, privacy.loader(loader.dataset, **arguments)


# --- repeating a run --------------------------------------------------------------------------------------------------


def rerun_of(path: Path, source: bytes, run: Path, loader: Any, device: torch.device) -> Rerun:
    """Loader with ids, and function that makes the step of a recipe as `train_recipe` has done for this run."""
    settings = run_settings(run)
    options: dict[str, Any] = {name: settings.get(name) for name in ("samples", "microbatch")}
    clip = re.fullmatch(r"chain\(clip\(([0-9.e+-]+)\)\)", settings.get("transforms", ""))

    def make_step() -> Step:
        recipe = Recipe(path, source)
        model = recipe.model()
        data, _ = recipe.data()
        model.to(device)
        optimizer = recipe.optimizer(model)
        scheduler = recipe.scheduler(optimizer)
        transforms = recipe.transforms()
        if clip is not None and not recipe.defines("transforms"):  # --clip
            transforms = as_chain(clip_transform(float(clip[1])))
        _, loss = with_ids(data, recipe.loss(model))
        return Step(model, optimizer, loss, scheduler=scheduler, transforms=transforms, **options)

    return Rerun(make_step, with_ids(loader, None)[0])


# --- ids of samples ---------------------------------------------------------------------------------------------------


@contextmanager
def explain_missing_ids() -> Iterator[None]:
    """Name --ledger in the error for batches without ids: those of a loader that `with_ids` leaves unchanged."""
    try:
        yield
    except BatchError as error:
        if "'id'" not in str(error):
            raise
        raise BatchError(
            "--ledger needs the id of each sample. It adds ids to the batches of a DataLoader with a map-style "
            f"dataset; batches of other loaders must hold them, as those of sw.Indexed do: {error}"
        ) from error


def with_ids(loader: Any, loss: Any) -> tuple[Any, Any]:
    """A loader whose batches have ids, and a loss that does not see them. Both are unchanged if the batches have ids,
    or if the loader is not a DataLoader with a map-style dataset.
    """
    if not is_map_style(loader) or loader.batch_sampler is None or indexed_items(loader) or _has_id(loader):
        return loader, loss
    dataset = NumberedDataset(loader.dataset)
    join = partial(numbered, as_columns=as_criterion(loss) is not None)
    collate = IdCollator(loader.collate_fn, split=tuple, join=join)  # the samples are pairs already
    loader = loader_with(loader, dataset=dataset, collate_fn=collate)
    if as_criterion(loss) is not None:
        return loader, loss  # ignores the id
    if isinstance(loss, nn.Module):  # must stay a module, whose parameters are trained
        loss.register_forward_pre_hook(lambda _, arguments: (arguments[0], without_id(arguments[1])))
        return loader, loss

    @wraps(loss)
    def loss_without_id(model: nn.Module, batch: Any) -> Any:
        return loss(model, without_id(batch))

    return loader, loss_without_id


def _has_id(loader: Any) -> bool:
    """True if batches of a loader have an id; the random state is restored."""
    if not len(loader.dataset):
        return False
    restore = RandomState().restore
    try:
        batch = loader.collate_fn([loader.dataset[0]])
    finally:
        restore()
    return "id" in batch if isinstance(batch, Mapping) else hasattr(batch, "id")
