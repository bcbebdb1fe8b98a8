"""`clip` and `normalize`: bound, or set, the norm of each sample's gradient. `guard`: clip, or leave out, samples whose
gradient is far larger than those of earlier updates, or not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.core.quantiles import RunningQuantiles
from samplewise.core.validate import parse_interval
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, TransformState, quotient


class Clip(SampleTransform):
    """Result of `clip`, the only transform that `sw.Privacy(clip=...)` accepts."""


def clip(
    max_norm: float,
    *,
    by: Literal["parameter"] | None = None,
    mode: Literal["flat", "automatic"] = "flat",
    gamma: float = 0.01,
    per_count: bool = False,
) -> Clip:
    """Clip each sample's gradient to norm `max_norm`: c = min(1, max_norm / norm).

    by="parameter": clip the gradient of each parameter separately; the norm of the whole gradient is then at most
    max_norm × √(number of parameters).
    mode="automatic": c = max_norm / (norm + gamma); every gradient then has a norm just below `max_norm`, except
    gradients that are not large compared with gamma.
    per_count=True: bound norm / count instead of the norm. If a sample's loss is a sum over its counted elements
    (tokens of a sequence), this is the norm of the gradient of its mean loss; the bound is then the same for short and
    long sequences. Default False: bound the norm of the gradient of the sample's loss as returned.
    """
    if not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise ValueError(f"max_norm must be a number, zero or positive; found {max_norm!r}.")
    if by not in (None, "parameter"):
        raise ValueError(f"by must be None or 'parameter'; found {by!r}.")
    if mode not in ("flat", "automatic"):
        raise ValueError(f"mode must be 'flat' or 'automatic'; found {mode!r}.")
    if not gamma > 0:
        raise ValueError(f"gamma must be positive; found {gamma!r}.")

    def coefficients(stats: SampleStats) -> PerSample:
        unit = stats.counts if per_count and stats.counts is not None else 1.0
        bound = max_norm * unit
        coefficients: dict[str, Tensor] = {}
        for name, norms in ({"": stats.norms} if by is None else stats.norms_by_parameter).items():
            if mode == "automatic":
                coefficients[name] = quotient(bound, norms + gamma * unit)
            else:
                coefficients[name] = torch.where(norms > bound, bound / norms, float(max_norm > 0))
        return coefficients[""] if by is None else coefficients

    length = "‖{g} of p‖" if by else "‖{g}‖"
    bound = f"{max_norm}·count" if per_count else f"{max_norm}"
    small = f"{gamma}·count" if per_count else f"{gamma}"
    options = (f", by={by!r}" if by else "") + (f", mode={mode!r}, gamma={gamma}" if mode != "flat" else "")
    options += ", per_count=True" if per_count else ""
    return Clip(
        name=f"clip({max_norm}{options})",
        formula=f"min(1, {bound}/{length})" if mode == "flat" else f"{bound}/({length} + {small})",
        coefficients=coefficients,
        needs=frozenset({"norms", "counts"} if per_count else {"norms"}),
        by_parameter=by is not None,
        sets_norm=mode == "automatic",
        max_norm=float(max_norm) if not per_count else None,
    )


def normalize(norm: float | Literal["mean"] = 1.0) -> SampleTransform:
    """Scale every sample's gradient to the same norm, so that only directions count. A zero gradient stays zero.

    norm: the norm (default 1.0), or "mean" for the mean norm of the window, which keeps the scale of the update.
    """
    if norm == "mean":

        def to_the_mean(stats: SampleStats) -> PerSample:
            norms = stats.norms
            return quotient(norms.mean(), norms)

        name, formula = "normalize('mean')", "mean‖{g}‖/‖{g}‖"
        return SampleTransform(name, formula, to_the_mean, frozenset({"norms"}), window=True, sets_norm=True)
    if not isinstance(norm, (int, float)):
        raise ValueError(f"norm must be a positive number or 'mean'; found {norm!r}.")
    if not norm > 0:
        raise ValueError(f"norm must be positive; found {norm!r}.")
    return SampleTransform(
        name="normalize()" if norm == 1 else f"normalize({norm})",
        formula=f"{norm:g}/‖{{g}}‖",
        coefficients=lambda stats: quotient(norm, stats.norms),
        needs=frozenset({"norms"}),
        sets_norm=True,
        max_norm=float(norm),
    )


# --- guard ------------------------------------------------------------------------------------------------------------


DROP_AFTER = 20  # norms before which nothing is dropped because of its norm: a median needs less than a quantile
CLIP_AFTER = 100  # norms before which nothing is clipped
REFRESH = 25  # the bounds are computed again when the norms have increased by 1/REFRESH
ROUNDING = 1.01  # from the middle of a bucket of the quantiles to its end, so that no value of the bucket exceeds it
WINDOWS = {"up": "'1000up' (updates)", "samples": "'50000samples'"}


def guard(clip: float | None = 0.99, drop: float | None = 50.0, window: str | int = "1000up") -> SampleTransform:
    """Clip samples with unusually large gradients, c = min(1, bound / norm); drop extreme and non-finite ones, c = 0.

    The norms of earlier updates are recorded, before any transform; if samples have counts, such as tokens, norm /
    count. A coefficient depends on the sample and on earlier updates, and not on the rest of its update.

    clip: the bound is this quantile of the recorded norms, rounded up by at most 2 %; None: nothing is clipped.
    drop: a sample beyond `drop` times the median of the recorded norms gets weight 0; None: none because of its norm.
    window: how far back norms are used: those of the last half to whole window of updates ("1000up") or samples
    ("50000samples"). Half of a window should have more than 100 samples, or nothing is clipped at its beginning.

    A sample whose loss or gradient is NaN or infinite gets weight 0 as well (in `sw.backward`, it raises as without a
    guard). Dropped samples are in no sum: neither in the denominator of the update nor in `update.loss`;
    `update.dropped` marks them. An update of which nothing is left is skipped; if none of its samples was finite, it
    raises, unless on_nonfinite="skip". Warm-up: until 20 norms are recorded, in most runs in the first update, only
    non-finite samples are dropped, and until 100 norms nothing is clipped. Norms of dropped samples are not recorded;
    those of clipped ones are, with their full length.

    The guard has a state, which is part of `step.state_dict()`: each step needs a guard of its own. It must be the
    first transform.
    """
    for name, value, lowest, limit in (("clip", clip, 0.0, 1.0), ("drop", drop, 1.0, inf)):
        if value is not None and not (type(value) in (int, float) and lowest < value < limit):
            highest = f" and below {limit:g}" if isfinite(limit) else ""
            raise ValueError(f"{name} must be a number above {lowest:g}{highest}, or None; found {value!r}.")
    number, unit = parse_interval("window", window, WINDOWS)
    state = GuardState(clip, drop, number, unit)
    cases = [*([f"0 if ‖{{g}}‖ > {drop:g}·median"] if drop else []), "0 if not finite"]
    return SampleTransform(
        name=f"guard(clip={clip}, drop={drop}, window='{number}{unit}')",
        formula=f"{f'min(1, quantile {clip:g}/‖{{g}}‖)' if clip else '1'}, {', '.join(cases)}",
        coefficients=state.coefficients,
        needs=frozenset({"norms"}),
        state=state,
        drops=True,
    )


class GuardState(TransformState):
    """Recorded norms, and the bounds that follow from them.

    bound: norm above which samples are clipped. limit: norm above which they are dropped. Both are infinite during the
    warm-up, and if the quantile or the median is 0.
    """

    def __init__(self, clip: float | None, drop: float | None, window: int, unit: str):
        self._clip = clip
        self._drop = drop
        self._half = max(1, window // 2)
        self._unit = unit
        self._settings = [clip, drop, window, unit]
        self._reset()

    def _reset(self) -> None:
        self._norms = RunningQuantiles(period=None)
        self._added: list[Tensor] = []  # norms of the last updates, which are not in `_norms` yet
        self._new = 0  # samples since the bounds were computed
        self._progress = 0  # updates or samples in this half of the window
        self.bound = self.limit = inf

    def coefficients(self, stats: SampleStats) -> Tensor:
        norms = _per_count(stats.norms, stats.counts)
        coefficients = torch.where(norms > self.bound, self.bound / norms, 1.0)
        return coefficients.masked_fill_(norms > self.limit, 0.0)

    def values(self, stats: SampleStats) -> Tensor:
        """Norms (B,); NaN for dropped samples, which are not recorded."""
        assert stats.unscaled_norms is not None  # the guard needs them
        norms = _per_count(stats.unscaled_norms, stats.counts)
        return norms if stats.dropped is None else norms.masked_fill(stats.dropped != 0, torch.nan)

    def commit(self, values: Tensor) -> None:
        self._added.append(values)
        self._new += len(values)
        self._progress += 1 if self._unit == "up" else len(values)
        ended = self._progress >= self._half
        if not ended and self._new * REFRESH < len(self._norms):
            return
        self._count_added()
        if ended:
            self._norms.turn()
            self._progress = 0
        self._new = 0
        self._compute_bounds()

    def _compute_bounds(self) -> None:
        norms = self._norms
        self.bound = self.limit = inf
        if self._clip is not None and len(norms) >= CLIP_AFTER:
            self.bound = norms.quantile(self._clip) * ROUNDING or inf
        if self._drop is not None and len(norms) >= DROP_AFTER:
            self.limit = norms.quantile(0.5) * self._drop or inf

    def _count_added(self) -> None:
        """Count the norms of the last updates: of several at once, which takes less time."""
        if self._added:
            self._norms.add_all(torch.cat(self._added).cpu())
            self._added = []

    def state_dict(self) -> dict[str, Any]:
        self._count_added()
        norms = {name: list(map(list, sorted(counts.items()))) for name, counts in self._norms.state_dict().items()}
        bounds = [None if bound == inf else bound for bound in (self.bound, self.limit)]
        counts = {"new": self._new, "progress": self._progress}
        return {"norms": norms, "bounds": bounds, **counts, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._reset()
        if state is not None:
            self._norms.load_state_dict({name: dict(counts) for name, counts in state["norms"].items()})
            if state["settings"] != self._settings:
                self._compute_bounds()
                return
            self.bound, self.limit = (inf if bound is None else float(bound) for bound in state["bounds"])
            self._new = int(state["new"])
            self._progress = int(state["progress"])


def _per_count(norms: Tensor, counts: Tensor | None) -> Tensor:
    """Norms (B,), divided by the counts if there are any. 0 / 0 is NaN, which is not recorded and has coefficient 1."""
    return norms if counts is None else norms / counts
