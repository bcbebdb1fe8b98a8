"""Sizes of the windows of a step, by its `samples=`: a number, or one of `schedules.py`, with the measured noise.

A size is chosen for a whole window: a window that crosses a start of a ramp keeps its size.
"""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import Any

from torch import Tensor

from samplewise.parallel import collectives
from samplewise.step.noise import Noise, NoiseAverage, estimate
from samplewise.step.schedules import FollowNoise, Ramp, Samples
from samplewise.step.update import Update, has_dropped
from samplewise.step.window import Counters, Window


class WindowSizes:
    """Number of samples of each window of a step, from its `samples=`; None: a window is a batch."""

    def __init__(self, samples: Samples, counters: Counters):
        self._counters = counters
        self.configure(samples)

    def configure(self, samples: Samples) -> None:
        self._samples = samples
        self.is_fixed = not isinstance(samples, (Ramp, FollowNoise))  # all windows have the same number
        self.follower = NoiseFollower(samples) if isinstance(samples, FollowNoise) else None

    def of(self, window: Window) -> int | None:
        """Number of samples of the open window. Constant from its first sample to its last one."""
        samples = self._samples
        if isinstance(samples, Ramp):
            return samples.size(self._counters.samples - sum(map(len, window.parts)))
        if isinstance(samples, FollowNoise):
            assert self.follower is not None
            return self.follower.size
        return samples

    def record(self, update: Update) -> None:
        """Choose the size of the next window after an update. Collective."""
        if self.follower is not None:
            self.follower.record(update)

    def state_dict(self) -> dict[str, Any]:
        """Measured noise and current size; empty for a number, and for a ramp, which depends on the counters only."""
        return {} if self.follower is None else self.follower.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.follower is not None:
            self.follower = NoiseFollower(self.follower.schedule)
            if state:  # otherwise it was saved with another `samples=`
                self.follower.load_state_dict(state)


class NoiseFollower:
    """Size that follows the running estimate of the noise scale, with hysteresis. Equal on all ranks."""

    def __init__(self, schedule: FollowNoise):
        self.schedule = schedule
        self.size = schedule.at_least
        self.average = NoiseAverage()
        self._beyond = 0  # number of updates in a row whose target is the next size or more; negative: the previous one

    def record(self, update: Update) -> None:
        """Add the noise of an update, and change the size if the target has differed for long enough. Collective."""
        if update._was_skipped:
            return
        recorded = all(part.raw_norms is not None for part in update._parts)  # False: requested in an open window
        new = noise_of_update(update, update.norms if recorded else None)
        if new is None or not (isfinite(new.trace) and isfinite(new.signal)):
            return
        self.average.add(new, self.schedule.decay)
        noise = self.average.value
        scale = inf if noise.signal <= 0 < noise.trace else noise.scale
        # Next and previous size; NaN, which no target reaches, if there is none.
        sizes = self.schedule.sizes
        k = sizes.index(self.size)
        larger, smaller = sizes[k + 1] if k + 1 < len(sizes) else nan, sizes[k - 1] if k else nan
        if self.schedule.ratio * scale >= larger:
            self._beyond = max(self._beyond, 0) + 1
        elif self.schedule.ratio * scale <= smaller:
            self._beyond = min(self._beyond, 0) - 1
        else:
            self._beyond = 0
        if abs(self._beyond) >= self.schedule.patience:
            self.size = int(larger if self._beyond > 0 else smaller)
            self._beyond = 0

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size, "beyond": self._beyond, "noise": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; a size that this schedule does not have becomes the next smaller one."""
        sizes = self.schedule.sizes
        self.size = max((size for size in sizes if size <= state["size"]), default=sizes[0])
        self._beyond = state["beyond"]
        self.average.load_state_dict(state["noise"])


def noise_of_update(update: Update, norms: Tensor | None) -> Noise | None:
    """Estimate from an update, over all ranks and without dropped samples. `norms`: of this rank's samples before
    transforms; None: not recorded. Returns None for skipped updates, single samples (no variance), blocks of updates,
    and if a rank has no norms. Collective.
    """
    if update._was_skipped or update.samples < 2 or update._updates > 1:
        return None
    squares: float | Tensor = 0.0
    count = 0
    if norms is not None:
        weights = update.weights
        assert isinstance(weights, Tensor)
        norms = (norms * weights.abs()).double()
        norms = norms[~update.dropped] if has_dropped(update) else norms
        squares = norms.square().sum()
        count = len(norms)
    total, samples, missing = collectives.all_reduce_scalars(squares, count, norms is None)
    if missing or samples < 2:
        return None
    mean_norm = update.grad_norm * float(update._sums()[1]) / samples  # the update is Σ c·g / Σ counts
    return estimate(total, int(samples), mean_norm)
