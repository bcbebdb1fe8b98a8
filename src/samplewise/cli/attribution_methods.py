"""Methods of `samplewise attribute`, one entry each in METHODS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import typer
from torch import Tensor, nn

from samplewise.attribution.influence import influence
from samplewise.cli.dataset_order import OrderedBatches
from samplewise.core.text import did_you_mean
from samplewise.eval_pass import Checkpoint


@dataclass(frozen=True)
class Task:
    """Inputs of a method."""

    model: nn.Module  # at the newest checkpoint
    loss: Any
    checkpoints: Sequence[Checkpoint]  # (state dict, weight), the newest last
    train: OrderedBatches
    queries: OrderedBatches


@dataclass(frozen=True)
class Method:
    """Attribution method.

    effect    meaning of a positive score, for the page
    compute   function of a task and the options; returns scores (queries, training samples)
    passes    number of passes over the training samples
    options   values of the options that the method has
    """

    name: str
    title: str
    effect: str
    compute: Callable[..., Tensor]
    passes: Callable[[Task], int]
    options: Mapping[str, Any] = field(default_factory=dict)

    def scores(self, task: Task) -> Tensor:
        return self.compute(task, **self.options)


def method_named(name: str, **options: Any) -> Method:
    """Method of this name, with the options that are not None; raises typer.BadParameter for one it does not have."""
    if name not in METHODS:
        raise typer.BadParameter(
            f"must be one of {', '.join(METHODS)}; found {name!r}. {did_you_mean(name, METHODS)}".rstrip(),
            param_hint="--method",
        )
    method = METHODS[name]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in method.options:
            others = " or ".join(each.name for each in METHODS.values() if option in each.options)
            raise typer.BadParameter(f"must be used with --method {others}; found {name}.", param_hint=f"--{option}")
    return replace(method, options={**method.options, **given})


def _influence(task: Task) -> Tensor:
    return influence(task.model, task.loss, task.train, task.queries, task.checkpoints).T


METHODS = {
    method.name: method
    for method in (
        Method(
            "influence",
            "TracIn influence",
            "training on the sample lowers the loss of the query",
            _influence,
            lambda task: len(task.checkpoints) * len(task.queries),
        ),
    )
}
