"""Number of samples per update over time: `sw.ramp` by samples seen, `sw.follow_noise` by the measured noise scale.

A size is chosen for a whole window: a window that crosses a start of a ramp keeps its size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from samplewise.step.noise import NoiseAverage, noise_of_update

if TYPE_CHECKING:  # these modules import the settings of a step, which import this one
    from samplewise.step.update import Update
    from samplewise.step.window import Counters, Window


@dataclass(frozen=True, repr=False)
class Ramp:
    """Sizes by the number of samples seen, made by `ramp`."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def size(self, samples: int) -> int:
        """Size of a window that begins after this number of samples."""
        return self.sizes[bisect_right(self.starts, samples) - 1]

    def __repr__(self) -> str:
        return f"ramp({dict(zip(self.starts, self.sizes, strict=True))})"


def ramp(sizes: Mapping[int, int]) -> Ramp:
    """Schedule for `Step(samples=...)`: number of samples per update, by the number of samples seen.

    `sw.ramp({0: 32, 20_000: 64, 100_000: 256})`: updates of 32 samples, of 64 once 20,000 samples were seen, of 256
    once 100,000 were. A size is chosen when a window is opened, so that a window that crosses a start keeps its size.
    Samples of skipped updates count, and those that tail="drop" leaves out; with several ranks those of all ranks.
    """
    if not isinstance(sizes, Mapping) or not all(_is_whole(number, 0) for number in (*sizes, *sizes.values())):
        raise ValueError(
            "a ramp must map whole numbers of samples seen to whole numbers of samples per update; found "
            f"{sizes!r}. Write sw.ramp({{0: 32, 20_000: 64}})."
        )
    starts = tuple(sizes)
    if starts[:1] != (0,) or list(starts) != sorted(starts):
        raise ValueError(
            f"the starts of a ramp must begin with 0 and increase; found {', '.join(map(str, starts)) or 'none'}. "
            "Write sw.ramp({0: 32, 20_000: 64})."
        )
    if min(sizes.values()) < 1:
        raise ValueError(f"the sizes of a ramp must be positive; found {min(sizes.values())}.")
    return Ramp(starts, tuple(sizes.values()))


@dataclass(frozen=True)
class FollowNoise:
    """Sizes that follow the noise scale, made by `follow_noise`."""

    at_least: int
    at_most: int
    ratio: float
    decay: float
    patience: int

    @property
    def sizes(self) -> list[int]:
        """`at_least` times powers of two, and `at_most`."""
        doublings = range((self.at_most // self.at_least).bit_length())
        sizes = [self.at_least << k for k in doublings]
        return sizes if sizes[-1] == self.at_most else [*sizes, self.at_most]


def follow_noise(
    at_least: int, at_most: int, *, ratio: float = 0.5, decay: float = 0.98, patience: int = 10
) -> FollowNoise:
    """Schedule for `Step(samples=...)`: number of samples per update by the gradient noise scale, tr Σ / |G|².

    Sizes are `at_least` times powers of two, up to `at_most`; the first is `at_least`. The size grows to the next one
    after `patience` updates in a row whose target is not below that, and shrinks to the previous one after as many
    whose target is not above that. In theory, updates of `ratio` times the noise scale need 1 + ratio times the fewest
    samples, and 1 + 1/ratio times the fewest updates.

    ratio: target, in noise scales.
    decay: factor per update of the moving averages of trace and signal. A signal that is not positive (noise hides it)
    counts as an infinite noise scale; updates that are skipped, or have one sample, are left out.

    The step records the norms of the samples. On an accelerator, each update has a host sync.
    """
    for name, value in {"at_least": at_least, "at_most": at_most, "patience": patience}.items():
        if not _is_whole(value, 1):
            raise ValueError(f"{name} must be a positive whole number; found {value!r}.")
    if not 2 <= at_least <= at_most:
        raise ValueError(
            "at_least must be 2 or more, because one sample shows no noise, and at_most not smaller; found "
            f"at_least={at_least} and at_most={at_most}."
        )
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < inf:
        raise ValueError(f"ratio must be positive and finite; found {ratio!r}.")
    NoiseAverage(decay)  # raises if decay is not in [0, 1)
    return FollowNoise(at_least, at_most, float(ratio), decay, patience)


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


Samples = int | None | Ramp | FollowNoise


class WindowSizes:
    """Number of samples of each window of a step, from its `samples=`; None: a window is a batch."""

    def __init__(self, samples: Samples, counters: Counters):
        self._counters = counters
        self.configure(samples)

    def configure(self, samples: Samples) -> None:
        self._samples = samples
        self.follower = NoiseFollower(samples) if isinstance(samples, FollowNoise) else None

    @property
    def is_fixed(self) -> bool:
        """True if all windows have the same number."""
        return not isinstance(self._samples, (Ramp, FollowNoise))

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
        self.average = NoiseAverage(schedule.decay)
        self._beyond = 0  # number of updates in a row whose target is the next size or more; negative: the previous one

    def record(self, update: Update) -> None:
        """Add the noise of an update, and change the size if the target has differed for long enough. Collective."""
        if update._was_skipped:
            return
        recorded = all(part.raw_norms is not None for part in update._parts)  # False: requested in an open window
        new = noise_of_update(update, update.norms if recorded else None)
        if new is None or not (isfinite(new.trace) and isfinite(new.signal)):
            return
        self.average.add(new)
        noise = self.average.value
        scale = inf if noise.signal <= 0 < noise.trace else noise.scale
        larger, smaller = self._neighbors()
        if self.schedule.ratio * scale >= larger:
            self._beyond = max(self._beyond, 0) + 1
        elif self.schedule.ratio * scale <= smaller:
            self._beyond = min(self._beyond, 0) - 1
        else:
            self._beyond = 0
        if abs(self._beyond) >= self.schedule.patience:
            self.size = int(larger if self._beyond > 0 else smaller)
            self._beyond = 0

    def _neighbors(self) -> tuple[float, float]:
        """Next and previous size; NaN, which no target reaches, if there is none."""
        sizes = self.schedule.sizes
        k = sizes.index(self.size)
        return sizes[k + 1] if k + 1 < len(sizes) else nan, sizes[k - 1] if k else nan

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size, "beyond": self._beyond, "noise": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; a size that this schedule does not have becomes the next smaller one."""
        sizes = self.schedule.sizes
        self.size = max((size for size in sizes if size <= state["size"]), default=sizes[0])
        self._beyond = state["beyond"]
        self.average.load_state_dict(state["noise"])
