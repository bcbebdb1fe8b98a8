"""Losses of labels drawn from a model's own predictions, for the true Fisher matrix.

The criterion is recognized by its values: the output of the model is read during the call of the loss function, and the
losses are compared with those of known criteria on the labels of the batch. Label i is then drawn from the distribution
whose negative log-likelihood is the criterion: softmax for cross-entropy, sigmoid for binary cross-entropy, a normal
distribution for squared errors. If the losses are c times the negative log-likelihood, for example means over c^-1
elements, the sampled losses are sqrt(c) times it: the Fisher matrix then equals the Gauss-Newton matrix of the losses.

Legend: b sample, c class, e all elements of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplewise.core.losses import IGNORE_INDEX, LossFn, per_sample
from samplewise.errors import LossesError

REMEDY = (
    "Pass labels=sample, a function (model, batch) -> batch with labels drawn from the model's predictions, or "
    "labels='data' for the empirical Fisher matrix."
)


class SampledLoss:
    """Loss function (model, batch) -> losses (B,) with labels drawn by the global random generator of the CPU."""

    def __init__(self, loss_fn: LossFn):
        self.loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with _captured_output(model) as outputs:
            losses = per_sample(self.loss_fn(model, batch))[0]
        prediction = _prediction(outputs)
        labels = _labels(batch)
        for likelihood in _likelihoods(prediction, labels):
            scale = _scale(losses, likelihood)
            if scale is not None:
                with torch.no_grad():
                    sampled = likelihood.sample()
                # The Fisher matrix is quadratic in the gradients, and the Hessian of the loss linear in the scale.
                return scale.sqrt() * likelihood.losses(sampled)
        raise LossesError(
            "labels='sampled' needs a loss that is a known negative log-likelihood of the model's output: "
            "cross-entropy without label smoothing and class weights, binary cross-entropy with logits, or squared "
            f"errors, as sum or mean over the elements of a sample; found another one. {REMEDY}"
        )


@contextmanager
def _captured_output(model: nn.Module) -> Iterator[list[Any]]:
    """Outputs of the calls of the model in this context."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _prediction(outputs: list[Any]) -> Tensor:
    if len(outputs) != 1:
        raise LossesError(
            f"labels='sampled' needs a loss_fn that calls the model once; found {len(outputs)} calls. {REMEDY}"
        )
    (output,) = outputs
    prediction = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(prediction, Tensor) or prediction.dim() == 0:
        raise LossesError(
            f"labels='sampled' needs a model that returns a tensor, or an object with logits; found "
            f"{type(output).__name__}. {REMEDY}"
        )
    return prediction


def _labels(batch: Any) -> Tensor:
    labels = None
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[1]
    if not isinstance(labels, Tensor):
        raise LossesError(
            "labels='sampled' needs batches (x, labels), or dicts with 'labels', to recognize the loss; found "
            f"{type(batch).__name__}. {REMEDY}"
        )
    return labels


class Likelihood(NamedTuple):
    """Negative log-likelihood of labels given predictions, up to constants."""

    labels: Tensor  # of the batch
    elements: Callable[[Tensor], Tensor]  # labels -> (b, ...)
    sample: Callable[[], Tensor]
    counts: Tensor  # (b,) elements of each sample that count

    def losses(self, labels: Tensor) -> Tensor:
        """Sum over the elements of each sample, (b,)."""
        return self.elements(labels).reshape(len(labels), -1).sum(1)


def _scale(losses: Tensor, likelihood: Likelihood) -> Tensor | None:
    """Factors (b,) between the losses and the negative log-likelihood of the labels; None if it is not their loss."""
    with torch.no_grad():
        expected = likelihood.losses(likelihood.labels)
        if losses.shape != expected.shape:
            return None
        tolerance = 1e-4 if torch.finfo(losses.dtype).bits > 16 and expected.dtype == losses.dtype else 2e-2
        for factor in (1.0, 0.5):  # squared errors are often halved
            for scale in (torch.ones_like(expected), 1 / likelihood.counts.clamp(min=1).to(expected)):
                if torch.allclose(losses.to(expected), factor * scale * expected, rtol=tolerance, atol=tolerance / 100):
                    return factor * scale
    return None


def _likelihoods(prediction: Tensor, labels: Tensor) -> Iterator[Likelihood]:
    """Distributions that the shapes of prediction and labels allow."""
    labels = labels.to(prediction.device)
    prediction = prediction.float() if prediction.dtype in (torch.float16, torch.bfloat16) else prediction
    if labels.is_floating_point():
        if labels.numel() == prediction.numel() and len(labels) == len(prediction):
            labels = labels.reshape(prediction.shape).to(prediction.dtype)
            yield _normal(prediction, labels)
            yield _bernoulli(prediction, labels)
    elif prediction.dim() > 1:
        if labels.shape == (len(prediction), *prediction.shape[2:]):
            yield _categorical(prediction, labels)
        if prediction.dim() > 2 and labels.shape == prediction.shape[:-1]:
            by_class = prediction.movedim(-1, 1)
            yield _categorical(by_class, labels)
            following = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # a causal language model predicts the next
            yield _categorical(by_class, following)


def _categorical(logits: Tensor, labels: Tensor) -> Likelihood:
    """Class of each element, with logits (b, c, ...); labels with the ignored index stay ignored."""
    counted = labels != IGNORE_INDEX

    def sample() -> Tensor:
        cumulative = logits.softmax(1).cumsum(1, dtype=torch.float64)
        classes = (cumulative < _uniform(labels)[:, None] * cumulative[:, -1:]).sum(1)
        return torch.where(counted, classes, IGNORE_INDEX)

    def elements(classes: Tensor) -> Tensor:
        return F.cross_entropy(logits, classes.long(), ignore_index=IGNORE_INDEX, reduction="none")

    return Likelihood(labels, elements, sample, counted.reshape(len(labels), -1).sum(1))


def _normal(mean: Tensor, labels: Tensor) -> Likelihood:
    """Values of variance 1/2, whose negative log-likelihood is the squared error."""

    def sample() -> Tensor:
        return mean + (torch.erfinv(2 * _uniform(labels) - 1)).to(mean.dtype)

    return Likelihood(labels, lambda values: (mean - values).square(), sample, _elements_per_sample(labels))


def _bernoulli(logits: Tensor, labels: Tensor) -> Likelihood:
    def sample() -> Tensor:
        return (_uniform(labels) < logits.sigmoid()).to(logits.dtype)

    def elements(values: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, values, reduction="none")

    return Likelihood(labels, elements, sample, _elements_per_sample(labels))


def _elements_per_sample(labels: Tensor) -> Tensor:
    return torch.full((len(labels),), labels[0].numel(), device=labels.device)


def _uniform(like: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, one after the other from the global generator: they do not depend on microbatches."""
    return torch.rand(like.shape, dtype=torch.float64).clamp(min=1e-16).to(like.device)
