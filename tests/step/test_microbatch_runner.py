"""Windows of several microbatches: their gradients are compiled, against the same step uncompiled, in float64."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.step.compiled import runner

pytestmark = pytest.mark.usefixtures("interpreted")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3)).double()


def batches(rows, size):
    torch.manual_seed(1)
    x, y = torch.randn(rows, 5, dtype=torch.float64), torch.randint(3, (rows,))
    return list(zip(x.split(size), y.split(size), strict=True))


def losses_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made(compile, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return sw.Step(model, optimizer, losses_of, compile=compile, recheck=False, **options)


def run(step, loader):
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [(u.samples, u.loss, u.grad_norm) for u in step.over(loader)]


def assert_same(mine, other):
    for a, b in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def programs(step):
    return [program for program in step._runner.microbatch_runner.cache.programs.values() if program is not None]


SETTINGS = {
    "windows span batches": (dict(samples=8), 6),
    "microbatches": (dict(samples=8, microbatch=4), 8),
    "microbatches of a batch": (dict(microbatch=4), 12),
    "clipped microbatches": (dict(samples=8, microbatch=4, transforms=[sw.clip(1.0)]), 24),
    "noise": (dict(samples=8, transforms=[sw.clip(1.0), sw.noise(0.1)]), 24),
}


@pytest.mark.sweep(2 / 5)
@pytest.mark.parametrize("name", SETTINGS)
def test_same_updates(name):
    options, size = SETTINGS[name]
    loader = batches(96, size)
    plain, quick = made(False, **options), made(True, **options)
    expected, found = run(plain, loader), run(quick, loader)
    assert quick.compiled == "compiled" and programs(quick)
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    assert_same(plain, quick)
    assert plain.counters == quick.counters


def test_sizes_that_occur_rarely_stay_uncompiled():
    step = made(True, samples=8, microbatch=4)
    for _ in range(2):
        run(step, batches(24 + 3, 27))  # the last window of each pass has three samples
    assert step._runner._sizes["3"] < runner.SIZE_AFTER
    assert [program.count for program in programs(step)] == [4]


def test_weights_by_position_in_the_window_stay_uncompiled():
    options = dict(samples=8, microbatch=4, transforms=[sw.weight(torch.arange(1.0, 9.0, dtype=torch.float64))])
    plain, quick = made(False, **options), made(True, **options)
    for step in (plain, quick):
        run(step, batches(64, 8))
    assert programs(quick) == []
    assert_same(plain, quick)


def test_resumed():
    loader = batches(96, 6)
    whole, first, second = (made(True, samples=8) for _ in range(3))
    run(whole, loader[:10])
    run(first, loader[:10])
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second._runner._sizes == first._runner._sizes
    run(whole, loader[10:])
    run(second, loader[10:])
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_microbatch_that_is_not_finite():
    step = made(True, samples=8, microbatch=4)
    run(step, batches(64, 8))
    before = copy.deepcopy(step.model.state_dict())
    ((x, y),) = batches(8, 8)
    x[5] = torch.inf
    with pytest.raises(sw.NonFiniteLossError, match="sample 5"):
        step((x, y))
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_new_transforms_in_a_window_whose_gradients_are_compiled():
    """New transforms take effect at the next window: the program of this one is compared with its own transforms."""
    first, *loader = batches(4 * (runner.SIZE_AFTER + 3), 4)
    plain, quick = (made(compile, transforms=[sw.clip(0.4)]) for compile in (False, True))
    for step in (plain, quick):
        torch.manual_seed(2)
        step(first)
        for batch in loader[:-1]:  # one that may be a whole window, then SIZE_AFTER uncompiled ones
            step.accumulate(batch)
        step.transforms = [sw.clip(10.0)]
        step.accumulate(loader[-1])
        step.apply()
    assert quick.compiled == "compiled" and programs(quick)
    assert_same(plain, quick)
