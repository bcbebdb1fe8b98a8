"""Six mutants of private training, each killed by the check that a normal test makes.

no clip                       test_update_identity, test_leaving_out_a_sample
noise / √2                    test_update_identity, test_the_distribution_of_updates
noise / number of ranks       test_one_noise_per_update of parallel/test_private_ranks.py, which has this mutant
division by the actual count  test_update_identity
shuffling, not Poisson        test_update_identity, test_the_distribution_of_draws
noise reused                  test_update_identity, test_the_distribution_of_updates
"""

import math
from dataclasses import replace

import pytest
import torch
from private_runs import SAMPLES, assert_same, by_hand, make, plan, train
from test_sensitivity import CHAINS, assert_bounded

from samplewise.privacy import private_update
from samplewise.privacy.private_update import PrivateUpdate
from samplewise.privacy.rng import stream
from samplewise.privacy.sampling import PoissonSampler
from samplewise.step.apply import UpdateApplier

pytest.importorskip("dp_accounting")


# ------------------------------------------------------------------------------------------------------- checks


def identity():
    """Parameters equal those by hand."""
    privacy = plan()
    model, loader, step = make(privacy, microbatch=3)
    train(step, loader)
    assert_same(model, by_hand(privacy))


def bounded():
    """One sample changes the sum by at most the sensitivity."""
    assert_bounded([[7.0] * 5, [0.1] * 5], {0}, *CHAINS["flat"])


def noise_of_updates(updates=40):
    """Sums of updates without samples, in units of the noise that they must have: (updates, elements)."""
    model = torch.nn.Linear(50, 20).double()
    privacy = plan(sample_rate=1e-9, divide_by=1.0, updates=updates)
    _, loader, step = make(privacy, model=model, lr=1.0)
    found = []
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for batch, _ in zip(loader, range(updates), strict=False):
        step(batch)
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        found.append((before - after) / (privacy.noise_multiplier * privacy.clip.max_norm))
        before = after
    return torch.stack(found)


def distribution_of_updates():
    """Standard deviation 1 within 4.5 standard errors; updates are not correlated."""
    noise = noise_of_updates()
    assert abs(noise.std().item() - 1) < 4.5 / math.sqrt(2 * noise.numel())
    correlations = torch.corrcoef(noise) - torch.eye(len(noise))
    assert correlations.abs().max() < 5.5 / math.sqrt(noise.shape[1])


def distribution_of_draws(draws=2000):
    """Sizes have the variance of a binomial distribution."""
    privacy = plan(updates=draws)
    sampler = privacy.loader(list(range(SAMPLES))).batch_sampler
    sizes = torch.tensor([len(sampler.draw_units(t, 0)) for t in range(draws)], dtype=torch.float64)
    variance = SAMPLES * privacy.sample_rate * (1 - privacy.sample_rate)
    assert abs(sizes.mean() - SAMPLES * privacy.sample_rate) < 4.5 * math.sqrt(variance / draws)
    assert abs(sizes.var() / variance - 1) < 4.5 * math.sqrt(2.5 / draws)


def test_the_distribution_of_updates():
    distribution_of_updates()


def test_the_distribution_of_draws():
    distribution_of_draws()


# ------------------------------------------------------------------------------------------------------ mutants


def no_clip(patch):
    exact = PrivateUpdate._clip

    def mutant(self):
        return replace(exact(self), coefficients=lambda stats: torch.ones_like(stats.losses))

    patch.setattr(PrivateUpdate, "_clip", mutant)


def less_noise(patch):
    exact = PrivateUpdate._noise_std
    patch.setattr(PrivateUpdate, "_noise_std", lambda self: exact(self) / math.sqrt(2))


def actual_count(patch):
    exact = UpdateApplier.divide

    def mutant(self, window):
        divisor = self.config.policy.plan._divisor
        before = divisor.value
        divisor.value = max(1, window.samples)
        exact(self, window)
        divisor.value = before

    patch.setattr(UpdateApplier, "divide", mutant)


def shuffling(patch):
    def mutant(self, number, branch):
        size = round(self.units * self.sample_rate)
        per_pass = self.units // size
        order = torch.randperm(self.units, generator=torch.Generator().manual_seed(number // per_pass))
        return order[number % per_pass * size :][:size].sort().values

    patch.setattr(PoissonSampler, "draw_units", mutant)


def reused_noise(patch):
    def mutant(secret, purpose, branch, number, secure=False):
        return stream(secret, purpose, branch, 0, secure)

    patch.setattr(private_update, "stream", mutant)


MUTANTS = [
    (no_clip, identity),
    (no_clip, bounded),
    (less_noise, identity),
    (less_noise, distribution_of_updates),
    (actual_count, identity),
    (shuffling, identity),
    (shuffling, distribution_of_draws),
    (reused_noise, identity),
    (reused_noise, distribution_of_updates),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=[f"{m.__name__}-{c.__name__}" for m, c in MUTANTS])
def test_mutants_are_killed(mutant, check, monkeypatch):
    """noise / number of ranks is in parallel/test_private_ranks.py."""
    check()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
