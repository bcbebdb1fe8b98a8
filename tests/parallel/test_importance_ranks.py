"""Importance sampling on several ranks: one draw that ranks share, scores of all samples on each, resume."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.parallel import collectives

SAMPLES = 40


class Stop:
    def __init__(self, update):
        self.update = update

    def on_update(self, trainer, update):
        if update.index == self.update:
            trainer.stop("test")


def parts(every):
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(3)
    x, y = torch.randn(SAMPLES, 5, generator=own, dtype=torch.float64), torch.arange(SAMPLES) % 3
    x[:4] *= 8
    data = TensorDataset(x, y)
    sampler = sw.ImportanceSampler(data, 5, every=every)
    loader = DataLoader(sw.Indexed(data), batch_sampler=sampler)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transforms = [sw.weight("importance")]
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=6, transforms=transforms, parallel="ddp")
    return step, sampler, loader


def fitted(run, every, stop=-1):
    step, sampler, loader = parts(every)
    callbacks = [sampler, Stop(stop), ModelCheckpoint(every="2up")]
    sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=1).fit(loader, epochs=3, resume=True)
    return nn.utils.parameters_to_vector(step.model.parameters()).detach(), sampler.scores, sampler.variance_ratio


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("every", ["1ep", "3up"])
def test_ranks_train_as_one_process(every, two, tmp_path):
    expected = fitted(tmp_path / "one", every)
    for found in two.run(fitted, tmp_path / "two", every):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-9, atol=1e-12)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("every", ["1ep", "3up"])
def test_ranks_resume(every, one_and_two, two, tmp_path):
    whole = two.run(fitted, tmp_path / "whole", every)
    for name, before, after in one_and_two:
        run = tmp_path / name
        before(fitted, run, every, 9)
        found = after(fitted, run, every)
        if name == "same":
            assert all(torch.equal(a[0], b[0]) for a, b in zip(found, whole, strict=True))
        for result in found:
            torch.testing.assert_close(result, whole[0], equal_nan=True, rtol=1e-9, atol=1e-12)


@pytest.fixture
def one_and_two(two):
    def alone(function, *arguments):
        return [function(*arguments)]

    return [("same", two.run, two.run), ("fewer", two.run, alone), ("more", alone, two.run)]


def looped(until, state=None):
    """A custom loop."""
    step, sampler, loader = parts("1ep")
    sampler.listen(step)
    if state is not None:
        sampler.load_state_dict(state)
    draws = []
    for update in step.over(loader):
        sampler.add(update)
        draws.append(update.columns["id"].tolist())
        if len(draws) == until:
            break
    return draws, sampler.state_dict()


def test_ranks_share_batches_in_a_custom_loop(two):
    expected, _ = looped(99)
    found = two.run(looped, 99)
    assert all(draws for draws, _ in found)
    pairs = zip(*(draws for draws, _ in found), strict=True)
    assert [sorted([*first, *second]) for first, second in pairs] == [sorted(draws) for draws in expected]


def refused(batch_size):
    _, sampler, _ = parts("1ep")
    sampler.batch_size = batch_size
    assert collectives.size() == 2
    next(iter(sampler))


def test_batch_smaller_than_the_number_of_ranks(two):
    message = "ValueError: batch_size must be at least the number of ranks, 2; found 1."
    assert two.errors(refused, 1) == [message] * 2
