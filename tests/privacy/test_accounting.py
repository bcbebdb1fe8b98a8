import itertools
import logging
import math
import random
import re
import sys

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from samplewise.privacy import accounting
from samplewise.privacy.accounting import Releases, calibrate, curve, delta, epsilon

FASHION = 2048 / 60_000, 1172  # rate, updates
DELTAS = 1e-5, 1e-7
POINTS = [  # 108, each with two deltas
    *itertools.product((0.7, 0.85, 1.0, 1.3, 1.7, 2.15, 4.0, 10.0), (0.001, 0.01, 2048 / 60_000, 0.2), (1, 100, 1172)),
    *itertools.product((2.15, 4.0, 10.0, 30.0), (1.0,), (1, 100, 1172)),
]
CHEAP = [(4.0, 0.01, 100), (2.15, *FASHION), (10.0, 0.2, 1172), (10.0, 1.0, 100)]  # less than a second by PLD


@pytest.fixture(autouse=True)
def _quiet_reference():
    """Discard what dp-accounting logs when the tests call it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def direct(accountant, noise, rate, updates):
    """Accountant of dp-accounting, without samplewise."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    return accountant(neighboring_relation=relation).compose(dp_accounting.SelfComposedDpEvent(event, updates))


# --- epsilon and delta ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "rate", "updates", "rdp", "pld"),
    [(2.15, *FASHION, 2.605477, 2.389521), (1.0, 0.01, 1000, 2.101367, 1.828244), (10.0, 1.0, 100, 4.728507, 4.377179)],
)
def test_published_values(noise, rate, updates, rdp, pld):
    releases = Releases(noise, rate, updates)
    assert epsilon(releases, 1e-5, "rdp") == pytest.approx(rdp, abs=1e-6)
    assert epsilon(releases, 1e-5) == pytest.approx(pld, abs=1e-6)


@pytest.mark.sweep(1 / 12)
@pytest.mark.parametrize("point", POINTS)
def test_rdp_equals_dp_accounting(point):
    expected = direct(RdpAccountant, *point)
    composed = accounting._composed(Releases(*point), "rdp")
    assert list(composed.orders) == list(expected.orders)
    assert composed.rdp == pytest.approx(expected.rdp, rel=1e-9)
    for d in DELTAS:
        assert epsilon(Releases(*point), d, "rdp") == pytest.approx(expected.get_epsilon(d), abs=1e-6)


@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p in CHEAP else pytest.mark.slow) for p in POINTS])
def test_pld_equals_dp_accounting(point):
    expected = direct(PLDAccountant, *point)
    for d in DELTAS:
        assert epsilon(Releases(*point), d) == pytest.approx(expected.get_epsilon(d), abs=1e-4)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_is_the_inverse_of_epsilon(accountant):
    releases = Releases(1.5, 0.02, 200)
    assert delta(releases, epsilon(releases, 1e-5, accountant), accountant) == pytest.approx(1e-5, rel=1e-3)


def test_no_updates_spend_nothing():
    assert epsilon(Releases(1.0, 0.1, 0), 1e-5) == 0
    assert delta(Releases(1.0, 0.1, 0), 0.0) == 0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_noise_has_no_privacy(accountant):
    assert epsilon(Releases(0.0, 0.1, 1), 1e-5, accountant) == math.inf
    assert delta(Releases(0.0, 0.1, 1), 1.0, accountant) == 1


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e3, 1e5, 1e7])
def test_much_noise_gives_no_negative_values(accountant, noise):
    releases = Releases(noise, 0.001, 100)
    assert all(0 <= value < 0.02 for value in curve(releases, accountant).values())
    assert all(0 <= delta(releases, e, accountant) < 1e-3 for e in (0.0, 1e-3, 0.1, 10.0))


def test_rdp_ignores_divergences_that_rounding_made_negative():
    releases = Releases(1e8, 0.3, 1)
    assert direct(RdpAccountant, 1e8, 0.3, 1).get_epsilon(1e-12) == 0
    assert epsilon(releases, 1e-12, "rdp") > 0


def test_epsilon_falls_with_noise_and_grows_with_updates_and_rate():
    base = epsilon(Releases(2.0, 0.1, 50), 1e-5)
    assert epsilon(Releases(2.1, 0.1, 50), 1e-5) < base
    assert epsilon(Releases(2.0, 0.1, 51), 1e-5) > base
    assert epsilon(Releases(2.0, 0.11, 50), 1e-5) > base


@pytest.mark.slow
def test_huge_epsilon_uses_a_coarser_grid():
    """With a grid of 1e-4 the distribution would have 10^9 entries."""
    releases = Releases(0.1, 1.0, 1000)
    assert accounting._pld_grid(releases) > 1e-2
    pld, rdp = (epsilon(releases, 1e-5, accountant) for accountant in ("pld", "rdp"))
    assert 0.9 * rdp < pld < rdp


def test_nothing_is_printed(capfd):
    epsilon(Releases(5.0, 0.5, 3), 1e-5, "rdp")  # dp-accounting logs nine lines
    assert capfd.readouterr() == ("", "")


def test_curve():
    releases = Releases(2.15, *FASHION)
    values = curve(releases)
    assert list(values) == [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]
    assert values[1e-5] == epsilon(releases, 1e-5)
    assert list(values.values()) == sorted(values.values(), reverse=True)
    assert list(curve(releases, "rdp", [1e-4, 1e-6])) == [1e-4, 1e-6]


# --- calibration ------------------------------------------------------------------------------------------------------


def assert_calibrated(target, delta, rate, updates, accountant, **truncation):
    noise = calibrate(target, delta, rate, updates, accountant, **truncation)
    assert epsilon(Releases(noise, rate, updates, **truncation), delta, accountant) <= target
    assert epsilon(Releases(0.999 * noise, rate, updates, **truncation), delta, accountant) > target
    return noise


@pytest.mark.parametrize(("accountant", "expected", "precision"), [("pld", 1.8085, 4e-4), ("rdp", 1.9287, 1e-4)])
def test_calibration_of_the_published_setting(accountant, expected, precision):
    """40 epochs of 60,000 samples in batches of 2048."""
    assert assert_calibrated(3.0, 1e-5, *FASHION, accountant) == pytest.approx(expected, abs=precision)


def random_point(seed, least_rate, most_epsilon):
    generator = random.Random(seed)
    target = math.exp(generator.uniform(math.log(0.05), math.log(most_epsilon)))
    rate = generator.choice([1.0, math.exp(generator.uniform(math.log(least_rate), 0))])
    updates = generator.choice([1, 2, 93, generator.randrange(1, 20_000)])
    return target, 10 ** generator.uniform(-9, -3), rate, updates


@pytest.mark.sweep(1 / 40)
@pytest.mark.parametrize("seed", range(80))
def test_rdp_calibration_keeps_the_target(seed):
    assert_calibrated(*random_point(seed, 1e-4, 50.0), "rdp")


@pytest.mark.sweep(1 / 24)
@pytest.mark.parametrize("seed", range(24))
def test_pld_calibration_keeps_the_target(seed):
    assert_calibrated(*random_point(seed, 0.01, 8.0), "pld")


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("target", "rate", "updates"),
    [
        (3.0, 1.0, 1),
        pytest.param(3.0, 1.0, 7, marks=pytest.mark.slow),
        (0.2, 0.1, 1),
        pytest.param(1.0, 0.3, 2, marks=pytest.mark.slow),
        pytest.param(3.0, 0.1, 1, marks=pytest.mark.slow),
        pytest.param(3.0, 1 / 93, 279, marks=pytest.mark.slow),
    ],
)
def test_calibration_of_few_updates_and_full_batches(target, rate, updates, accountant):
    assert_calibrated(target, 1e-5, rate, updates, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_where_rdp_jumps_to_zero(accountant):
    """Below 0.0035 the RDP accountant with its default orders is 0 or more than 0.0035."""
    assert_calibrated(0.001, 1e-5, 0.1, 10, accountant)


def test_pld_calibration_needs_few_evaluations(monkeypatch):
    evaluated = set()
    compose = accounting._composed

    def counted(releases, accountant, *grid):
        if accountant == "pld" and grid == (accounting.PLD_GRID,):
            evaluated.add(releases)
        return compose(releases, accountant, *grid)

    monkeypatch.setattr(accounting, "_composed", counted)
    calibrate(1.1, 1e-5, *FASHION)
    assert 3 <= len(evaluated) <= 6


# --- truncated Poisson sampling ---------------------------------------------------------------------------------------


def test_truncated_poisson_equals_dp_accounting():
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 120, 6.0)
    expected = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, 50)).get_epsilon(1e-5)
    assert epsilon(Releases(6.0, 0.1, 50, max_batch=120, dataset_size=1000), 1e-5) == pytest.approx(expected, abs=1e-9)


def test_truncation_costs_privacy_unless_it_hardly_happens():
    plain = epsilon(Releases(6.0, 0.1, 50), 1e-5)
    often, rarely, never = (
        epsilon(Releases(6.0, 0.1, 50, max_batch=size, dataset_size=1000), 1e-5) for size in (100, 180, 1000)
    )
    assert often > 1.5 * plain
    assert plain - 1e-8 < rarely < plain + 1e-3
    assert never == pytest.approx(plain, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [(5, 150), (5, 120), (50, 100)])
def test_truncated_calibration(setting):
    updates, max_batch = setting
    noise = assert_calibrated(0.2, 1e-5, 0.1, updates, "pld", max_batch=max_batch, dataset_size=1000)
    assert noise > calibrate(0.2, 1e-5, 0.1, updates)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, r"epsilon must be a finite number > 0; found 0\."),
        ({"epsilon": -1.0}, r"epsilon must be a finite number > 0; found -1\.0\."),
        ({"epsilon": math.nan}, r"epsilon must be a finite number > 0; found nan\."),
        ({"epsilon": math.inf}, r"epsilon must be a finite number > 0; found inf\."),
        ({"epsilon": "3"}, r"epsilon must be a finite number > 0; found '3'\."),
        ({"delta": 0.0}, r"delta must be a number in \(0, 1\); found 0\.0\."),
        ({"delta": 1}, r"delta must be a number in \(0, 1\); found 1\."),
        ({"sample_rate": 0.0}, r"sample_rate must be a number in \(0, 1\]; found 0\.0\."),
        ({"sample_rate": 1.5}, r"sample_rate must be a number in \(0, 1\]; found 1\.5\."),
        ({"updates": 0}, r"updates must be a positive integer; found 0\."),
        ({"updates": 2.5}, r"updates must be a positive integer; found 2\.5\."),
        ({"accountant": "prv"}, r"accountant must be 'pld' or 'rdp'; found 'prv'\."),
        ({"max_batch": 20}, r"dataset_size must be given with max_batch; found None\."),
        ({"max_batch": 0, "dataset_size": 100}, r"max_batch must be a positive integer; found 0\."),
        (
            {"max_batch": 20, "dataset_size": 100, "accountant": "rdp"},
            r"accountant must be 'pld' with max_batch, .*'rdp'\.",
        ),
        ({"epsilon": 1e6}, r"epsilon must be one that .*; found 1e\+06, which is too large"),
        ({"epsilon": 1e-12, "delta": 1e-12}, r"epsilon must be one that .*; found 1e-12, which is too small"),
    ],
)
def test_calibration_refuses(change, message):
    arguments = dict(epsilon=1.0, delta=1e-5, sample_rate=0.1, updates=10, accountant="rdp")
    if "max_batch" in change:
        arguments["accountant"] = "pld"
    with pytest.raises(ValueError, match=message):
        calibrate(**arguments | change)


def test_pld_refuses_a_delta_below_its_precision():
    with pytest.raises(ValueError, match=r"epsilon must be one that .*too small for this delta"):
        calibrate(1.0, 1e-17, 0.1, 10)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, "1", None])
def test_releases_refuse_noise_that_is_no_finite_number(noise):
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number >= 0; found"):
        Releases(noise, 0.1, 10)


def test_queries_refuse_nonsense():
    releases = Releases(1.0, 0.1, 10)
    with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\); found -1"):
        epsilon(releases, -1)
    with pytest.raises(ValueError, match="epsilon must be a finite number >= 0; found -1"):
        delta(releases, -1)
    with pytest.raises(ValueError, match="accountant must be 'pld' or 'rdp'; found 'gdp'"):
        epsilon(releases, 1e-5, "gdp")
    with pytest.raises(ValueError, match="updates must be an integer >= 0; found -1"):
        Releases(1.0, 0.1, -1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError) as missing:
        epsilon(Releases(1.2345, 0.1, 10), 1e-5)
    assert str(missing.value) == (
        "sw.Privacy needs dp-accounting; found that it is not installed. Install it: pip install 'samplewise[privacy]'."
    )


# --- extreme settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [5e-324, 1e-300, 1e-9, 1e-7, 1e-4, 1e-3])
def test_hardly_any_noise_gives_an_infinite_epsilon(accountant, noise):
    for rate, updates in ((0.01, 1000), (1.0, 1000), (1.0, 10**9)):
        releases = Releases(noise, rate, updates)
        assert epsilon(releases, 1e-5, accountant) == math.inf
        assert accounting.delta(releases, 3.0, accountant) == 1.0
    assert epsilon(Releases(noise, 0.01, 0), 1e-5, accountant) == 0.0


def test_hardly_any_noise_with_a_bound_on_the_batch():
    assert epsilon(Releases(1e-9, 0.05, 10, max_batch=10, dataset_size=100), 1e-5) == math.inf


@pytest.mark.parametrize("noise", [1e7, 1e30, 1e100])
def test_much_noise(noise):
    assert epsilon(Releases(noise, 0.01, 1000), 1e-5) == 0.0  # delta alone covers it


@pytest.mark.parametrize("noise", [1.1e100, 1e200, 1.7e308])
def test_too_much_noise_is_refused(noise):
    with pytest.raises(
        ValueError, match=rf"noise_multiplier must be at most 1e\+100; found {re.escape(repr(noise))}\."
    ):
        Releases(noise, 0.01, 1000)


@pytest.mark.parametrize("updates", [10**7 + 1, 10**12, 10**18])
def test_more_updates_than_the_pld_accountant_can_compose(updates):
    message = r"updates must be at most 10,000,000 with the accountant 'pld', .* Use the accountant 'rdp'\."
    with pytest.raises(ValueError, match=message):
        epsilon(Releases(1.0, 1e-6, updates), 1e-5)
    with pytest.raises(ValueError, match=message):
        calibrate(3.0, 1e-5, 1e-6, updates)
    assert epsilon(Releases(1.0, 1e-9, updates), 1e-5, "rdp") < math.inf
