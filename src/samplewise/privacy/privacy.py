"""`sw.Privacy`: plan of a differentially private training."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, sqrt
from typing import Any, Literal

from torch.utils.data import DataLoader

from samplewise.privacy import accounting
from samplewise.privacy.accounting import Releases
from samplewise.privacy.sampling import DrawState, make_loader
from samplewise.privacy.spending import Spending
from samplewise.privacy.streams import Secret
from samplewise.transforms.clip import clip
from samplewise.transforms.divisor import Divisor
from samplewise.transforms.transform import SampleTransform

COUNT_NOISE = 0.05  # noise of the count of unclipped samples, as a share of the expected number of samples


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Privacy:
    """Plan of a training with (epsilon, delta)-differential privacy, for adding or removing one sample.

        privacy = sw.Privacy(epsilon=3.0, delta=1e-5, updates=1172, sample_rate=2048 / 60_000, clip=1.0)
        loader = privacy.loader(dataset)
        step = sw.Step(model, optimizer, loss_fn, privacy=privacy)
        sw.Trainer(step, "runs/private").fit(loader)

    Each update draws every sample with probability `sample_rate`, independently (Poisson sampling); clips the gradient
    of each sample to norm `clip`; adds Gaussian noise of standard deviation noise_multiplier × sensitivity to the sum;
    and divides by a public constant. Needs `pip install 'samplewise[privacy]'`.

    The guarantee.
    epsilon, noise_multiplier: exactly one of them is given; the other one is computed.
    delta: probability with which the bound epsilon may fail; below 1 / number of samples.
    updates: number of updates that are paid for; more are refused.
    accountant: "pld" (default, tight) or "rdp", of the package dp-accounting.
    unit: "sample" (default), or "user": then sampling, clipping and the guarantee refer to all samples of one user.
    group: with unit="user", the user of each sample of the dataset: a sequence of ids.

    The update.
    sample_rate: probability with which a sample is drawn: expected batch size / number of samples.
    clip: bound of the norm of each sample's gradient.
    mode: "flat" (default) or "automatic": see `sw.clip`.
    by: None (default), or "parameter": clip each parameter's gradient by itself. The sensitivity is then
    clip × √(number of parameters), which the noise takes into account.
    adaptive: None (default), or the share of samples that shall not be clipped, such as 0.5: the bound then follows
    this quantile of the norms, starting from `clip`. A noisy count of unclipped samples pays for it; the noise of the
    gradients is a little larger, so that the guarantee stays the same.
    augmentations: number of random views of each sample, whose gradients are averaged before they are clipped.
    max_batch: largest number of samples of an update; if more are drawn, a random part of them is used. The accountant
    then needs `samples`, the public number of samples or users.
    divide_by: public constant by which sums are divided; default: sample_rate × number of samples (or users), which
    makes that number public. With `divide_by`, checkpoints do not contain the number, unless `adaptive` or `samples`
    makes it public.

    Randomness.
    seed: None (default) takes a key from the operating system. With a number, a run is reproducible, and not private.
    secure: True draws samples and noise from a cryptographic stream, several times slower.

    Observation.
    observe: False (default) hides losses, norms and sizes of batches, which the guarantee does not cover: nothing of
    them is logged, and the ledger is refused. True shows them.
    """

    delta: float
    updates: int
    sample_rate: float
    clip: float
    epsilon: float | Any = None  # a number after __post_init__
    noise_multiplier: float | Any = None
    accountant: str = "pld"
    unit: str = "sample"
    group: Sequence[Hashable] | None = None
    mode: Literal["flat", "automatic"] = "flat"
    by: Literal["parameter"] | None = None
    adaptive: float | None = None
    augmentations: int = 1
    max_batch: int | None = None
    samples: int | None = None
    divide_by: float | None = None
    seed: int | None = None
    secure: bool = False
    observe: bool = False
    state: DrawState = field(init=False)
    divisor: Divisor = field(init=False)
    spending: Spending = field(init=False)

    def __post_init__(self) -> None:
        self._check()
        targets = (self.delta, self.sample_rate, self.updates, self.accountant)
        if self.noise_multiplier is None:
            noise = accounting.calibrate(self.epsilon, *targets, max_batch=self.max_batch, samples=self.samples)
            object.__setattr__(self, "noise_multiplier", noise)
        else:
            object.__setattr__(self, "epsilon", self.epsilon_after(self.updates))
        self._begin()

    def _begin(self) -> None:
        """Begin a training, with a new key unless a seed is given."""
        secret = Secret.new() if self.seed is None else Secret.from_seed(self.seed)
        object.__setattr__(self, "state", DrawState(secret, reproducible=self.seed is not None))
        object.__setattr__(self, "divisor", Divisor(self.divide_by))
        object.__setattr__(self, "spending", Spending())

    def __deepcopy__(self, memo: Any) -> Privacy:
        """New plan with the same settings, as of another training: with a key of its own, and nothing spent."""
        new = copy.copy(self)
        new._begin()
        return new

    def _check(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            found = "none" if self.epsilon is None else "both"
            raise ValueError(f"exactly one of epsilon and noise_multiplier must be given; found {found}.")
        for name in ("clip", "noise_multiplier", "divide_by"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite, positive number; found {value!r}.")
        if self.unit not in ("sample", "user"):
            raise ValueError(f"unit must be 'sample' or 'user'; found {self.unit!r}.")
        if (self.unit == "user") != (self.group is not None):
            found = "no group" if self.unit == "user" else f"group={type(self.group).__name__} and unit='sample'"
            raise ValueError(
                f"unit='user' and group=, the user of each sample, must be given together; found {found}. Pass both."
            )
        if type(self.augmentations) is not int or self.augmentations < 1:
            raise ValueError(f"augmentations must be a positive integer; found {self.augmentations!r}.")
        if self.augmentations > 1 and self.unit == "user":
            raise ValueError("augmentations must be 1 with unit='user'; found more. Augment in the dataset.")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed must be None or an integer; found {self.seed!r}.")
        if self.adaptive is not None:
            self._check_adaptive()
        self.make_clip(lambda: self.clip)  # checks mode and by

    def _check_adaptive(self) -> None:
        if not (isinstance(self.adaptive, float) and 0 < self.adaptive < 1):
            raise ValueError(f"adaptive must be a share between 0 and 1, such as 0.5; found {self.adaptive!r}.")
        if self.by is not None or self.mode != "flat" or self.unit == "user":
            raise ValueError(
                "an adaptive bound must be used with mode='flat', by=None and unit='sample'; found "
                f"mode={self.mode!r}, by={self.by!r}, unit={self.unit!r}. Leave adaptive out."
            )

    # --- the update ------------------------------------------------------------------------------------------------

    def make_clip(self, bound: Any) -> SampleTransform:
        """Clip of this plan. `bound`: function that returns the current bound of the norm; it is called for every
        microbatch if the bound is adaptive.
        """
        fixed = clip(bound(), by=self.by, mode=self.mode)
        if self.adaptive is None:
            return fixed
        return SampleTransform(
            name=f"clip({self.clip}, adaptive={self.adaptive})",
            formula="min(1, C/‖{g}‖)",
            answer=lambda stats: clip(bound()).answer(stats),
            needs=fixed.needs,
            max_norm=self.clip,
        )

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count of unclipped samples, with an adaptive bound."""
        return max(COUNT_NOISE * self.expected_units, self.noise_multiplier)

    @property
    def expected_units(self) -> float:
        """Expected number of samples, or users, of a draw; 0 until a loader is made."""
        return self.sample_rate * (self.state.units or 0)

    @property
    def gradient_noise_multiplier(self) -> float:
        """Noise multiplier of the gradients. With an adaptive bound it is larger than `noise_multiplier`, such that
        gradients and count together have the privacy of `noise_multiplier`.
        """
        if self.adaptive is None:
            return self.noise_multiplier
        # The count, of values ±1/2, has sensitivity 1/2: its noise multiplier is 2 × count_noise.
        return 1 / sqrt(self.noise_multiplier**-2 - (2 * self.count_noise) ** -2)

    # --- data ------------------------------------------------------------------------------------------------------

    def loader(self, dataset: Any, **arguments: Any) -> DataLoader[Any]:
        """DataLoader whose batches are drawn by Poisson sampling. A pass over it has round(1 / sample_rate) draws.

        dataset: map-style dataset. arguments: of DataLoader, such as num_workers and collate_fn; batch_size, shuffle
        and samplers are refused.
        """
        loader = make_loader(
            dataset,
            sample_rate=self.sample_rate,
            updates=self.updates,
            state=self.state,
            secure=self.secure,
            max_batch=self.max_batch,
            augmentations=self.augmentations,
            users=self.group,
            **arguments,
        )
        self._set_units(loader.batch_sampler.units)  # type: ignore[union-attr]
        return loader

    def _set_units(self, units: int) -> None:
        """Use the number of samples, or users, of a dataset."""
        if self.samples is not None and units != self.samples:
            raise ValueError(
                f"the dataset must have samples={self.samples} {self.unit}s, the number given to the accountant; "
                f"found {units}. Pass the right number to sw.Privacy(samples=...)."
            )
        if self.state.units is not None and units != self.state.units:
            raise ValueError(
                f"all loaders of one Privacy must have the same dataset; found {units} {self.unit}s after "
                f"{self.state.units}. Make a Privacy for each dataset."
            )
        self.state.units = units
        self.state.hides_units = self.divide_by is not None and self.samples is None and self.adaptive is None
        if self.divisor.value is None:
            self.divisor.value = self.expected_units

    # --- accounting ------------------------------------------------------------------------------------------------

    def releases(self, updates: int) -> Releases:
        """Description of this number of updates, for the accountant."""
        return Releases(self.noise_multiplier, self.sample_rate, updates, self.max_batch, self.samples)

    def epsilon_after(self, updates: int) -> float:
        """Epsilon of this number of updates, at `delta`."""
        return accounting.epsilon(self.releases(updates), self.delta, self.accountant)

    def curve(self) -> dict[float, float]:
        """Epsilon of all updates for several values of delta: delta -> epsilon."""
        return accounting.curve(self.releases(self.updates), self.accountant)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share, as plain values."""
        names = ("delta", "updates", "sample_rate", "clip", "accountant", "unit", "mode", "by", "adaptive")
        more = ("augmentations", "max_batch", "samples", "divide_by", "secure")
        return {"noise_multiplier": self.noise_multiplier, **{n: getattr(self, n) for n in (*names, *more)}}

    def __repr__(self) -> str:
        unit = f"one {self.unit}" + ("'s samples" if self.unit == "user" else "")
        at_most = f", at most {self.max_batch}" if self.max_batch else ""
        parts = [
            f"({self.epsilon:.6g}, {self.delta:g})-DP for adding or removing {unit}",
            f"Poisson sampling {self.sample_rate:.3g}{at_most} × {self.updates} updates",
            f"Gaussian noise {self.noise_multiplier:.3g} × {self._bound()}",
            f"{self.accountant.upper()} accountant",
        ]
        parts += ["reproducible, not private: seed given"] if self.seed is not None else []
        parts += ["observed: losses, norms and batch sizes are shown, outside of the guarantee"] if self.observe else []
        return "; ".join(parts)

    def _bound(self) -> str:
        if self.adaptive is not None:
            return f"adaptive bound, from {self.clip}"
        return f"{self.clip} × √parameters" if self.by == "parameter" else f"{self.clip}"
