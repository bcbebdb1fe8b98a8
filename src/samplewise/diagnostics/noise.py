"""Gradient noise scale of a batch and over training, from per-sample gradient norms.

G is the expected gradient and Σ the covariance of one sample's gradient. For B samples with gradients g_i and mean m,

    tr Σ  is estimated by  (Σ |g_i|² - B |m|²) / (B - 1)
    |G|²  is estimated by  |m|² - tr Σ / B

both without bias. The ratio tr Σ / |G|² is the noise scale: the batch size at which noise and signal are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from samplewise.core.text import Table, Tabular
from samplewise.engine.gradients import Gradients, check_gradients
from samplewise.parallel import collectives
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.transforms.chain import Chain
from samplewise.transforms.transform import Grouping, SumTransform, Transform


@dataclass(frozen=True, repr=False)
class Noise(Tabular):
    """Noise and signal of per-sample gradients.

    trace            tr Σ, the variance of one sample's gradient, summed over all parameters; 0 or more
    signal           |G|², the squared norm of the expected gradient
    scale            trace / signal: the batch size at which both are equal
    signal_to_noise  signal / trace, of one sample

    The estimates of trace and signal are unbiased; their ratio is not. If the noise is much larger than the signal, the
    estimates of signal and scale may be negative: then the batches were too small, or too few.
    """

    trace: float
    signal: float

    @property
    def scale(self) -> float:
        return _divide(self.trace, self.signal)

    @property
    def signal_to_noise(self) -> float:
        return _divide(self.signal, self.trace)

    def _table(self) -> Table:
        values = {"scale": self.scale, "trace": self.trace, "signal": self.signal}
        return Table(list(values), [[f"{value:.4g}" for value in values.values()]], "noise scale of gradients")

    def __repr__(self) -> str:
        return f"Noise(scale={self.scale:.4g}, trace={self.trace:.4g}, signal={self.signal:.4g})"


def _divide(a: float, b: float) -> float:
    """a / b; 0/0 is NaN, and a/0 is infinite."""
    if b == 0:
        return math.nan if a == 0 else math.copysign(math.inf, a)
    return a / b


def noise_scale(g: Gradients) -> Noise:
    """Gradient noise scale, also called critical batch size, from the gradients of one batch of at least two samples.

    Up to about `.scale` samples, doubling the batch size halves the number of updates needed; far beyond it, a larger
    batch hardly helps. The noise scale mostly grows during training, and an estimate from one batch is noisy: see
    `NoiseScale` for a running estimate.
    """
    check_gradients(g)
    return _noise(g.norms(), _norm(g.mean()))


def signal_to_noise(g: Gradients, *, by: Literal["parameter", "layer"] = "parameter") -> dict[str, float]:
    """Signal-to-noise ratios: name -> |G|² / tr Σ of each parameter, or of each module with by="layer".

    The ratio is the inverse of the noise scale of that part of the gradient, and may be negative like it.
    """
    if by not in ("parameter", "layer"):
        raise ValueError(f"by must be 'parameter' or 'layer'; found {by!r}.")
    check_gradients(g)
    means = g.mean()
    noise_by_group: dict[str, Noise] = {}
    for name, norms in g.norms(by="parameter").items():
        part_noise = _noise(norms, _norm({name: means[name]}))
        group = name.rpartition(".")[0] if by == "layer" else name
        previous = noise_by_group.get(group, Noise(0.0, 0.0))
        noise_by_group[group] = Noise(previous.trace + part_noise.trace, previous.signal + part_noise.signal)
    return {name: part.signal_to_noise for name, part in noise_by_group.items()}


class NoiseScale:
    """Running estimate of the noise scale: the ratio of exponential moving averages of trace and signal.

    Call `add(g)` with the gradients of a batch, or `add(norms, grad_norm)` with per-sample norms and the norm of the
    mean gradient. It is also a callback of the trainer, which writes the estimate to the log:
    `Trainer(step, run, callbacks=[NoiseScale()])`.

    As a callback it measures the gradients of the losses as returned by the loss function, times the coefficients of
    the transforms: with `clip`, the noise of the clipped gradients. If samples have counts, the update is
    Σ g / Σ counts, and the noise is that of g. Transforms must weigh each sample by itself; for others ValueError is
    raised when the fit starts.

    decay: factor of the moving averages per batch; default 0.99
    """

    def __init__(self, decay: float = 0.99):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1); found {decay!r}.")
        self.decay = decay
        self._trace = 0.0
        self._signal = 0.0
        self._weight = 0.0

    def __repr__(self) -> str:
        return f"NoiseScale(decay={self.decay:g}{f', {self.value!r}' if self._weight else ''})"

    def add(self, norms: Gradients | Tensor, grad_norm: float | Tensor | None = None) -> Noise:
        """Update the moving averages with a batch and return the estimate so far."""
        if isinstance(norms, Gradients):
            new = noise_scale(norms)
        elif grad_norm is None:
            raise TypeError(
                "add needs Gradients, or per-sample norms and the norm of the mean gradient; found norms alone. Pass "
                "grad_norm."
            )
        else:
            new = _noise(norms, float(grad_norm))
        self._trace = self.decay * self._trace + (1 - self.decay) * new.trace
        self._signal = self.decay * self._signal + (1 - self.decay) * new.signal
        self._weight = self.decay * self._weight + (1 - self.decay) * 1.0
        return self.value

    @property
    def value(self) -> Noise:
        """Current estimate, with the bias of the initial zeros corrected."""
        if not self._weight:
            raise ValueError("the noise scale needs at least one batch of two or more samples; found none. Call add.")
        return Noise(self._trace / self._weight, self._signal / self._weight)

    def on_fit_start(self, step: Step) -> None:
        _check_divisor(step)
        _check_transforms(step.transforms)
        step.require(norms=True)

    def on_update(self, update: Update, trainer: Any = None) -> None:
        """Add an update; skipped updates, single samples (no variance) and groups of updates are ignored.

        Every rank must call it: the norms of all ranks are gathered.
        """
        if trainer is not None:
            _check_transforms(trainer.step.transforms)  # they may have been replaced since the fit started
        if update.skipped or update.samples < 2 or update._updates > 1:
            return
        weights = update.weights
        if isinstance(weights, Mapping):
            raise ValueError(
                "the noise scale needs updates with one weight per sample; found one for each parameter. Compute "
                "gradients g and call add(g)."
            )
        norms = collectives.all_gather_rows(update.norms * weights.abs())
        mean_norm = update.grad_norm * float(update._sums()[1]) / update.samples  # the update is Σ c·g / Σ counts
        estimate = self.add(norms, mean_norm)
        if trainer is not None and trainer.log_every.ends_with(update, trainer.step):
            numbers = {"scale": estimate.scale, "trace": estimate.trace, "signal": estimate.signal}
            batch = trainer.step.samples or update.samples  # the last batch of an epoch may be smaller
            trainer.write("noise", update=trainer.step.counters.updates, batch=batch, **numbers)

    def state_dict(self) -> dict[str, float]:
        """Moving averages, for checkpoints."""
        return {"trace": self._trace, "signal": self._signal, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the moving averages."""
        self._trace = state["trace"]
        self._signal = state["signal"]
        self._weight = state["weight"]


def _check_divisor(step: Step) -> None:
    """Raise ValueError unless updates are divided by the counts of their samples."""
    aggregate = step.config.aggregate
    if aggregate is not None and aggregate.unit != "sample":
        raise ValueError(
            "the noise scale needs updates that are means over tokens or samples; found aggregate="
            f"{aggregate}. Remove NoiseScale() from the callbacks, or call add(g) with the gradients g of a batch."
        )


def _check_transforms(chain: Chain) -> None:
    """Raise ValueError unless the update is Σ c·g / Σ counts, where each c depends on its own sample only."""
    for transform in chain.transforms:
        reason = _obstacle(transform)
        if reason:
            raise ValueError(
                "the noise scale needs updates that weigh each sample by itself, as clip does; found "
                f"{transform}, which {reason}. Remove NoiseScale() from the callbacks, or call add(g) with the "
                "gradients g of a batch."
            )


def _obstacle(transform: Transform) -> str:
    """Reason why the noise scale cannot be estimated from updates with this transform; empty if it can."""
    if isinstance(transform, Grouping):
        return "sums samples of a group"
    if isinstance(transform, SumTransform):
        return "adds to the sum of the gradients"
    if transform.window:
        return "depends on the other samples of the window"
    if transform.renormalizes:
        return "changes the denominator"
    if transform.positions is not None:
        return "depends on the position in the window"
    return "weighs each parameter by itself" if transform.by_parameter else ""


def _noise(norms: Tensor, mean_norm: float) -> Noise:
    """Estimate from per-sample norms (B,) and the norm of the mean gradient."""
    samples = len(norms)
    if samples < 2:
        raise ValueError("the noise scale of a batch needs at least two samples; found one. Use a larger batch.")
    spread = norms.detach().double().square().sum().item() - samples * mean_norm**2
    trace = max(spread, 0.0) / (samples - 1)  # of almost equal gradients, rounding of the norms makes it negative
    return Noise(trace, mean_norm**2 - trace / samples)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """Norm of all tensors together, accumulated in float64."""
    return math.sqrt(sum(tensor.detach().abs().double().square().sum().item() for tensor in tensors.values()))
