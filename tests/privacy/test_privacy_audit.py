import bisect
import functools
import math

import pytest
import scipy.stats
import torch

import samplewise.privacy.accounting as accounting
import samplewise.privacy.audit as audit
from samplewise.privacy.audit import privacy_audit

# CanaryScoreAuditor(inside, outside).epsilon_one_run(1 - confidence, delta) of jax_privacy 2.0.0. Its thresholds depend
# on which canaries are inside, so that its bounds are wrong a little too often.
REFERENCE = [
    # canaries on each side, shift, spread, digits, delta, confidence: epsilon
    ((1000, 2.0, 1.0, None, 1e-5, 0.95), 1.1315216889068813),
    ((500, 6.0, 1.0, None, 1e-5, 0.95), 3.3455896910933016),
    ((2000, 0.7, 0.5, None, 1e-6, 0.9), 0.9317273138443054),
    ((300, 0.0, 1.0, None, 1e-5, 0.95), 0.0),
    ((200, 3.0, 1.0, 0, 1e-5, 0.99), 1.2759997420280904),
    ((50, 30.0, 1.0, None, 1e-5, 0.95), 2.4563745708028315),
    ((1000, 4.0, 1.0, 1, 1e-4, 0.95), 0.6235132056723675),
]


def canary_scores(count, shift, spread, digits):
    """Equidistributed logistic scores, those inside shifted; with `digits` rounded, so that there are ties."""
    golden = (math.sqrt(5) - 1) / 2

    def score(k, offset):
        u = ((k * golden + offset) % 1.0 + 0.5 / count) / (1 + 1 / count)
        value = math.log(u / (1 - u)) * spread
        return value if digits is None else round(value, digits)

    return [score(k, 0.13) + shift for k in range(count)], [score(k, 0.57) for k in range(count)]


@pytest.mark.parametrize(("case", "expected"), REFERENCE)
def test_nearly_as_large_as_that_of_jax_privacy(case, expected):
    *scores, delta, confidence = case
    result = privacy_audit(*canary_scores(*scores), delta, confidence)
    assert result.epsilon >= 0.9 * expected
    assert expected or not result.epsilon
    assert (result.delta, result.confidence) == (delta, confidence)
    assert 0 <= result.correct <= result.guesses <= 2 * scores[0]


# --- confidence -------------------------------------------------------------------------------------------------------


def coins(runs, canaries, generator):
    return torch.rand(runs, canaries, generator=generator) < 0.5


def chosen(share):
    """A chosen number of canaries inside, in place of coins."""

    def draw(runs, canaries, generator):
        return torch.rand(runs, canaries, generator=generator).argsort(1) < share * canaries

    return draw


def randomized_response(epsilon, ties=False):
    """The most that pure differential privacy allows, at every threshold in the upper half."""

    def score(inside, generator):
        true = torch.rand(inside.shape, generator=generator) < 1 / (1 + math.exp(-epsilon))
        level = (inside == true).double()
        return level if ties else level + torch.rand(inside.shape, generator=generator, dtype=torch.float64) / 2

    return score


def laplace(epsilon):
    def score(inside, generator):
        uniform = torch.rand(inside.shape, generator=generator, dtype=torch.float64) - 0.5
        return inside.double() - torch.log1p(-2 * uniform.abs()) * uniform.sign() / epsilon

    return score


def gaussian(noise, digits=None):
    def score(inside, generator):
        scores = inside + noise * torch.randn(inside.shape, generator=generator, dtype=torch.float64)
        return scores if digits is None else scores.round(decimals=digits)

    return score


def with_few_levels(scorer, levels):
    """Scores rounded to a few values, so that most of them are equal to others."""
    return lambda inside, generator: (scorer(inside, generator) * levels).round() / levels


def constant(inside, generator):
    return torch.rand(inside.shape, generator=generator, dtype=torch.float64)


class Rejection:
    """True if `privacy_audit` gives a bound above epsilon, from tables instead of a search for the bound."""

    def __init__(self, epsilon, delta, error=0.05):
        self.epsilon = epsilon
        self.delta = delta
        self.error = error
        self._tail = functools.cache(audit._binomial_tail())
        self._least = {}

    def __call__(self, inside, scores):
        members = int(inside.sum())
        share = max(0.5, members / len(inside) - 0.25 / math.sqrt(len(inside)))
        test = audit._Test(len(inside), share, self.delta, self._tail)
        totals = audit._guess_totals(scores, test, self.error)
        weight = sum(2.0**-k for k in range(len(totals)))
        return any(
            int((inside & (scores >= threshold)).sum()) >= self._least_rejecting(test, total, 2.0**-k / weight)
            for k, (total, threshold) in enumerate(totals)
        )

    def _least_rejecting(self, test, total, weight):
        """Smallest number of correct guesses that rejects; total + 1 if there is none."""
        key = (test.share, total, weight)
        if key not in self._least:

            def rejects(correct):
                return test.p_value(audit._Guesses(total, correct), self.epsilon) < self.error * weight

            self._least[key] = bisect.bisect_left(range(total + 1), True, key=rejects)
        return self._least[key]


def failures(draw, score, epsilon, canaries, runs, delta=1e-5):
    """Number of runs in which the bound is above the true epsilon."""
    generator = torch.Generator().manual_seed(canaries + runs)
    rejection = Rejection(epsilon, delta)
    inside = draw(runs, canaries, generator)
    scores = score(inside, generator)
    wrong = [rejection(*run) for run in zip(inside, scores, strict=True)]
    for k in range(10):  # the tables agree with the function
        bound = privacy_audit(scores[k][inside[k]], scores[k][~inside[k]], delta).epsilon
        assert (bound > epsilon) == wrong[k]
    return sum(wrong)


def tolerated(runs, share=0.05):
    """Number of failures that a method which fails in 5 % of runs exceeds once in 1000 simulations."""
    return int(scipy.stats.binom.isf(1e-3, runs, share))


NOTHING = {  # epsilon 0: scores that do not depend on who is inside
    "1000": (coins, constant, 1000),
    "60": (coins, constant, 60),
    "201": (coins, constant, 201),
    "4000": (coins, constant, 4000),
    "ties, 3 levels": (coins, with_few_levels(constant, 2), 500),
    "ties, 21 levels": (coins, with_few_levels(constant, 20), 1000),
    "as many inside as outside": (chosen(0.5), constant, 1000),
    "a few more inside": (chosen(0.53), constant, 1000),
    "more inside": (chosen(0.7), constant, 1000),
    "almost all inside": (chosen(0.97), constant, 300),
    "more outside": (chosen(0.3), constant, 1000),
    "more inside, ties": (chosen(0.6), with_few_levels(constant, 5), 400),
}


@pytest.mark.sweep(1 / 12)
@pytest.mark.parametrize("name", NOTHING)
def test_confidence_if_nothing_leaks(name):
    draw, score, canaries = NOTHING[name]
    assert failures(draw, score, 0.0, canaries, 2000) <= tolerated(2000)


@pytest.mark.slow
def test_confidence_of_the_function_itself():
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    for _ in range(2000):
        inside = coins(1, 1000, generator)[0]
        scores = torch.rand(1000, generator=generator)
        wrong += privacy_audit(scores[inside], scores[~inside], 1e-5).epsilon > 0
    assert wrong <= tolerated(2000)


MECHANISMS = {
    "randomized response 0.5": (randomized_response(0.5), 0.5, 1000),
    "randomized response 2": (randomized_response(2.0), 2.0, 400),
    "randomized response 2, ties": (randomized_response(2.0, ties=True), 2.0, 1000),
    "randomized response 5": (randomized_response(5.0), 5.0, 1000),
    "Laplace 1": (laplace(1.0), 1.0, 1000),
    "Laplace 3, 100 canaries": (laplace(3.0), 3.0, 100),
    "Laplace 1, ties": (with_few_levels(laplace(1.0), 1), 1.0, 1000),
}


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("name", MECHANISMS)
def test_confidence_with_a_known_epsilon(name):
    score, epsilon, canaries = MECHANISMS[name]
    assert failures(coins, score, epsilon, canaries, 2000) <= tolerated(2000)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_the_bound_approaches_the_epsilon_of_randomized_response(epsilon):
    """The bound is nearly tight for the worst mechanism, so it is not valid because it is small."""
    generator = torch.Generator().manual_seed(0)
    inside = coins(1, 20_000, generator)[0]
    scores = randomized_response(epsilon)(inside, generator)
    assert 0.85 * epsilon < privacy_audit(scores[inside], scores[~inside], 1e-9).epsilon <= epsilon


def test_the_thresholds_do_not_depend_on_who_is_inside():
    """Of the same scores, other canaries are inside: the guesses are the same ones."""
    scores = torch.linspace(0, 1, 101, dtype=torch.float64).repeat(4)
    generator = torch.Generator().manual_seed(0)
    test = audit._Test(404, 0.5, 1e-5, audit._binomial_tail())
    totals = audit._guess_totals(scores, test, 0.05)
    for _ in range(5):
        assert audit._guess_totals(scores[torch.randperm(404, generator=generator)], test, 0.05) == totals
    assert [total for total, _ in totals] == [184, 92, 48, 24, 12] and all(total % 4 == 0 for total, _ in totals)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_lists_arrays_and_tensors_give_the_same_bound():
    inside, outside = canary_scores(200, 3.0, 1.0, None)
    expected = privacy_audit(inside, outside, 1e-5)
    tensors = [torch.tensor(scores, dtype=torch.float64, requires_grad=True) for scores in (inside, outside)]
    assert privacy_audit(*tensors, 1e-5) == expected
    assert privacy_audit(*(t.detach().numpy() for t in tensors), 1e-5) == expected


def test_the_order_of_scores_and_monotone_transforms_do_not_matter():
    inside, outside = canary_scores(200, 3.0, 1.0, None)
    expected = privacy_audit(inside, outside, 1e-5)
    assert privacy_audit(inside[::-1], sorted(outside), 1e-5) == expected
    assert privacy_audit([math.exp(x) for x in inside], [math.exp(x) for x in outside], 1e-5) == expected


def test_more_confidence_and_more_delta_give_a_smaller_bound():
    scores = canary_scores(500, 4.0, 1.0, None)
    bounds = [privacy_audit(*scores, delta, c).epsilon for delta, c in ((1e-6, 0.9), (1e-5, 0.95), (2e-5, 0.99))]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] > 0


def test_swapped_or_equal_scores_give_no_bound():
    inside, outside = canary_scores(200, 3.0, 1.0, None)
    assert privacy_audit(outside, inside, 1e-5).epsilon == 0
    assert privacy_audit([1.0] * 50, [1.0] * 60, 1e-5).epsilon == 0


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_not_above_the_true_epsilon_of_a_gaussian_mechanism(noise):
    """Each canary has a coordinate of its own in one release of the Gaussian mechanism."""
    true = accounting.epsilon(accounting.Releases(noise, 1.0, 1), 1e-5)
    for digits in (None, 1):
        assert failures(coins, gaussian(noise, digits), true, 500, 500) <= tolerated(500)
    generator = torch.Generator().manual_seed(0)
    inside = coins(21, 500, generator)
    scores = gaussian(noise)(inside, generator)
    bounds = [privacy_audit(s[i], s[~i], 1e-5).epsilon for i, s in zip(inside, scores, strict=True)]
    assert max(bounds) > 0
    # Loose: the factor of 3 to 4 is part of the message.
    assert sorted(bounds)[10] < true / 2


def test_finds_a_mechanism_without_noise():
    result = privacy_audit(torch.ones(1000), torch.zeros(1000), 1e-5)
    assert result.epsilon > 5
    assert (result.guesses, result.correct) == (1000, 1000)


def test_repr_says_that_the_bound_is_loose():
    text = repr(privacy_audit(*canary_scores(200, 3.0, 1.0, 0), 1e-5, 0.99))
    excluded = "PrivacyAudit: at delta 1e-05, every epsilon below 1.329 is excluded with 99 % confidence"
    assert text.startswith(f"{excluded} (75 of 81 guesses correct).\n")
    nothing = repr(privacy_audit([0.0, 1.0], [0.0, 1.0], 1e-5))
    assert nothing.startswith("PrivacyAudit: at delta 1e-05, no epsilon is excluded with 95 % confidence")
    assert "lower bound" in text and "factor of 3 to 4" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1.0], 1e-5), r"inside must be .* at least one score; found shape \(0,\)\."),
        (([1.0], torch.zeros(2, 2), 1e-5), r"outside must be a one-dimensional .*; found shape \(2, 2\)\."),
        (([1.0], 3.0, 1e-5), r"outside must be a one-dimensional .*; found shape \(\)\."),
        (([1.0, math.nan], [0.0], 1e-5), r"inside must have finite scores; found 1 of 2"),
        (([1.0], [-math.inf], 1e-5), r"outside must have finite scores; found 1 of 1"),
        ((["a"], [0.0], 1e-5), r"inside must be a one-dimensional sequence of scores; found list\."),
        (([1.0], None, 1e-5), r"outside must be a one-dimensional sequence of scores; found NoneType\."),
        (([1.0], [0.0], 0.0), r"delta must be a number in \(0, 1\); found 0\.0\."),
        (([1.0], [0.0], math.nan), r"delta must be a number in \(0, 1\); found nan\."),
        (([1.0], [0.0], 1e-5, 1.0), r"confidence must be a number in \(0, 1\); found 1\.0\."),
        (([1.0], [0.0], 1e-5, "95"), r"confidence must be a number in \(0, 1\); found '95'\."),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        privacy_audit(*arguments)
