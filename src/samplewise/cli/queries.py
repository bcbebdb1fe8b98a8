"""Queries of `samplewise attribute`: which samples of the validation loader are explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import typer
from torch import Tensor, nn

from samplewise.cli.attribution_options import INDICES, QUERIES, RULES
from samplewise.cli.dataset_order import OrderedBatches, OrderedSamples
from samplewise.core.losses import as_loss_fn, per_sample
from samplewise.core.predictions import IGNORE_INDEX, prediction_columns
from samplewise.core.state import eval_mode
from samplewise.core.text import plural
from samplewise.errors import BatchError
from samplewise.loop.evaluation import check_one_per_sample
from samplewise.loop.metrics import OutputRecorder, Target


@dataclass(frozen=True)
class Outcomes:
    """Results of a model for some samples.

    losses       (N,), divided by the counts if the loss function returns them
    labels       (N,) class indices, or None if the task is not a classification with logits (B, classes)
    predictions  (N,) classes with the largest logit, or None
    """

    losses: Tensor
    labels: Tensor | None = None
    predictions: Tensor | None = None

    def of(self, rows: Tensor) -> Outcomes:
        """Outcomes of some of the samples."""
        labels, predictions = (None if each is None else each[rows] for each in (self.labels, self.predictions))
        return Outcomes(self.losses[rows], labels, predictions)


def outcomes(model: nn.Module, loss: Any, batches: Iterable[Any]) -> Outcomes:
    """Losses and predicted classes of the samples of some batches, in evaluation mode."""
    loss_fn = as_loss_fn(loss)
    recorder = OutputRecorder(model)
    losses: list[Tensor] = []
    classes: list[dict[str, Tensor] | None] = []
    with eval_mode(model), torch.no_grad(), recorder:
        for batch in batches:
            recorder.clear()
            values, counts = per_sample(loss_fn(model, batch))
            check_one_per_sample(values)
            losses.append((values if counts is None else values / counts.where(counts > 0, 1)).double().cpu())
            outputs = recorder.last("the page shows its predictions", "write a loss function that does")
            classes.append(_classes(outputs, batch))
    known = [each for each in classes if each is not None]
    if len(known) < len(classes):
        return Outcomes(torch.cat(losses))
    labels, predictions = (torch.cat([each[name].cpu() for each in known]) for name in ("label", "prediction"))
    return Outcomes(torch.cat(losses), labels, predictions)


def _classes(outputs: Any, batch: Any) -> dict[str, Tensor] | None:
    """Label and prediction of each sample; None if outputs and batch are not those of a classification."""
    logits = getattr(outputs, "logits", outputs)
    try:
        labels = Target("prediction", "labels").of(batch)
    except BatchError:
        return None
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return None
    return prediction_columns(logits, labels, IGNORE_INDEX, ("label", "prediction"))


def choose_queries(
    wanted: str, limit: int, samples: OrderedSamples, compute: Callable[[OrderedBatches], Outcomes]
) -> tuple[list[int], Outcomes]:
    """Indices of the queries, and their outcomes.

    wanted: indices and ranges such as "0,5,10-20", "wrong" or "worst"
    limit: largest number of queries by "wrong" and "worst"
    compute: function from batches to the outcomes of their samples
    """
    if wanted not in RULES:
        indices = _parsed(wanted, samples.indices)
        return indices, compute(samples.batches(indices))
    found = compute(samples.batches())
    order = found.losses.argsort(descending=True, stable=True)
    if wanted == "wrong":
        order = order[_wrong(found)[order]]
        if not len(order):
            raise typer.BadParameter(
                f"wrong needs a misclassified validation sample; found none among {plural(len(samples), 'sample')}. "
                "Use --queries worst.",
                param_hint=QUERIES,
            )
    chosen = order[:limit]
    return [samples.indices[k] for k in chosen.tolist()], found.of(chosen)


def _wrong(found: Outcomes) -> Tensor:
    if found.labels is None or found.predictions is None:
        raise typer.BadParameter(
            "wrong needs a classification: logits (B, classes) and labels (B,) that are class indices; found another "
            "task. Use --queries worst, or indices.",
            param_hint=QUERIES,
        )
    return (found.labels != found.predictions) & (found.labels != IGNORE_INDEX)


def _parsed(wanted: str, indices: Sequence[int]) -> list[int]:
    """Indices in a text such as "0,5,10-20", without duplicates, in the order of the text."""
    chosen: dict[int, None] = {}
    known = indices if isinstance(indices, range) else set(indices)
    for part in wanted.split(","):
        match = INDICES.fullmatch(part.strip())
        assert match is not None  # see `check_queries`
        first = int(match[1])
        last = int(match[2] or first)
        if first not in known or last not in known or last < first:
            raise typer.BadParameter(
                f"must be indices of validation samples, {indices[0]} to {indices[-1]}; found {part.strip()}.",
                param_hint=QUERIES,
            )
        chosen.update(dict.fromkeys(index for index in range(first, last + 1) if index in known))
    return list(chosen)
