"""Gradient noise scale of a batch and over training, from per-sample gradient norms. The estimates are those of
`step/noise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from samplewise.engine.gradients import Gradients, check_gradients
from samplewise.step.noise import Noise as Noise
from samplewise.step.noise import NoiseAverage, check_decay, check_noise_is_known, noise_of_samples
from samplewise.step.sizes import noise_of_update
from samplewise.step.step import Step
from samplewise.step.update import Update

REMEDY = "Remove NoiseScale() from the callbacks, or call add(g) with the gradients g of a batch."


def noise_scale(g: Gradients) -> Noise:
    """Gradient noise scale, also called critical batch size, from the gradients of one batch of at least two samples.

    Up to about `.scale` samples, doubling the batch size halves the number of updates needed; far beyond it, a larger
    batch hardly helps. The noise scale mostly grows during training, and an estimate from one batch is noisy: see
    `NoiseScale` for a running estimate.
    """
    check_gradients(g)
    return noise_of_samples(g.norms(), _norm(g.mean()))


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
        part_noise = noise_of_samples(norms, _norm({name: means[name]}))
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
        check_decay(decay)
        self.decay = decay
        self._average = NoiseAverage()

    def __repr__(self) -> str:
        return f"NoiseScale(decay={self.decay:g}{f', {self.value!r}' if self._average.weight else ''})"

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
            new = noise_of_samples(norms, float(grad_norm))
        self._average.add(new, self.decay)
        return self.value

    @property
    def value(self) -> Noise:
        """Current estimate, with the bias of the initial zeros corrected."""
        return self._average.value

    def on_fit_start(self, step: Step) -> None:
        check_noise_is_known(step.transforms, step.config.aggregate, REMEDY)
        step.require(norms=True)

    def on_update(self, update: Update, trainer: Any = None) -> None:
        """Add an update; skipped updates, single samples (no variance) and groups of updates are ignored.

        Every rank must call it: the norms of all ranks are summed.
        """
        if trainer is not None:  # transforms may have been replaced since the fit started
            check_noise_is_known(trainer.step.transforms, None, REMEDY)
        if update.skipped or update.samples < 2 or update._updates > 1:
            return
        if isinstance(update.weights, Mapping):
            raise ValueError(
                "the noise scale needs updates with one weight per sample; found one for each parameter. Compute "
                "gradients g and call add(g)."
            )
        new = noise_of_update(update, update.norms)
        if new is None:
            return
        self._average.add(new, self.decay)
        if trainer is not None and trainer.log_every.ends_with(update, trainer.step):
            batch = trainer.step.samples or update.samples  # the last batch of an epoch may be smaller
            trainer.write("noise", update=trainer.step.counters.updates, batch=batch, **self.value._numbers())

    def state_dict(self) -> dict[str, float]:
        """Moving averages, for checkpoints."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the moving averages."""
        self._average.load_state_dict(state)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """Norm of all tensors together, accumulated in float64."""
    return math.sqrt(sum(tensor.detach().abs().double().square().sum().item() for tensor in tensors.values()))
