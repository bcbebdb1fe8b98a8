"""Weights of a private step depend on their own sample alone: not on others beside it, and not on earlier ones."""

import functools
import os
import random

import numpy as np
import pytest
import torch
from private_runs import make, plan, train

import samplewise as sw
from samplewise.core import batches
from samplewise.errors import PrivacyError

pytest.importorskip("dp_accounting")

MUST = r"the weight of a sample must depend on this sample alone with privacy=; found that weight\(.*\) "
ALONE = f"{MUST}gives a sample another weight if other samples are left out"
BEFORE = f"{MUST}gives a sample another weight after it was called before"
AGAIN = f"{MUST}gives other weights if it is called again with the same values"
PARTS = f"{MUST}fails for a part of the samples"
DIGITS = f"{MUST}gives a sample another weight if the last digits of its loss or norm change"


class RunningMean:
    """Weights relative to a running mean of the losses."""

    def __init__(self, momentum=0.9):
        self.mean = 1.0
        self.momentum = momentum

    def __call__(self, losses):
        self.mean = self.momentum * self.mean + (1 - self.momentum) * losses.mean().item()
        return losses / self.mean


class FirstMean:
    """Weights relative to the mean of the first call."""

    def __init__(self):
        self.mean = None

    def __call__(self, losses):
        if self.mean is None:
            self.mean = losses.mean()
        return losses / self.mean


class TensorMemory(RunningMean):
    def __init__(self):
        self.mean = torch.ones((), dtype=torch.float64)

    def __call__(self, losses):
        self.mean.mul_(0.9).add_(0.1 * losses.mean())
        return losses / self.mean


def list_memory():
    seen = []

    def weights(losses):
        seen.extend(losses.tolist())
        return losses / max(seen)

    return weights


def largest_so_far():
    largest = 0.0

    def weights(norms):
        nonlocal largest
        largest = max(largest, norms.max().item())
        return norms / largest

    return weights


def counting():
    calls = [0]

    def weights(losses):
        calls[0] += 1
        return torch.ones_like(losses) / calls[0]

    return weights


def random_mixing(losses):
    return losses[torch.randperm(len(losses))] + torch.rand(len(losses), dtype=losses.dtype)


def random_mean(norms):
    return norms * torch.rand(1, dtype=norms.dtype) / norms.mean()


def numpy_mixing(losses):
    return losses.roll(int(np.random.randint(1, 5))) + 0.5


def python_mixing(losses):
    return losses * losses[random.randrange(len(losses))]


def with_generator():
    generator = torch.Generator().manual_seed(0)

    def weights(losses):
        return losses.mean() * torch.rand(len(losses), generator=generator, dtype=losses.dtype)

    return weights


def unseeded(losses):
    return losses * (1 + int.from_bytes(os.urandom(4), "little"))


def number_of_samples(losses):
    return torch.ones_like(losses) / len(losses)


def of_several(losses):
    return losses / losses[4]


def cached_memory():
    @functools.cache
    def memory():
        return []

    def weights(losses):
        memory().append(losses.mean())
        return losses / memory()[0]

    return weights


def through_a_generator():
    def means():
        total = torch.zeros((), dtype=torch.float64)
        while True:
            total = total + (yield total + 1).mean()

    memory = means()
    next(memory)
    return lambda losses: losses / memory.send(losses)


class ModuleMemory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, losses):
        self.mean.mul_(0.9).add_(0.1 * losses.mean())
        return losses / self.mean


def default_argument():
    def weights(losses, memory={}):  # noqa: B006
        memory["sum"] = memory.get("sum", 0.0) + losses.sum().item()
        return losses / memory["sum"]

    return weights


def large_losses_clamped(losses):
    """Other samples matter to the largest ones only."""
    return losses.clamp(max=losses.quantile(0.9))


def first_of_a_call(losses):
    weights = torch.ones_like(losses)
    weights[0] = 2
    return weights


def from_the_fourth_on(losses):
    return torch.cat([losses[:3], losses[:-3]])


REFUSED = {
    "memory in a cache": (cached_memory, f"{AGAIN}|{ALONE}"),
    "memory in a generator": (through_a_generator, f"{AGAIN}|{ALONE}"),
    "memory in a module": (lambda: ModuleMemory().forward, f"{ALONE}|{BEFORE}"),
    "memory in a default argument": (default_argument, f"{ALONE}|{BEFORE}"),
    "running mean": (RunningMean, f"{ALONE}|{BEFORE}"),
    "slow running mean": (lambda: RunningMean(0.9999), f"{ALONE}|{BEFORE}"),
    "mean of the first call": (FirstMean, ALONE),
    "memory in a tensor": (TensorMemory, f"{ALONE}|{BEFORE}"),
    "memory in a list": (list_memory, f"{ALONE}|{BEFORE}"),
    "memory in a variable": (largest_so_far, f"{ALONE}|{BEFORE}"),
    "number of calls": (counting, BEFORE),
    "random permutation": (lambda: random_mixing, ALONE),
    "random multiple of the mean": (lambda: random_mean, ALONE),
    "numpy": (lambda: numpy_mixing, ALONE),
    "random": (lambda: python_mixing, ALONE),
    "its own generator": (with_generator, ALONE),
    "random numbers of the system": (lambda: unseeded, AGAIN),
    "number of samples": (lambda: number_of_samples, ALONE),
    "sine of a huge multiple": (lambda: lambda losses: 2 + torch.sin(1e18 * losses), DIGITS),
    "last bits of the loss": (lambda: lambda losses: (losses * 2.0**50).remainder(2), DIGITS),
    "cosine of huge norms": (lambda: lambda norms: 2 + torch.cos(1e17 * norms), DIGITS),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("microbatch", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (None, 1))])
def test_refused(function, message, microbatch):
    model, loader, step = make(plan(sample_rate=0.5), transforms=[sw.weight(function())], microbatch=microbatch)
    with pytest.raises(PrivacyError, match=message):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("microbatch", [None, 15])
@pytest.mark.parametrize("function", [large_losses_clamped, first_of_a_call, from_the_fourth_on])
def test_refused_if_it_compares_some_samples(function, microbatch):
    _, loader, step = make(plan(sample_rate=0.5), transforms=[sw.weight(function)], microbatch=microbatch)
    with pytest.raises(PrivacyError, match=f"{ALONE}|{PARTS}"):
        train(step, loader)


@pytest.mark.parametrize("microbatch", [None, 15])
def test_refused_if_it_needs_several_samples(microbatch):
    _, loader, step = make(plan(sample_rate=0.5), transforms=[sw.weight(of_several)], microbatch=microbatch)
    with pytest.raises(PrivacyError, match=PARTS):
        train(step, loader)


@pytest.mark.parametrize("function", [RunningMean, list_memory, lambda: random_mean, lambda: number_of_samples])
def test_refused_after_draws_of_one_sample(function):
    privacy = plan(sample_rate=0.03, seed=6, updates=30)
    _, loader, step = make(privacy, transforms=[sw.weight(function())])
    with pytest.raises(PrivacyError, match=MUST):
        train(step, loader)


@pytest.mark.parametrize("function", [FirstMean, lambda: random_mixing, counting])
def test_refused_for_users(function):
    privacy = plan(users=[i // 4 for i in range(40)], sample_rate=0.5)
    _, loader, step = make(privacy, transforms=[sw.weight(function())], microbatch=3)
    with pytest.raises(PrivacyError, match=MUST):
        train(step, loader)


# --------------------------------------------------------------------------------------------------- what is allowed


def random_factor(losses):
    return torch.rand(len(losses), dtype=losses.dtype) * losses


class Table:
    """Weights that read a table, and count their calls without using the count."""

    def __init__(self):
        self.factor = torch.tensor(0.5, dtype=torch.float64)
        self.calls = 0

    def __call__(self, losses):
        self.calls += 1
        return self.factor * losses.exp()


@functools.cache
def table():
    """A cache is emptied a few times only: it may take long to fill."""
    table.calls += 1
    return torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


def test_allowed_with_a_cache():
    table.calls = 0
    _, loader, step = make(plan(sample_rate=0.5), transforms=[sw.weight(lambda batch: table()[batch[1]])])
    assert train(step, loader, 3) == 3
    assert table.calls <= 3


def test_allowed():
    for function in (random_factor, Table(), lambda norms: 1 / (1 + norms), lambda losses: losses):
        _, loader, step = make(plan(sample_rate=0.5), transforms=[sw.weight(function)], microbatch=5)
        assert train(step, loader, 3) == 3


def test_the_check_copies_batches_only_for_weights_that_read_them(monkeypatch):
    """A thousand copies of a large batch take longer than the rest of a short training."""
    copies = []

    def take(batch, rows):
        copies.append(len(rows))
        return batches.take(batch, rows)

    monkeypatch.setattr("samplewise.transforms.stats.take", take)
    for function, copied in ((lambda losses: losses, False), (lambda batch: batch[1] + 1.0, True)):
        copies.clear()
        _, loader, step = make(plan(sample_rate=0.5, updates=1), transforms=[sw.weight(function)])
        assert train(step, loader) == 1
        assert bool(copies) == copied


def test_the_check_leaves_state_and_random_numbers_alone():
    weights = Table()
    _, loader, step = make(plan(sample_rate=0.5, updates=1), transforms=[sw.weight(weights)])
    train(step, loader)
    assert weights.calls == 1
    torch.manual_seed(0)
    drawn = []
    for transforms in ([], [sw.weight(random_factor)]):
        _, loader, step = make(plan(sample_rate=0.5, updates=1), transforms=transforms)
        torch.manual_seed(0)
        train(step, loader)
        samples = len(loader.batch_sampler.draw_units(0, 0))
        torch.rand(samples * (not transforms), dtype=torch.float64)  # what random_factor draws once
        drawn.append(torch.get_rng_state())
    assert torch.equal(*drawn)
