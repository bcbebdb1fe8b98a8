"""Methods of `attribute`, one entry each in METHODS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplewise.attribution.curvature import DEFAULT_DAMPING, Curvature
from samplewise.attribution.ekfac import ekfac
from samplewise.attribution.gauss_newton import GaussNewton, summary
from samplewise.attribution.influence import influence
from samplewise.attribution.metagradient import differentiate
from samplewise.attribution.ordered_samples import OrderedBatches
from samplewise.attribution.projected_features import OutputFn, margin
from samplewise.attribution.run_damping import RunDamping
from samplewise.attribution.trak import trak
from samplewise.core.losses import as_loss_fn, per_sample
from samplewise.core.state import eval_mode
from samplewise.core.text import did_you_mean
from samplewise.dataset_pass import Checkpoint, parameters_kept
from samplewise.errors import CheckpointError, LossesError
from samplewise.loop.checkpoint.trained import TrainedModel
from samplewise.step.step import Step

LOWERS_LOSS = "training on the sample lowers the loss of the query"
RAISES_MARGIN = "training on the sample raises the margin of the query, the log-odds of its label"
MAX_DIM = 512  # default of dim for many training samples
SAMPLES_PER_DIM = 4  # of training samples per dimension, for few


class Rerun(NamedTuple):
    """What a method needs to repeat a run: see `sw.metagradient`."""

    make_step: Callable[[], Step]
    loader: Any


@dataclass(frozen=True)
class Task:
    """Inputs of a method."""

    model: nn.Module  # at the newest checkpoint
    loss: Any
    checkpoints: Sequence[Checkpoint]  # (state dict, weight), the newest last
    train: OrderedBatches
    queries: OrderedBatches
    trained: TrainedModel  # the newest checkpoint
    rerun: Rerun | None


class Scores(NamedTuple):
    """Result of a method.

    values    (queries, training samples)
    effect    meaning of a positive score, for the page
    details   settings that the method has used, for attribution.json
    notes     remarks on the quality of the scores
    """

    values: Tensor
    effect: str
    details: dict[str, Any]
    notes: tuple[str, ...] = ()


# --- influence --------------------------------------------------------------------------------------------------------


def _influence(task: Task) -> Scores:
    scores = influence(task.model, task.loss, task.train, task.queries, task.checkpoints)
    return Scores(scores, LOWERS_LOSS, {"weights": [weight for _, weight in task.checkpoints]})


def _ekfac(task: Task, damping: float | None = None, refine: int | None = None) -> Scores:
    labels: Literal["expected", "data"] = "expected"
    try:
        fit = ekfac(task.model, task.loss, task.train, labels=labels)
    except LossesError:  # not a known likelihood, from which labels could be drawn
        labels = "data"
        fit = ekfac(task.model, task.loss, task.train, labels=labels)
    if refine is None:
        scores = _with_curvature(task, fit, damping)
        return Scores(scores, LOWERS_LOSS, {"damping": damping or DEFAULT_DAMPING, "labels": labels})
    run = None
    if damping is None:
        with suppress(CheckpointError):  # no rule for its optimizer: the default multiple
            RunDamping.of(task.trained.path)
            run = task.trained.path
    solver = GaussNewton(task.model, task.loss, task.train, fit, refine, damping=damping, run=run)
    scores = _with_curvature(task, solver, None)
    stops = solver.stops
    details = {
        "refine": refine,
        "damping": solver.rule,
        "iterations": max(stop.iterations for stop in stops),
        "residual": max(stop.residual for stop in stops),
        "labels": labels,
    }
    converged = all(stop.converged for stop in stops)
    notes = () if converged else (f"The {summary([solver])}. More iterations or damping make it smaller.",)
    return Scores(scores, LOWERS_LOSS, details, notes)


def _passes_of_ekfac(task: Task, refine: int = 0, **_: Any) -> int:
    return 2 + (1 + refine) * len(task.queries)


def _with_curvature(task: Task, curvature: Curvature, damping: float | None) -> Tensor:
    return influence(task.model, task.loss, task.train, task.queries, curvature=curvature, damping=damping)


# --- TRAK -------------------------------------------------------------------------------------------------------------


def _trak(task: Task, dim: int | None = None, damping: float = DEFAULT_DAMPING) -> Scores:
    dim = dim or max(1, min(MAX_DIM, task.train.samples // SAMPLES_PER_DIM))
    has_margin = _is_cross_entropy(task)
    output_fn = margin if has_margin else _minus_loss(task.loss)

    def models() -> Iterator[nn.Module]:  # one model at a time, with the parameters of each checkpoint in turn
        for state, _ in task.checkpoints:
            task.model.load_state_dict(state)
            yield task.model

    with parameters_kept(task.model):
        scores = trak(models(), output_fn, task.train, task.queries, dim, damping=damping)
    output = "margin" if has_margin else "minus the loss"
    return Scores(
        scores, RAISES_MARGIN if has_margin else LOWERS_LOSS, {"dim": dim, "damping": damping, "output": output}
    )


def _is_cross_entropy(task: Task) -> bool:
    """True if the losses of the first queries are log(1 + exp(-margin)), the cross-entropy of classes."""
    batch = next(iter(task.queries))
    with eval_mode(task.model), torch.no_grad():
        losses = per_sample(as_loss_fn(task.loss)(task.model, batch))[0]
        try:
            margins = margin(task.model, batch)
        except Exception:  # a batch of another form, or a model that the loss calls in another way
            return False
    return margins.shape == losses.shape and torch.allclose(F.softplus(-margins), losses, rtol=1e-3, atol=1e-5)


def _minus_loss(loss: Any) -> OutputFn:
    loss_fn = as_loss_fn(loss)

    def output_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses = per_sample(loss_fn(model, batch))[0]
        return -losses, torch.ones_like(losses)  # minus the derivative of the loss with respect to the output

    return output_fn


# --- metagradient -----------------------------------------------------------------------------------------------------


def _metagradient(task: Task) -> Scores:
    assert task.rerun is not None  # see `AttributionPlan.results`
    device = next(task.model.parameters()).device
    derivatives, problem = differentiate(task.trained.run, *task.rerun, task.queries, device=device)
    if derivatives.shape[1] < len(task.rerun.loader.dataset):
        raise ValueError("sw.Indexed must number the samples of the training loader; found other numbers.")
    notes = (problem[0].upper() + problem[1:],) if problem else ()
    return Scores(-derivatives, LOWERS_LOSS, {}, notes)


# --- table of the methods ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """Attribution method.

    compute   function of a task and the options
    passes    largest number of passes over the training samples; 0 if it shows its own progress
    accepts   names of options
    models    largest number of checkpoints that it can use; None: any number
    repeats   whether it repeats the run
    options   values of options
    """

    name: str
    title: str
    compute: Callable[..., Scores]
    passes: Callable[..., int]  # of a task and the options
    accepts: tuple[str, ...] = ()
    models: int | None = None
    repeats: bool = False
    options: dict[str, Any] = field(default_factory=dict)


METHODS = {
    method.name: method
    for method in (
        Method("influence", "TracIn influence", _influence, lambda task: len(task.checkpoints) * len(task.queries)),
        Method("trak", "TRAK", _trak, lambda task, **_: len(task.checkpoints), accepts=("dim", "damping")),
        Method("ekfac", "EK-FAC influence", _ekfac, _passes_of_ekfac, accepts=("damping", "refine"), models=1),
        Method("metagradient", "metagradient", _metagradient, lambda task: 0, models=1, repeats=True),
    )
}


def method_named(name: str, **options: Any) -> Method:
    """Method of this name with the options that are not None; raises ValueError for one that it does not accept."""
    if name not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}; found {name!r}. {did_you_mean(name, METHODS)}".rstrip()
        )
    method = METHODS[name]
    options = {option: value for option, value in options.items() if value is not None}
    for option in options:
        if option not in method.accepts:
            names = " or ".join(candidate.name for candidate in METHODS.values() if option in candidate.accepts)
            raise ValueError(f"{option} must be used with method {names}; found {name}.")
    return replace(method, options=options)
