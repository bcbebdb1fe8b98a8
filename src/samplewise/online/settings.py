"""Validation of the step of an `Online`, its task, and registration with river's base classes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

from torch import nn

from samplewise.core.losses import WITH_COUNTS, Criterion
from samplewise.online.growth import GrowingLayers
from samplewise.step.step import Step

Task = Literal["classification", "regression", "multi-target regression"]
BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss)
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)


def check_step(step: object) -> Step:
    """Return the step; raise TypeError or ValueError if it cannot learn from a stream."""
    if not isinstance(step, Step):
        raise TypeError(
            f"step must be a samplewise.Step; found {type(step).__name__}. Create one: "
            "sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1)."
        )
    chain, aggregate, ranks = step.transforms, step.config.aggregate, step._windows.ranks
    keys = sorted(map(repr, set(chain.batch_keys) - {0, 1, -1, -2}))
    grouped = chain.grouping is not None or (aggregate is not None and aggregate.key is not None)
    problems: list[tuple[bool, str]] = [
        (
            step.config.samples != 1,
            f"samples=1, because each update has one sample; found samples={step.config.samples}. Create "
            "Step(..., samples=1)",
        ),
        (
            step.privacy is not None,
            "no privacy=, because its batches are drawn at random from a dataset; found a private step. Leave it out",
        ),
        (
            ranks.size > 1 or ranks.exchanges or step.config.parallel is not None,
            "a model of one process; found one that is shared by ranks. Create the step without parallel=",
        ),
        (grouped, "samples that are in no group; found group() or per('group', ...). Leave them out"),
        (bool(keys), f"transforms that read x or y only; found the keys {', '.join(keys)}. The batch is (x, y)"),
        (step._has_pending_samples, "no open window; found samples that are in no update. Call step.flush() first"),
    ]
    for holds, problem in problems:
        if holds:
            raise ValueError(f"Online needs a step with {problem}.")
    return step


def task_of(step: Step, task: Task | None) -> Task:
    """Task of a step, from `task` or from its criterion; raise ValueError if the criterion is for another one."""
    if task is not None and task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(map(repr, get_args(Task)))}; found {task!r}.")
    if not isinstance(step.loss_fn, Criterion):
        if task is None:
            raise ValueError(
                "Online needs a task if loss_fn is a function, because it is derived from the class of a criterion; "
                f"found task=None. Pass task= as one of {', '.join(map(repr, get_args(Task)))}."
            )
        return task
    kind = type(step.loss_fn.criterion)
    last = GrowingLayers(step.model, step._applier.optimizer).last
    outputs = 1 if last is None else last.out_features
    if kind in WITH_COUNTS or (kind in BINARY and outputs == 1):
        derived: Task = "classification"
    elif kind in REGRESSION:
        derived = "regression" if outputs == 1 else "multi-target regression"
        if last is None and task is not None and task != "classification":
            derived = task
    else:
        raise ValueError(
            "Online needs a criterion of one label (nn.CrossEntropyLoss, nn.NLLLoss; nn.BCEWithLogitsLoss with one "
            f"output) or of numbers (nn.MSELoss, nn.L1Loss, nn.HuberLoss, ...); found {kind.__name__} with "
            f"{outputs} outputs. Write a loss function (model, batch) -> losses for batches (x, y), and pass task=."
        )
    if task not in (None, derived):
        raise ValueError(
            f"task must be {derived!r} for {kind.__name__} and {outputs} outputs; found {task!r}. Leave task out, or "
            "write a loss function (model, batch) -> losses for batches (x, y)."
        )
    return derived


def has_probabilities(step: Step) -> bool:
    """True if the one output of a classifier is a probability, not a logit."""
    return isinstance(step.loss_fn, Criterion) and type(step.loss_fn.criterion) is nn.BCELoss


def register(kind: type, name: str) -> None:
    """Make `kind` a virtual subclass of river.base.<name>, which river's metrics and pipelines test for. Does nothing
    without river. Importing river.base takes 0.02 s.
    """
    if find_spec("river") is None:
        return
    base: Any = import_module("river.base")
    getattr(base, name).register(kind)
