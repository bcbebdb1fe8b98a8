"""Buffers and random state, remembered and brought back."""

import pytest
import torch
from torch import nn

from samplewise.core.state import Buffers, RandomState, snapshot


class Moving(nn.Module):
    """A buffer that is changed in place, one that is replaced, one that stays, and one that is not there yet."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("later", None)

    def forward(self, x):
        self.in_place += 1
        self.replaced = self.replaced + 1
        return x + self.in_place + self.replaced


def values(module):
    return [buffer.tolist() for buffer in (module.in_place, module.replaced, module.mask)]


def test_random_state():
    restore = RandomState().restore
    first = torch.rand(3)
    restore()
    assert torch.equal(torch.rand(3), first)
    restore()
    assert torch.equal(torch.rand(3), first)


def test_snapshot():
    module = Moving()
    module(torch.rand(3))
    restore = snapshot(module)
    before = values(module)
    first, noise = module(torch.ones(3)), torch.rand(3)
    assert values(module) != before
    restore()
    assert values(module) == before
    assert torch.equal(module(torch.ones(3)), first)
    assert torch.equal(torch.rand(3), noise)


def test_snapshot_is_restored_several_times():
    module = Moving()
    restore = snapshot(module)
    before = values(module)
    for passes in (1, 3, 0, 2):
        for _ in range(passes):
            module(torch.zeros(3))
        restore()
        assert values(module) == before


def test_snapshots_within_snapshots():
    module = Moving()
    outer = snapshot(module)
    module(torch.zeros(3))
    inner = snapshot(module)
    module(torch.zeros(3))
    inner()
    assert values(module) == [[1.0] * 3, [1.0] * 3, [1.0] * 3]
    outer()
    assert values(module) == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_several_modules_and_modules_within_modules():
    one, two = nn.Sequential(nn.Linear(3, 3), Moving()), Moving()
    restore = snapshot(one, two)
    one(torch.zeros(3)), two(torch.zeros(3))
    restore()
    assert values(one[1]) == values(two) == values(Moving())


def test_a_module_in_two_places():
    shared = Moving()
    restore = snapshot(nn.Sequential(shared, shared), shared)
    shared(torch.zeros(3))
    restore()
    assert values(shared) == values(Moving())


def test_a_buffer_in_two_modules():
    one, two = Moving(), Moving()
    two.in_place = one.in_place
    restore = snapshot(one, two)
    one(torch.zeros(3)), two(torch.zeros(3))
    restore()
    assert one.in_place is two.in_place
    assert values(one) == values(Moving())


def test_the_same_tensor_comes_back():
    """Whoever holds a buffer, a captured graph or another module, sees it restored."""
    module = Moving()
    held = module.in_place, module.replaced
    restore = snapshot(module)
    module(torch.zeros(3))
    restore()
    assert module.in_place is held[0]
    assert module.replaced is held[1]


def test_parameters_and_modes_are_left_alone():
    module = nn.Sequential(nn.Linear(3, 3), Moving())
    restore = snapshot(module)
    with torch.no_grad():
        module[0].weight.fill_(7)
    module.eval()
    restore()
    assert (module[0].weight == 7).all()
    assert not module.training


def test_without_buffers():
    restore = snapshot(nn.Linear(3, 3))
    noise = torch.rand(3)
    restore()
    assert torch.equal(torch.rand(3), noise)


def test_a_buffer_that_was_not_there():
    """A statistic that is set from the first data, say, must be set again from the data that come then."""
    module = Moving()
    restore = snapshot(module)
    module.later = torch.ones(3)
    restore()
    assert module.later is None


def test_a_buffer_that_is_taken_away():
    module = Moving()
    restore = snapshot(module)
    module.replaced = None
    restore()
    assert values(module) == values(Moving())


# --- the same, again and again ----------------------------------------------------------------------------------------


def test_state_is_saved_several_times():
    module = Moving()
    buffers = Buffers([module])
    for _ in range(3):
        buffers.remember()
        before = values(module)
        module(torch.zeros(3))
        module(torch.zeros(3))
        buffers.restore()
        assert values(module) == before
        module(torch.zeros(3))  # goes on


def test_last_saved_state_is_restored():
    module = Moving()
    buffers = Buffers([module])
    buffers.remember()
    module(torch.zeros(3))
    buffers.remember()
    before = values(module)
    module(torch.zeros(3))
    buffers.restore()
    assert values(module) == before


def test_what_stands_still_is_copied_once(monkeypatch):
    """Masks can be large."""
    monkeypatch.setattr("samplewise.core.state.SMALL", 0)
    module = Moving()
    buffers, copied = Buffers([module]), []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda x, *args, **kwargs: (copied.append(x), clone(x))[1])
    for _ in range(3):
        copied.clear()
        buffers.remember()
        module(torch.zeros(3))
    assert len(copied) == 2  # of three


def test_restoring_twice_is_restoring_once():
    module = Moving()
    buffers = Buffers([module])
    buffers.remember()
    module(torch.zeros(3))
    buffers.restore()
    buffers.restore()
    assert values(module) == values(Moving())


def test_nothing_is_restored_if_nothing_was_saved():
    module = Moving()
    buffers = Buffers([module])
    module(torch.zeros(3))
    before = values(module)
    buffers.restore()
    assert values(module) == before


@pytest.mark.parametrize("change", [lambda m: setattr(m, "replaced", None), lambda m: m.to(torch.float64)])
def test_buffers_may_be_taken_away_or_changed_between(change):
    module = Moving()
    buffers = Buffers([module])
    buffers.remember()
    change(module)
    buffers.remember()
    module.in_place += 5
    buffers.restore()
    assert module.in_place.tolist() == [0.0] * 3
