import math

import pytest
import torch

import samplewise.privacy.accounting as accounting
from samplewise.privacy.audit import privacy_audit

# CanaryScoreAuditor(inside, outside).epsilon_one_run(1 - confidence, delta) of jax_privacy 2.0.0
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
def test_equal_to_jax_privacy(case, expected):
    *scores, delta, confidence = case
    audit = privacy_audit(*canary_scores(*scores), delta, confidence)
    assert audit.epsilon == pytest.approx(expected, abs=1e-6)
    assert (audit.delta, audit.confidence) == (delta, confidence)
    assert 0 <= audit.correct <= audit.guesses <= 2 * scores[0]


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


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_not_above_the_true_epsilon_of_a_gaussian_mechanism(noise):
    """Each canary has a coordinate of its own in one release of the Gaussian mechanism."""
    generator = torch.Generator().manual_seed(0)
    true = accounting.epsilon(accounting.Releases(noise, 1.0, 1), 1e-5)
    bounds = []
    for _ in range(200):
        is_inside = torch.rand(500, generator=generator) < 0.5
        scores = is_inside + noise * torch.randn(500, generator=generator, dtype=torch.float64)
        bounds.append(privacy_audit(scores[is_inside], scores[~is_inside], 1e-5).epsilon)
    assert sum(bound > true for bound in bounds) <= 17  # P[Binomial(200, 0.05) > 17] = 1 %
    assert max(bounds) > 0
    # Loose: the factor of 3 to 4 is part of the message.
    assert sorted(bounds)[100] < true / 2


def test_finds_a_mechanism_without_noise():
    audit = privacy_audit(torch.ones(1000), torch.zeros(1000), 1e-5)
    assert audit.epsilon > 5
    assert (audit.guesses, audit.correct) == (1000, 1000)


def test_repr_says_that_the_bound_is_loose():
    text = repr(privacy_audit(*canary_scores(200, 3.0, 1.0, 0), 1e-5, 0.99))
    assert text.startswith("PrivacyAudit(epsilon >= 1.276 at delta 1e-05, confidence 0.99: 75 of 81 guesses correct.")
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
