"""The gradient noise scale, of one batch and over training, from the lengths of the samples' gradients.

G is the expected gradient and Σ the covariance of one sample's. Of B samples with gradients g_i and mean m,

    tr Σ  is estimated by  (Σ |g_i|² - B |m|²) / (B - 1)
    |G|²  is estimated by  |m|² - tr Σ / B

both without bias. Their ratio tr Σ / |G|² is the noise scale: the batch size at which noise and signal are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samplewise import ranks
from samplewise.engine.gradients import Gradients


@dataclass(frozen=True)
class Noise:
    """How noisy one sample's gradient is.

    trace    tr Σ, the variance of one sample's gradient, summed over all parameters
    signal   |G|², the squared length of the expected gradient
    scale    trace / signal: the batch size at which both are equal
    ratio    signal / trace: its inverse, the signal-to-noise ratio of one sample

    Trace and signal are unbiased; their ratio is not. Where noise hides the signal, the estimate of the signal may be
    negative, and the scale with it: the batches were too small, or too few, to tell.
    """

    trace: float
    signal: float

    @property
    def scale(self) -> float:
        return _divide(self.trace, self.signal)

    @property
    def ratio(self) -> float:
        return _divide(self.signal, self.trace)


def _divide(a: float, b: float) -> float:
    """0/0 is unknown, and a/0 without bound."""
    if b == 0:
        return math.nan if a == 0 else math.copysign(math.inf, a)
    return a / b


def noise_scale(g: Gradients) -> Noise:
    """The gradient noise scale, also called the critical batch size, from the gradients of one batch.

    Up to about `.scale` samples, twice the batch makes up for half the updates; far beyond it hardly does. It mostly
    grows during training, and one batch is a noisy witness: see `NoiseScale` for a running estimate.
    """
    return _noise(g.norms(), _length(g.mean()))


def signal_to_noise(g: Gradients, by: str = "parameter") -> dict[str, float]:
    """name -> |G|² / tr Σ of each parameter, or with by="layer" of each module's parameters together.

    It is the inverse of the noise scale of that part of the gradient, and may be negative as that may.
    """
    if by not in ("parameter", "layer"):
        raise ValueError(f"by must be 'parameter' or 'layer'; found {by!r}.")
    means, parts = g.mean(), dict[str, Noise]()
    for name, norms in g.norms(by="parameter").items():
        new, group = _noise(norms, _length({name: means[name]})), name.rpartition(".")[0] if by == "layer" else name
        old = parts.get(group, Noise(0.0, 0.0))
        parts[group] = Noise(old.trace + new.trace, old.signal + new.signal)
    return {name: part.ratio for name, part in parts.items()}


class NoiseScale:
    """The noise scale over training: moving averages of trace and signal, and then their ratio.

    `add(g)` the gradients of a batch, or `add(norms, grad_norm)` the samples' norms and the norm of their mean; both
    with the samples as they are, neither clipped nor weighted. It is a callback of the trainer, too, which writes to
    the log: `Trainer(step, run, callbacks=[NoiseScale()])`.

    decay: what is left of the past after each batch
    """

    def __init__(self, decay: float = 0.99):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1); found {decay!r}.")
        self.decay = decay
        self._trace = self._signal = self._weight = 0.0

    def add(self, norms: Gradients | Tensor, grad_norm: float | Tensor | None = None) -> Noise:
        """Takes a batch into account and returns the estimate so far."""
        if isinstance(norms, Gradients):
            new = noise_scale(norms)
        elif grad_norm is None:
            raise TypeError("add needs the gradients, or norms and the norm of their mean; found norms alone.")
        else:
            new = _noise(norms, float(grad_norm))
        self._trace, self._signal, self._weight = (
            self.decay * old + (1 - self.decay) * value
            for old, value in ((self._trace, new.trace), (self._signal, new.signal), (self._weight, 1.0))
        )
        return self.value

    @property
    def value(self) -> Noise:
        """The averages so far, not pulled towards the zero they began with."""
        if not self._weight:
            raise ValueError("the noise scale must have seen a batch of at least two samples; found none. Call add.")
        return Noise(self._trace / self._weight, self._signal / self._weight)

    def on_fit_start(self, step: Any) -> None:
        step.record.add("norms")

    def on_update(self, update: Any, trainer: Any = None) -> None:
        """Updates that were skipped, or have one sample and so no variance, are passed over. Several ranks must all
        call it: the samples are those of all.
        """
        if update.skipped or update.samples < 2 or update.updates > 1:
            return
        weights, problem = update.weights, None
        plain = not isinstance(weights, Mapping) and bool((weights == 1).all())
        if not plain or float(update.sums()[1]) != update.samples:
            problem = ValueError(
                "the noise scale needs updates that are the plain mean of their samples; found weights or counts other "
                "than 1. Call add(g) with gradients of your own."
            )
        ranks.together(problem)
        now = self.add(ranks.gathered(update.norms), update.grad_norm)
        if trainer is not None and trainer.step.counters.updates % trainer.log_every == 0:
            numbers = {"scale": now.scale, "trace": now.trace, "signal": now.signal}
            batch = trainer.step.samples or update.samples  # the last of an epoch may be smaller
            trainer.write("noise", update=trainer.step.counters.updates, batch=batch, **numbers)

    def state_dict(self) -> dict[str, float]:
        """For checkpoints."""
        return {"trace": self._trace, "signal": self._signal, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where the other stood."""
        self._trace, self._signal, self._weight = state["trace"], state["signal"], state["weight"]


def _noise(norms: Tensor, mean_norm: float) -> Noise:
    samples = len(norms)
    if samples < 2:
        raise ValueError("the noise of a batch needs at least two samples; found one.")
    trace = (norms.detach().double().square().sum().item() - samples * mean_norm**2) / (samples - 1)
    return Noise(trace, mean_norm**2 - trace / samples)


def _length(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.detach().abs().double().square().sum().item() for tensor in tensors.values()))
