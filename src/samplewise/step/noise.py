"""Gradient noise scale of updates, for the diagnostics and for update sizes that follow it.

G is the expected gradient and Σ the covariance of one sample's gradient. For B samples with gradients g_i and mean m,

    tr Σ  is estimated by  (Σ |g_i|² - B |m|²) / (B - 1)
    |G|²  is estimated by  |m|² - tr Σ / B

both without bias. The ratio tr Σ / |G|² is the noise scale: the batch size at which noise and signal are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from samplewise.core.text import Table, Tabular
from samplewise.transforms.chain import Chain
from samplewise.transforms.sums import Per
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

    def _numbers(self) -> dict[str, float]:
        """Numbers of a log line."""
        return {"scale": self.scale, "trace": self.trace, "signal": self.signal}

    def _table(self) -> Table:
        values = self._numbers()
        return Table(list(values), [[f"{value:.4g}" for value in values.values()]], "noise scale of gradients")

    def __repr__(self) -> str:
        return f"Noise(scale={self.scale:.4g}, trace={self.trace:.4g}, signal={self.signal:.4g})"


def _divide(a: float, b: float) -> float:
    """a / b; 0/0 is NaN, and a/0 is infinite."""
    if b == 0:
        return math.nan if a == 0 else math.copysign(math.inf, a)
    return a / b


class NoiseAverage:
    """Exponential moving averages of trace and signal."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._trace = 0.0
        self._signal = 0.0

    def add(self, new: Noise, decay: float) -> None:
        """Add an estimate. `decay`: factor of the averages so far."""
        self._trace = decay * self._trace + (1 - decay) * new.trace
        self._signal = decay * self._signal + (1 - decay) * new.signal
        self.weight = decay * self.weight + (1 - decay) * 1.0

    @property
    def value(self) -> Noise:
        """Current estimate, with the bias of the initial zeros corrected."""
        if not self.weight:
            raise ValueError("the noise scale needs at least one batch of two or more samples; found none. Call add.")
        return Noise(self._trace / self.weight, self._signal / self.weight)

    def state_dict(self) -> dict[str, float]:
        return {"trace": self._trace, "signal": self._signal, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._trace = state["trace"]
        self._signal = state["signal"]
        self.weight = state["weight"]


def check_decay(decay: float) -> None:
    if not (isinstance(decay, (int, float)) and 0 <= decay < 1):
        raise ValueError(f"decay must lie in [0, 1); found {decay!r}.")


# --- estimates --------------------------------------------------------------------------------------------------------


def noise_of_samples(norms: Tensor, mean_norm: float) -> Noise:
    """Estimate from per-sample norms (B,) and the norm of the mean gradient."""
    return estimate(norms.detach().double().square().sum().item(), len(norms), mean_norm)


def estimate(squares: float, samples: int, mean_norm: float) -> Noise:
    """Estimate from the sum of squared norms of B samples and the norm of their mean gradient."""
    if samples < 2:
        raise ValueError("the noise scale of a batch needs at least two samples; found one. Use a larger batch.")
    spread = squares - samples * mean_norm**2
    trace = max(spread, 0.0) / (samples - 1)  # of almost equal gradients, rounding of the norms makes it negative
    return Noise(trace, mean_norm**2 - trace / samples)


# --- updates with a noise scale ---------------------------------------------------------------------------------------


def check_noise_is_known(chain: Chain, aggregate: Per | None, remedy: str) -> None:
    """Raise ValueError unless the update is Σ c·g / Σ counts, where each c depends on its own sample only."""
    if aggregate is not None and aggregate.unit not in ("token", "sample"):
        raise ValueError(
            "the noise scale needs updates that are means over tokens or samples; found aggregate="
            f"{aggregate}. {remedy}"
        )
    for transform in chain.transforms:
        reason = _obstacle(transform)
        if reason:
            raise ValueError(
                "the noise scale needs updates that weigh each sample by itself, as clip does; found "
                f"{transform}, which {reason}. {remedy}"
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
