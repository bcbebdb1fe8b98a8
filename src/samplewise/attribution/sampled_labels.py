"""Losses whose gradients have the Gauss-Newton matrix of a criterion as their second moment: the true Fisher matrix.

The criterion is recognized by its values: the output z of the model is read during the call of the loss function, and
the losses are compared with those of known criteria on the labels of the batch. Each of these is a negative
log-likelihood: of a softmax for cross-entropy, of a sigmoid for binary cross-entropy, of a normal distribution for
squared errors. Its Hessian with respect to z is S S^T, with a known S, and the gradients of z . (S u) have the
Gauss-Newton matrix J^T S S^T J as their second moment

    expected   if u are all unit vectors in turn; for many outputs, in expectation, if u are random signs
    sampled    in expectation, if a label is drawn from the distribution, and its loss replaces z . (S u)

If the losses are c times the negative log-likelihood, for example means over c^-1 elements, these are multiplied by
sqrt(c).

Legend: b sample, c class, e all elements of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplewise.core.losses import IGNORE_INDEX, LossFn, constants_of, per_sample
from samplewise.errors import LossesError

EXACT_OUTPUTS = 16  # of a sample, up to which the expectation is exact, in as many backward passes
SIGN_DRAWS = 4
REMEDY = (
    "Pass labels=sample, a function (model, batch) -> batch with labels drawn from the model's predictions, or "
    "labels='data' for the empirical Fisher matrix."
)


class ExpectedLoss:
    """Loss function (model, batch) -> losses (B,) of the first draw, with random numbers of the generator of the CPU.

    The second moments of the gradients are to be added over this draw and the `further_draws`.
    """

    def __init__(self, loss_fn: LossFn, labels: Literal["expected", "sampled"]):
        self.loss_fn = loss_fn
        self.labels = labels
        self.batch_constants = constants_of(loss_fn)
        self._generators: list[torch.Generator | None] = [None] * SIGN_DRAWS
        self._last: tuple[Likelihood, Tensor] | None = None  # of the last call, with the scale

    def seed(self, seed: int) -> None:
        """Seed the generator of the CPU for the first draw of a batch, and those of the others."""
        torch.manual_seed(seed % 2**63)
        for draw in range(1, SIGN_DRAWS):
            self._generators[draw] = torch.Generator().manual_seed((seed + draw * 7_368_787) % 2**63)

    def further_draws(self) -> Iterator[Tensor]:
        """Losses of the other draws for the batch of the last call, from the same forward pass."""
        assert self._last is not None
        likelihood, scale = self._last
        self._last = None  # frees the graph
        outputs = likelihood.prediction[0].numel()
        draws = 1 if self.labels == "sampled" else outputs if outputs <= EXACT_OUTPUTS else SIGN_DRAWS
        for draw in range(1, draws):
            yield self._losses(likelihood, scale, draw)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with captured_output(model) as outputs:
            losses = per_sample(self.loss_fn(model, batch))[0]
        prediction = prediction_of(outputs, f"labels={self.labels!r} needs", REMEDY)
        for likelihood in _likelihoods(prediction, self._labels(batch)):
            scale = _scale(losses, likelihood)
            if scale is not None:
                self._last = likelihood, scale
                return self._losses(likelihood, scale, 0)
        raise LossesError(
            f"labels={self.labels!r} needs a loss that is a known negative log-likelihood of the model's output: "
            "cross-entropy without label smoothing and class weights, binary cross-entropy with logits, or squared "
            f"errors, as sum or mean over the elements of a sample; found another one. {REMEDY}"
        )

    def _losses(self, likelihood: Likelihood, scale: Tensor, draw: int) -> Tensor:
        if self.labels == "sampled":
            with torch.no_grad():
                sampled = likelihood.sample()
            # The Fisher matrix is quadratic in the gradients, and the Hessian of the loss linear in the scale.
            return scale.sqrt() * likelihood.losses(sampled)
        prediction = likelihood.prediction
        with torch.no_grad():
            if prediction[0].numel() <= EXACT_OUTPUTS:
                unit = prediction.new_zeros(prediction.shape)  # contiguous, so that the next line changes it
                unit.view(len(unit), -1)[:, draw] = 1
            else:
                signs = torch.randint(2, prediction.shape, dtype=torch.int8, generator=self._generators[draw])
                unit = signs.to(prediction).mul_(2).sub_(1)
                scale = scale / SIGN_DRAWS
            column = likelihood.root(unit).mul_(scale.sqrt().reshape(-1, *[1] * (prediction.dim() - 1)).to(prediction))
        return (prediction * column).flatten(1).sum(1)

    def _labels(self, batch: Any) -> Tensor:
        labels = None
        if isinstance(batch, Mapping):
            labels = batch.get("labels")
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            labels = batch[1]
        if not isinstance(labels, Tensor):
            raise LossesError(
                f"labels={self.labels!r} needs batches (x, labels), or dicts with 'labels', to recognize the loss; "
                f"found {type(batch).__name__}. {REMEDY}"
            )
        return labels


@contextmanager
def captured_output(model: nn.Module) -> Iterator[list[Any]]:
    """Outputs of the calls of the model in this context."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def prediction_of(outputs: list[Any], needs: str, remedy: str) -> Tensor:
    """Tensor among the captured outputs: that of the only call, or its logits. Errors begin with `needs`."""
    if len(outputs) != 1:
        raise LossesError(f"{needs} a loss_fn that calls the model once; found {len(outputs)} calls. {remedy}")
    (output,) = outputs
    prediction = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(prediction, Tensor) or prediction.dim() == 0:
        raise LossesError(
            f"{needs} a model that returns a tensor, or an object with logits; found {type(output).__name__}. {remedy}"
        )
    return prediction


class Likelihood(NamedTuple):
    """Negative log-likelihood of labels given predictions, up to constants."""

    prediction: Tensor
    labels: Tensor  # of the batch
    elements: Callable[[Tensor], Tensor]  # labels -> (b, ...)
    sample: Callable[[], Tensor]
    root: Callable[[Tensor], Tensor]  # product S u, where S S^T is the Hessian with respect to the prediction
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

    @cache
    def probabilities() -> tuple[Tensor, Tensor]:  # the same in all draws; with their roots
        probability = logits.softmax(1)
        return probability, probability.sqrt()

    def root(unit: Tensor) -> Tensor:
        probability, sqrt = probabilities()
        scaled = sqrt * unit
        return scaled.addcmul_(probability, scaled.sum(1, keepdim=True), value=-1).mul_(counted[:, None])

    return Likelihood(logits, labels, elements, sample, root, counted.reshape(len(labels), -1).sum(1))


def _normal(mean: Tensor, labels: Tensor) -> Likelihood:
    """Values of variance 1/2, whose negative log-likelihood is the squared error."""

    def sample() -> Tensor:
        return mean + (torch.erfinv(2 * _uniform(labels) - 1)).to(mean.dtype)

    def elements(values: Tensor) -> Tensor:
        return (mean - values).square()

    def root(unit: Tensor) -> Tensor:
        return 2**0.5 * unit

    return Likelihood(mean, labels, elements, sample, root, _elements_per_sample(labels))


def _bernoulli(logits: Tensor, labels: Tensor) -> Likelihood:
    def sample() -> Tensor:
        return (_uniform(labels) < logits.sigmoid()).to(logits.dtype)

    def elements(values: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, values, reduction="none")

    def root(unit: Tensor) -> Tensor:
        probability = logits.sigmoid()
        return (probability * (1 - probability)).sqrt() * unit

    return Likelihood(logits, labels, elements, sample, root, _elements_per_sample(labels))


def _elements_per_sample(labels: Tensor) -> Tensor:
    return torch.full((len(labels),), labels[0].numel(), device=labels.device)


def _uniform(like: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, one after the other from the global generator: they do not depend on microbatches."""
    return torch.rand(like.shape, dtype=torch.float64).clamp(min=1e-16).to(like.device)
