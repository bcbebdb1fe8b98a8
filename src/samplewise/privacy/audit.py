"""Lower bound on epsilon from the scores of canaries in one training run.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", 2023, https://arxiv.org/abs/2305.08846.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        below = math.floor(self.epsilon * 1e3) / 1e3  # rounded down: what is claimed to be excluded is excluded
        excluded = f"every epsilon below {below:g} is excluded" if below else "no epsilon is excluded"
        return (
            f"PrivacyAudit: at delta {self.delta:g}, {excluded} with {100 * self.confidence:g} % confidence "
            f"({self.correct:,} of {self.guesses:,} guesses correct).\n"
            "A lower bound, often loose by a factor of 3 to 4: a small value is no proof of privacy."
        )


def privacy_audit(
    inside: Sequence[float] | torch.Tensor,
    outside: Sequence[float] | torch.Tensor,
    delta: float,
    confidence: float = 0.95,
) -> PrivacyAudit:
    """Lower bound on the epsilon of a training run, from scores of canaries.

    Canaries are samples of which each one is put into the training set with probability 1/2, by a coin of its own. All
    of them are scored after the training, for example by the negative loss. The canaries with the highest scores are
    guessed to be inside, and the bound is the largest epsilon that the number of correct guesses rejects. Several
    numbers of guesses are tried: a little less than half of the canaries, half as many, and so on. They do not depend
    on which canaries are inside; the allowed error, 1 - confidence, is divided among them.

    The bound is loose: expect a third or a quarter of the true epsilon, and less with few canaries. It finds a training
    run that is not private at all, but it does not find, for example, noise that is too small by a factor of 2.

    inside: scores of the canaries in the training set, one-dimensional; higher means more likely a member. If there
        are more of them than the coins explain, their share replaces the probability 1/2
    outside: scores of the canaries that were left out
    delta: of the (epsilon, delta) claim, in (0, 1)
    confidence: probability that the bound holds, in (0, 1)
    """
    inside_scores = _scores(inside, "inside")
    outside_scores = _scores(outside, "outside")
    for name, value in (("delta", delta), ("confidence", confidence)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise ValueError(f"{name} must be a number in (0, 1); found {value!r}.")
    members = len(inside_scores)
    canaries = members + len(outside_scores)
    # A chosen number of members in place of coins: guesses at random are right with the share of members. The share is
    # reduced by half a standard deviation of coins, which costs little confidence there and saves power with coins.
    share = max(0.5, members / canaries - 0.25 / math.sqrt(canaries))
    test = _Test(canaries, share, delta, _binomial_tail())

    bound = 0.0
    best = _Guesses(0, 0)
    totals = _guess_totals(torch.cat([inside_scores, outside_scores]), test, 1 - confidence)
    for rank, (total, threshold) in enumerate(totals):
        guesses = _Guesses(total, int((inside_scores >= threshold).sum()))
        error = (1 - confidence) * 2.0**-rank / (2 - 2.0 ** (1 - len(totals)))
        larger = test.rejected_epsilon(guesses, error, bound)
        if larger > bound:
            bound = larger
            best = guesses
    return PrivacyAudit(bound, float(delta), float(confidence), best.total, best.correct)


# --- scores and guesses -----------------------------------------------------------------------------------------------


class _Guesses(NamedTuple):
    """Canaries that a threshold guesses to be inside."""

    total: int
    correct: int


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


def _guess_totals(scores: torch.Tensor, test: _Test, error: float) -> list[tuple[int, float]]:
    """Numbers of guesses to try, in descending order, with the lowest score of each.

    They depend on the scores of all canaries only: numbers chosen by which of them are inside would void the
    confidence. A group of equal scores is never divided.

    The first number is two standard deviations below the expected number of canaries inside, so that all guesses can be
    right. Of the following, each half as large, those are left out that could not reject an epsilon of 0.
    """
    ordered = scores.sort(descending=True).values
    totals: dict[int, float] = {}
    count = round(len(scores) / 2 - math.sqrt(len(scores)))
    while count >= 1:
        threshold = ordered[count - 1].item()
        total = int((scores >= threshold).sum())
        if total < len(scores) and test.p_value(_Guesses(total, total), 0.0) < error * 2.0 ** -len(totals):
            totals.setdefault(total, threshold)
        count //= 2
    return list(totals.items())


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


@dataclass(frozen=True)
class _Test:
    """Test of the hypothesis that a training run is (epsilon, delta)-differentially private.

    share: probability of a canary to be inside
    """

    canaries: int
    share: float
    delta: float
    tail: Tail

    def precision(self, epsilon: float) -> float:
        """Largest probability of a guess to be correct, with delta = 0, whatever the guesses before it were."""
        return self.share / (self.share + (1 - self.share) * math.exp(-epsilon))

    def p_value(self, guesses: _Guesses, epsilon: float) -> float:
        """Largest probability of this many correct guesses.

        Delta can move probability from outcomes with i fewer correct guesses, for any i, at a cost of 1 / i.
        """
        at_least = self.tail(guesses.total, self.precision(epsilon))
        pure = at_least[guesses.correct]
        fewer = at_least[: guesses.correct][::-1] - pure  # 1, 2, ... fewer correct guesses
        moved = max((fewer / range(1, guesses.correct + 1)).max(), 0.0) if guesses.correct else 0.0
        return min(float(pure + 2 * self.canaries * self.delta * moved), 1.0)

    def rejected_epsilon(self, guesses: _Guesses, error: float, least: float) -> float:
        """Largest epsilon above `least` that the guesses reject; `least` if there is none."""

        def is_rejected(epsilon: float) -> bool:
            return self.p_value(guesses, epsilon) < error

        if guesses.correct <= guesses.total * self.precision(least) or not is_rejected(least):
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
