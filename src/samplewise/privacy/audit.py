"""Lower bound on epsilon from the scores of canaries in one training run.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", 2023, https://arxiv.org/abs/2305.08846.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

TOLERANCE = 1e-9  # of epsilon


@dataclass(frozen=True, repr=False)
class PrivacyAudit:
    """Result of `privacy_audit`: a lower bound on epsilon, and the guesses that give it.

    guesses: canaries with a score above the best threshold, guessed to be in the training set
    correct: guesses that are right
    """

    epsilon: float
    delta: float
    confidence: float
    guesses: int
    correct: int

    def __repr__(self) -> str:
        return (
            f"PrivacyAudit(epsilon >= {self.epsilon:.4g} at delta {self.delta:g}, confidence {self.confidence:g}: "
            f"{self.correct:,} of {self.guesses:,} guesses correct. A lower bound, which is often loose by a factor of "
            "3 to 4; a small value is no proof of privacy)"
        )


def privacy_audit(inside: Any, outside: Any, delta: float, confidence: float = 0.95) -> PrivacyAudit:
    """Lower bound on the epsilon of a training run, from scores of canaries.

    Canaries are samples of which each one is put into the training set with probability 1/2, by a coin of its own. All
    of them are scored after the training, for example by the negative loss. For each threshold on the ROC hull the
    canaries with a higher score are guessed to be inside. The bound is the largest epsilon that the number of correct
    guesses rejects. The allowed error, 1 - confidence, is divided by the number of thresholds.

    The bound is loose: expect a third or a quarter of the true epsilon, and less with few canaries. It finds a training
    that is not private at all, but it does not find, for example, noise that is too small by a factor of 2.

    inside: scores of the canaries in the training set, one-dimensional; higher means more likely a member
    outside: scores of the canaries that were left out
    delta: of the (epsilon, delta) claim, in (0, 1)
    confidence: probability that the bound holds, in (0, 1)
    """
    inside_scores = _scores(inside, "inside")
    outside_scores = _scores(outside, "outside")
    for name, value in (("delta", delta), ("confidence", confidence)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise ValueError(f"{name} must be a number in (0, 1); found {value!r}.")
    canaries = len(inside_scores) + len(outside_scores)
    hull = _roc_hull(inside_scores, outside_scores)
    significance = (1 - confidence) / len(hull)
    tail = _binomial_tail()

    bound = 0.0
    best = _Guesses(0, 0)
    for guesses in sorted(hull, key=_precision, reverse=True):
        larger = _rejected_epsilon(guesses, canaries, significance, delta, bound, tail)
        if larger > bound:
            bound = larger
            best = guesses
    return PrivacyAudit(bound, float(delta), float(confidence), best.total, best.correct)


# --- scores and guesses -----------------------------------------------------------------------------------------------


class _Guesses(NamedTuple):
    """Canaries that a threshold guesses to be inside."""

    correct: int
    wrong: int

    @property
    def total(self) -> int:
        return self.correct + self.wrong


def _precision(guesses: _Guesses) -> float:
    return (guesses.correct - math.sqrt(guesses.total)) / max(guesses.total, 1)


def _scores(values: Any, name: str) -> torch.Tensor:
    """Scores as float64 on the CPU."""
    try:
        scores = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as why:
        raise ValueError(
            f"{name} must be a one-dimensional sequence of scores; found {type(values).__name__}."
        ) from why
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(
            f"{name} must be a one-dimensional sequence of at least one score; found shape {tuple(scores.shape)}."
        )
    wrong = int((~scores.isfinite()).sum())
    if wrong:
        raise ValueError(f"{name} must have finite scores; found {wrong} of {len(scores)} that are NaN or infinite.")
    return scores


def _roc_hull(inside: torch.Tensor, outside: torch.Tensor) -> list[_Guesses]:
    """Guesses of the thresholds on the upper convex hull of the ROC curve, from no guess to all canaries."""
    hull: list[_Guesses] = []
    for point in _roc_points(inside, outside):
        while len(hull) >= 2 and not _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _roc_points(inside: torch.Tensor, outside: torch.Tensor) -> Iterator[_Guesses]:
    thresholds = torch.cat([inside, outside]).unique()  # sorted
    correct = len(inside) - torch.searchsorted(inside.sort().values, thresholds)
    wrong = len(outside) - torch.searchsorted(outside.sort().values, thresholds)
    yield _Guesses(0, 0)
    for pair in zip(correct.flip(0).tolist(), wrong.flip(0).tolist(), strict=True):
        yield _Guesses(*pair)


def _is_above(left: _Guesses, middle: _Guesses, right: _Guesses) -> bool:
    """True if `middle` is strictly above the line from `left` to `right` (horizontal: wrong, vertical: correct)."""
    rise = (middle.correct - left.correct) * (right.wrong - middle.wrong)
    return rise > (right.correct - middle.correct) * (middle.wrong - left.wrong)


# --- test of an epsilon -----------------------------------------------------------------------------------------------

Tail = Callable[[int, float], Any]  # (guesses, probability) -> P[at least k correct], for k = 0 ... guesses


def _binomial_tail() -> Tail:
    try:
        numpy = import_module("numpy")
        binomial = import_module("scipy.stats").binom
    except ImportError:
        raise ImportError(
            "sw.privacy_audit needs scipy; found that it is not installed. Install it: pip install "
            "'samplewise[privacy]'."
        ) from None
    return lambda guesses, probability: binomial.sf(numpy.arange(-1, guesses), guesses, probability)


def _p_value(guesses: _Guesses, canaries: int, epsilon: float, delta: float, tail: Tail) -> float:
    """Largest probability of this many correct guesses under (epsilon, delta)-DP.

    With delta = 0 each guess is correct with probability at most e^ε / (1 + e^ε), independent of the others before it.
    Delta can move probability from outcomes with i fewer correct guesses, for any i, at a cost of 1 / i.
    """
    at_least = tail(guesses.total, 1 / (1 + math.exp(-epsilon)))
    pure = at_least[guesses.correct]
    fewer = at_least[: guesses.correct][::-1] - pure  # 1, 2, ... fewer correct guesses
    moved = max((fewer / range(1, guesses.correct + 1)).max(), 0.0) if guesses.correct else 0.0
    return min(float(pure + 2 * canaries * delta * moved), 1.0)


def _rejected_epsilon(
    guesses: _Guesses, canaries: int, significance: float, delta: float, least: float, tail: Tail
) -> float:
    """Largest epsilon above `least` that the guesses reject; `least` if there is none."""

    def is_rejected(epsilon: float) -> bool:
        return _p_value(guesses, canaries, epsilon, delta, tail) < significance

    # A guess is right with probability 1 / (1 + e^-ε): a lower precision cannot reject this epsilon.
    if guesses.correct * (1 + math.exp(-least)) <= guesses.total or not is_rejected(least):
        return least
    high = max(1.0, 2 * least)
    while is_rejected(high):
        least = high
        high *= 2
    while high - least > TOLERANCE:
        middle = (least + high) / 2
        if is_rejected(middle):
            least = middle
        else:
            high = middle
    return least
