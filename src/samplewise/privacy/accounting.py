"""Epsilon, delta and noise multiplier of DP-SGD, computed by dp-accounting.

The mechanism: each of `updates` releases is a sum over a Poisson sample of the units, in which each unit has norm at
most 1, plus Gaussian noise of standard deviation `noise_multiplier`. Neighboring datasets differ by adding or
removing one unit. This module builds the event of dp-accounting, queries its accountants and searches for a noise
multiplier. It contains no bound of its own.
"""

from __future__ import annotations

import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from samplewise.errors import TrainingWarning

ACCOUNTANTS = ("pld", "rdp")
CURVE_DELTAS = 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3

PLD_GRID = 1e-4  # step of the discretized privacy loss; the default of dp-accounting
COARSE_GRID = 1e-3  # ten times faster, for the first guess of a calibration
FINE_EPSILON = 300.0  # above it the grid is coarser: the PLD has epsilon / grid entries
LARGEST_EPSILON = 1e5  # larger ones are reported as infinite: accountants are slow there, and then overflow
LEAST_NOISE = 1e-6  # less noise gives an infinite epsilon, whatever the sampling rate
LARGEST_NOISE = 1e100  # its square is finite
MOST_UPDATES = 10**7  # of the PLD accountant with sampling: more take minutes and fill the memory
MIN_DIVERGENCE = 1e-15  # of the RDP accountant: smaller ones are rounding errors

MIN_NOISE = 0.05
MAX_NOISE = 1e7
MAX_STEP = math.log(4.0)  # of the search for a bracket: little noise takes seconds and memory
WIDTH = {"pld": 2e-4, "rdp": 1e-6}  # relative width of the final bracket of a calibration; below 1 - LESS_NOISE
LESS_NOISE = 0.999  # this fraction of a calibrated noise multiplier exceeds the target


@dataclass(frozen=True)
class Releases:
    """Noisy sums released by a training run: noise, sampling rate and number.

    noise_multiplier: standard deviation of the noise, in units of the sensitivity of the sum
    sample_rate: probability of each unit to be in the Poisson sample of an update
    max_batch: larger Poisson samples are truncated to a random subset of this size; None: never
    dataset_size: number of units in the dataset, which is public; required with max_batch
    """

    noise_multiplier: float
    sample_rate: float
    updates: int
    max_batch: int | None = None
    dataset_size: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.noise_multiplier) and 0 <= self.noise_multiplier < math.inf):
            raise ValueError(f"noise_multiplier must be a finite number >= 0; found {self.noise_multiplier!r}.")
        if self.noise_multiplier > LARGEST_NOISE:
            raise ValueError(f"noise_multiplier must be at most {LARGEST_NOISE:g}; found {self.noise_multiplier!r}.")
        _check_rate(self.sample_rate)
        if not (_is_integer(self.updates) and self.updates >= 0):
            raise ValueError(f"updates must be an integer >= 0; found {self.updates!r}.")
        for name, value in (("max_batch", self.max_batch), ("dataset_size", self.dataset_size)):
            if value is not None and not (_is_integer(value) and value >= 1):
                raise ValueError(f"{name} must be a positive integer; found {value!r}.")
        if self.max_batch is not None and self.dataset_size is None:
            raise ValueError(
                "dataset_size must be given with max_batch; found None. Pass the number of samples, or users."
            )


def epsilon(releases: Releases, delta: float, accountant: str = "pld") -> float:
    """Epsilon of the releases at this delta; 0.0 for no updates, infinity without noise or if it is above 1e5.

    accountant: "pld" (privacy loss distribution, tight) or "rdp" (Rényi, an upper bound that is 5 to 15 % larger)
    """
    _check_delta(delta)
    _check_accountant(accountant, releases.max_batch)
    _check_updates(releases, accountant)
    if releases.updates == 0:
        return 0.0
    if _has_infinite_epsilon(releases):
        return math.inf
    return _query_epsilon(_composed(releases, accountant), delta, accountant)


def delta(releases: Releases, epsilon: float, accountant: str = "pld") -> float:
    """Delta of the releases at this epsilon, in [0, 1]; 0.0 for no updates, 1.0 for an infinite epsilon."""
    if not (_is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon must be a finite number >= 0; found {epsilon!r}.")
    _check_accountant(accountant, releases.max_batch)
    _check_updates(releases, accountant)
    if releases.updates == 0:
        return 0.0
    if _has_infinite_epsilon(releases):
        return 1.0
    return _query_delta(_composed(releases, accountant), epsilon, accountant)


def curve(releases: Releases, accountant: str = "pld", deltas: Iterable[float] | None = None) -> dict[float, float]:
    """Epsilon for each delta; default: 1e-9, 1e-8, ..., 1e-3."""
    return {delta: epsilon(releases, delta, accountant) for delta in (CURVE_DELTAS if deltas is None else deltas)}


def calibrate(
    epsilon: float,
    delta: float,
    sample_rate: float,
    updates: int,
    accountant: str = "pld",
    max_batch: int | None = None,
    dataset_size: int | None = None,
) -> float:
    """Smallest noise multiplier for a target epsilon and delta.

    The epsilon of the result, computed by `epsilon` above, is at most the target; that of 0.1 % less noise exceeds it.
    """
    if not (_is_number(epsilon) and 0 < epsilon < math.inf):
        raise ValueError(f"epsilon must be a finite number > 0; found {epsilon!r}.")
    _check_delta(delta)
    if not (_is_integer(updates) and updates >= 1):
        raise ValueError(f"updates must be a positive integer; found {updates!r}.")
    _check_accountant(accountant, max_batch)
    releases = Releases(1.0, sample_rate, updates, max_batch, dataset_size)
    _check_updates(releases, accountant)
    return _calibrated(float(epsilon), float(delta), releases, accountant)


# --- arguments --------------------------------------------------------------------------------------------------------


def sampling_plan(
    sample_rate: float | None,
    batch_size: float | None,
    updates: int | None,
    epochs: float | None,
    dataset_size: int | None,
) -> tuple[float, int]:
    """Sample rate and number of updates. Exactly one of `sample_rate` and `batch_size`, the expected number of units
    per update, and exactly one of `updates` and `epochs` must be given.
    """
    for (name, value), (other, other_value) in (
        (("sample_rate", sample_rate), ("batch_size", batch_size)),
        (("updates", updates), ("epochs", epochs)),
    ):
        if (value is None) == (other_value is None):
            count = "none" if value is None else "both"
            raise ValueError(f"exactly one of {name} and {other} must be given; found {count}.")
    if epochs is not None and not (_is_number(epochs) and 0 < epochs < math.inf):
        raise ValueError(f"epochs must be a positive number; found {epochs!r}.")
    if batch_size is not None:
        if not (_is_integer(dataset_size) and dataset_size):
            raise ValueError(
                f"dataset_size must be a positive integer with batch_size; found {dataset_size!r}. Pass the number of "
                "samples, or users."
            )
        assert dataset_size is not None
        if not (_is_number(batch_size) and 0 < batch_size <= dataset_size):
            raise ValueError(
                f"batch_size must be a positive number, at most dataset_size={dataset_size}; found {batch_size!r}."
            )
        sample_rate = batch_size / dataset_size
    assert sample_rate is not None
    _check_rate(sample_rate)
    if epochs is not None:
        updates = max(1, round(epochs / sample_rate))
    assert updates is not None
    return sample_rate, updates


def warn_of_delta(delta: float, units: int, unit: str = "sample") -> None:
    """Warn if delta is too large for the number of units: publishing one unit at random has a delta of 1 / units."""
    if delta * units >= 1:
        warnings.warn(  # without the number of units, which may be a secret
            f"delta should be below 1 / number of {unit}s, as a larger one permits publishing whole {unit}s; found "
            f"{delta:g} for at least {math.ceil(1 / delta):,} {unit}s. Use a tenth of 1 / number of {unit}s, or less.",
            TrainingWarning,
            stacklevel=3,
        )


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, str, bytes)) and not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def _is_integer(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) == value
    except TypeError:
        return False


def _check_rate(sample_rate: float) -> None:
    if not (_is_number(sample_rate) and 0 < sample_rate <= 1):
        raise ValueError(f"sample_rate must be a number in (0, 1]; found {sample_rate!r}.")


def _check_delta(delta: float) -> None:
    if not (_is_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta must be a number in (0, 1); found {delta!r}.")


def _check_accountant(accountant: str, max_batch: int | None) -> None:
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be 'pld' or 'rdp'; found {accountant!r}.")
    if max_batch is not None and accountant != "pld":
        raise ValueError(
            f"accountant must be 'pld' with max_batch, because truncated Poisson sampling has no other; found "
            f"{accountant!r}."
        )


def _check_updates(releases: Releases, accountant: str) -> None:
    if accountant == "pld" and releases.sample_rate < 1 and releases.updates > MOST_UPDATES:
        raise ValueError(
            f"updates must be at most {MOST_UPDATES:,} with the accountant 'pld', which would take minutes; found "
            f"{releases.updates:,}. Use the accountant 'rdp'."
        )


# --- dp-accounting ----------------------------------------------------------------------------------------------------


def load_dp_accounting() -> Any:
    """The module dp_accounting, with its accountants loaded."""
    try:
        import_module("dp_accounting.pld")
        import_module("dp_accounting.rdp")
        return import_module("dp_accounting")
    except ImportError:
        raise ImportError(
            "sw.Privacy needs dp-accounting; found that it is not installed. Install it: pip install "
            "'samplewise[privacy]'."
        ) from None


@contextmanager
def _no_logging() -> Iterator[None]:
    """Discard log records of dp-accounting in the block.

    The RDP accountant logs one line for each order whose series does not converge. It leaves the order out, so that the
    bound is valid.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_discard)
    try:
        yield
    finally:
        logger.removeFilter(_discard)


def _discard(record: logging.LogRecord) -> bool:
    return False


@lru_cache(maxsize=4)  # a PLD has up to some 10 MB; one of them serves epsilon, delta and the curve
def _composed(releases: Releases, accountant: str, least_grid: float = PLD_GRID) -> Any:
    """Accountant of dp-accounting into which the releases are composed. `least_grid`: for PLD."""
    dp_accounting = load_dp_accounting()
    neighbors = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    event = _event(dp_accounting, releases)
    with _no_logging():
        if accountant == "rdp":
            return dp_accounting.rdp.RdpAccountant(neighboring_relation=neighbors).compose(event)
        grid = max(least_grid, _pld_grid(releases))
        return dp_accounting.pld.PLDAccountant(neighbors, value_discretization_interval=grid).compose(event)


def _event(dp_accounting: Any, releases: Releases) -> Any:
    noise = float(releases.noise_multiplier)
    rate = float(releases.sample_rate)
    if releases.max_batch is not None:
        release = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            releases.dataset_size, rate, releases.max_batch, noise
        )
    elif rate == 1.0:
        release = dp_accounting.GaussianDpEvent(noise)  # many of them are composed exactly
    else:
        release = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(release, int(releases.updates))


def _pld_grid(releases: Releases) -> float:
    """Step of the discretized privacy loss: 1e-4, larger if epsilon is so large that the PLD would fill the memory."""
    rough = _rough_epsilon(releases)
    return PLD_GRID * max(1.0, math.ceil(rough / FINE_EPSILON)) if math.isfinite(rough) else PLD_GRID


def _has_infinite_epsilon(releases: Releases) -> bool:
    return releases.noise_multiplier < LEAST_NOISE or LARGEST_EPSILON < _rough_epsilon(releases) < math.inf


def _rough_epsilon(releases: Releases) -> float:
    """Upper bound of epsilon, computed quickly; 0.0 if it is not large."""
    if releases.updates / (2 * releases.noise_multiplier**2) < FINE_EPSILON:  # the mean loss without sampling
        return 0.0
    return _query_epsilon(_composed(replace(releases, max_batch=None), "rdp"), CURVE_DELTAS[0], "rdp")


def _query_epsilon(composed: Any, delta: float, accountant: str) -> float:
    with _no_logging():
        if accountant == "pld":
            epsilon = composed.get_epsilon(delta)
        else:
            orders, divergences = _valid_divergences(composed)
            epsilon = _rdp_functions().compute_epsilon(orders, divergences, delta)[0] if len(orders) else math.inf
    return max(float(epsilon), 0.0)


def _query_delta(composed: Any, epsilon: float, accountant: str) -> float:
    with _no_logging():
        if accountant == "pld":
            delta = composed.get_delta(epsilon)
        else:
            orders, divergences = _valid_divergences(composed)
            delta = _rdp_functions().compute_delta(orders, divergences, epsilon)[0] if len(orders) else 1.0
    return min(max(float(delta), 0.0), 1.0)  # rounding of the PLD gives -1e-16 for large epsilon


def _rdp_functions() -> Any:
    return load_dp_accounting().rdp.rdp_privacy_accountant


def _valid_divergences(composed: Any) -> tuple[Any, Any]:
    """Orders of an RDP accountant and their divergences, except those that are negative by rounding.

    With a noise multiplier of 1e5 and more, rounding errors exceed the divergences. dp-accounting would return an
    epsilon of 0 for a negative one, and fails to compute delta for one below 1e-16.
    """
    valid = composed.rdp >= 0
    return composed.orders[valid], composed.rdp[valid].clip(min=MIN_DIVERGENCE)


# --- search for the noise multiplier ----------------------------------------------------------------------------------


class _Point(NamedTuple):
    """Evaluated noise multiplier."""

    log_noise: float
    excess: float  # log(epsilon / target); at most 0: the target is kept

    @property
    def is_safe(self) -> bool:
        return self.excess <= 0


@lru_cache(maxsize=64)
def _calibrated(epsilon: float, delta: float, releases: Releases, accountant: str) -> float:
    """Noise multiplier for the releases, whose own one is ignored. Searches with cheaper accountants come first."""
    # First guess: noise of a Gaussian mechanism with the sensitivity rate · √updates.
    sensitivity = releases.sample_rate * math.sqrt(releases.updates)
    noise = max(0.5, sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)
    if accountant == "rdp":
        return _smallest_noise(_epsilon_of_noise(releases, delta, "rdp"), epsilon, noise, WIDTH["rdp"])
    with suppress(ValueError):  # RDP does not reach a small epsilon
        plain = replace(releases, max_batch=None)
        noise = _smallest_noise(_epsilon_of_noise(plain, delta, "rdp"), epsilon, noise, WIDTH["pld"])
    with suppress(ValueError):
        noise = _smallest_noise(_epsilon_of_noise(releases, delta, "pld", COARSE_GRID), epsilon, noise, WIDTH["pld"])
    return _smallest_noise(_epsilon_of_noise(releases, delta, "pld"), epsilon, noise, WIDTH["pld"], WIDTH["pld"])


def _epsilon_of_noise(
    releases: Releases, delta: float, accountant: str, least_grid: float = PLD_GRID
) -> Callable[[float], float]:
    def spent(noise: float) -> float:
        with_noise = replace(releases, noise_multiplier=noise)
        return _query_epsilon(_composed(with_noise, accountant, least_grid), delta, accountant)

    return spent


def _smallest_noise(
    spent: Callable[[float], float], target: float, start: float, width: float, margin: float = 0.01
) -> float:
    """Smallest noise multiplier with spent(noise) <= target, at most a fraction `width` larger than necessary.

    start: first guess
    margin: relative error of the first guess, approximately
    """

    def evaluate(log_noise: float) -> _Point:
        epsilon = spent(math.exp(log_noise))
        return _Point(log_noise, math.log(epsilon / target) if epsilon > 0 else -math.inf)

    while True:
        safe, unsafe = _bracket(evaluate, math.log(start), target, margin)
        safe = _narrow(evaluate, safe, unsafe, width)
        noise = math.exp(safe.log_noise)
        start = LESS_NOISE * noise
        if spent(start) > target:
            return noise
        # Epsilon is not monotone in its last digits: continue below.


def _out_of_range(target: float, size: str) -> ValueError:
    return ValueError(
        f"epsilon must be one that a noise multiplier between {MIN_NOISE:g} and {MAX_NOISE:g} gives; found "
        f"{target:g}, which is too {size} for this delta, rate and number of updates."
    )


def _bracket(
    evaluate: Callable[[float], _Point], log_noise: float, target: float, margin: float
) -> tuple[_Point, _Point]:
    """Two points, (safe, unsafe), found by steps from `log_noise` as if epsilon were proportional to 1 / noise."""
    if target > LARGEST_EPSILON:  # without a call: with little noise the accountants take half a minute
        raise _out_of_range(target, "large")
    low = math.log(MIN_NOISE)
    high = math.log(MAX_NOISE)
    last = evaluate(min(max(log_noise, low), high))
    while True:
        if last.log_noise == (low if last.is_safe else high):
            raise _out_of_range(target, "large" if last.is_safe else "small")
        step = min(abs(last.excess) + margin, MAX_STEP)
        margin *= 2
        point = evaluate(min(max(last.log_noise + (-step if last.is_safe else step), low), high))
        if point.is_safe != last.is_safe:
            return (last, point) if last.is_safe else (point, last)
        last = point


def _narrow(evaluate: Callable[[float], _Point], safe: _Point, unsafe: _Point, width: float) -> _Point:
    """Narrow the bracket to `width`, by secants and bisections; the safe point is returned."""
    recent = unsafe, safe
    evaluations = 0
    while safe.log_noise - unsafe.log_noise > width:
        evaluations += 1
        middle = (safe.log_noise + unsafe.log_noise) / 2
        root = middle if evaluations % 4 == 0 else _secant(*recent)
        if not unsafe.log_noise < root < safe.log_noise:
            root = middle
        # Aim beside the root, first at its safe side and then at the other one: the two points bracket it.
        aim = root + width / 3 if safe.log_noise - root > width else root - width / 3
        if not unsafe.log_noise < aim < safe.log_noise:
            aim = middle
        point = evaluate(aim)
        if point.is_safe:
            safe = point
        else:
            unsafe = point
        recent = recent[1], point
    return safe


def _secant(a: _Point, b: _Point) -> float:
    """Root of the line through two points; NaN if there is none."""
    slope = (b.excess - a.excess) / (b.log_noise - a.log_noise)
    return b.log_noise - b.excess / slope if slope and math.isfinite(slope) else math.nan
