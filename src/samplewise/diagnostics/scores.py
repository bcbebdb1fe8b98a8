"""Per-sample scores that are large if a label is likely wrong or the sample is unusual.

    loss             loss of the sample
    margin           largest logit of another class minus the label's; its mean over training is minus the AUM
    el2n             |softmax(logits) - one-hot label|
    norm             norm of the sample's gradient
    last_norm        norm of the sample's gradient with respect to the last layer
    self_influence   lr · norm²: first-order decrease of the sample's own loss by a step on it
    agreement        minus the cosine with the summed gradient of all other samples with the same label

A score is a function of `ScoreInputs`: some samples at one checkpoint. Scores are averaged over checkpoints, except
self-influence, which is summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.core.losses import el2n, margins
from samplewise.engine.gradients import Gradients

Score = Literal["loss", "margin", "el2n", "norm", "last_norm", "self_influence", "agreement"]


class ClassGradients:
    """Sum of the per-sample gradients of each class over a dataset."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, Tensor]] = {}

    def add(self, g: Gradients, labels: Tensor) -> None:
        """Add the gradients of a batch with labels (B,)."""
        for label in labels.unique().tolist():
            sums = g.sum((labels == label).to(g.losses.dtype))
            old = self._sums.get(label)
            self._sums[label] = sums if old is None else {name: old[name] + new for name, new in sums.items()}

    def cosines(self, g: Gradients, labels: Tensor) -> Tensor:
        """Cosines (B,) of each sample's gradient with the sum over the other samples of its class; 0 if either is zero.

        With S the sum over the class, the sum over the others is S - g, and |S - g|² = |S|² - 2 g·S + |g|².
        """
        squared = g.norms().double().square()
        dots = torch.zeros_like(squared)
        lengths = torch.zeros_like(squared)
        for label in labels.unique().tolist():
            in_class = labels == label
            sums = self._sums[label]
            dots = torch.where(in_class, g.dot(sums).double(), dots)
            lengths = torch.where(in_class, sum(s.double().square().sum() for s in sums.values()), lengths)
        rest = (lengths - 2 * dots + squared).clamp(min=0)
        scale = (squared * rest).sqrt()
        has_rest = rest > 1e-6 * (lengths + squared)  # otherwise a class of one sample: the rest is rounding error
        return torch.where(has_rest & (scale > 0), (dots - squared) / scale.where(scale > 0, 1), 0).clamp(-1, 1)


def last_layer(names: list[str]) -> list[str]:
    """Names of the parameters in the module of the last parameter."""
    module = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == module]


@dataclass
class ScoreInputs:
    """Some samples at one checkpoint; logits and labels are computed only if a score needs them."""

    g: Gradients
    lr: float
    batch: Any
    logits_of: Callable[[Any], Any]
    labels_of: Callable[[Any], Any]
    classes: ClassGradients

    @cached_property
    def labels(self) -> Tensor:
        labels = torch.as_tensor(self.labels_of(self.batch), device=self.g.losses.device)
        if labels.shape != (len(self.g),) or labels.is_floating_point():
            description = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise ValueError(
                f"labels must be integers, one per sample, ({len(self.g)},); found {description}. Pass labels=, the "
                "key of the labels or a function of the batch, or pass score='loss', which needs no labels."
            )
        return labels.long()

    @cached_property
    def logits(self) -> Tensor:
        logits = self.logits_of(self.batch)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(self.g) or logits.shape[1] < 2:
            description = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"logits must have shape ({len(self.g)}, classes) with at least two classes; found "
                f"{description}. Pass logits=, a function of (model, batch), or pass score='loss', which needs "
                "no logits."
            )
        classes = logits.shape[1]
        invalid = self.labels[(self.labels < 0) | (self.labels >= classes)]
        if len(invalid):
            raise ValueError(
                f"labels must be class indices, 0 to {classes - 1} for {classes} logits; found {invalid[0].item()}. "
                "Remove such samples, or pass score='loss', which needs no labels."
            )
        return logits.detach()

    def last_norms(self) -> Tensor:
        norms = self.g.norms(by="parameter")
        return torch.stack([norms[name] for name in last_layer(self.g.names)]).norm(dim=0)


SCORES: dict[str, Callable[[ScoreInputs], Tensor]] = {
    "loss": lambda inputs: inputs.g.losses,
    "margin": lambda inputs: -margins(inputs.logits, inputs.labels),
    "el2n": lambda inputs: el2n(inputs.logits, inputs.labels),
    "norm": lambda inputs: inputs.g.norms(),
    "last_norm": ScoreInputs.last_norms,
    "self_influence": lambda inputs: inputs.lr * inputs.g.norms().square(),
    "agreement": lambda inputs: -inputs.classes.cosines(inputs.g, inputs.labels),
}
SUMMED_SCORES = ("self_influence",)  # summed over checkpoints; the others are averaged
