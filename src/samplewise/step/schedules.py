"""Schedules for the number of samples per update: `sw.ramp` by samples seen, `sw.follow_noise` by the noise scale."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from samplewise.step.noise import check_decay


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


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        return f"follow_noise({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


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
    check_decay(decay)
    return FollowNoise(at_least, at_most, float(ratio), decay, patience)


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


Samples = int | None | Ramp | FollowNoise
