"""Probes find samples that share a row, however small one is beside the other, at every step and in every edge."""

import pytest
import torch
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.engine.ownership import local_probe
from samplewise.engine.ownership.probe import _switches
from samplewise.testing.case import Net, noise

SMALL = {torch.float32: (1e-7, 1e-9, 1e-12, 1e-18), torch.float64: (1e-12, 1e-16, 1e-20, 1e-40)}


def close_to_loop(losses, model, dtype):
    """Samples that share a row interact: their rows of the Jacobian are asked for all the same."""
    assert_as_loop(losses, model, rtol=1e-4 if dtype is torch.float32 else 1e-9, atol=0, interacting="allow")


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("B", [2, 5, 16, 70])
def test_small_sample_shares_a_row_at_a_later_step(B, dtype):
    torch.manual_seed(B)
    layer = nn.Linear(6, 3).to(dtype)
    for size in (1.0, *SMALL[dtype]):
        x, order, scale = torch.randn(B, 6, dtype=dtype), torch.randperm(B), torch.ones(B, dtype=dtype)
        if size < 1:
            order[1] = order[0]
            scale[1] = size
        close_to_loop(layer(x)[order].square().sum(1) * scale, layer, dtype)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_smallest_sample_changes_each_step(dtype):
    layer = nn.Linear(6, 3).to(dtype)
    for step in range(8):
        x, order, scale = torch.randn(8, 6, dtype=dtype), torch.arange(8), torch.ones(8, dtype=dtype)
        order[step] = (step + 3) % 8
        scale[step] = SMALL[dtype][1]
        close_to_loop(layer(x)[order].square().sum(1) * scale, layer, dtype)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_small_at_one_layer_and_large_at_another(dtype):
    """No weight on the losses makes up for both."""
    model = Net(None, a=nn.Linear(6, 3), b=nn.Linear(6, 3)).to(dtype)
    for step in range(3):
        x, order, scale = torch.randn(8, 6, dtype=dtype), torch.randperm(8), torch.ones(8, dtype=dtype)
        if step:
            order[1] = order[0]
            scale[1] = SMALL[dtype][1]
        losses = model.a(x)[order].square().sum(1) * scale + model.b(x)[order.flip(0)].square().sum(1)
        close_to_loop(losses, model, dtype)


def test_samples_routed_to_few_experts():
    """Most samples have nothing at an expert; one is there with a weight of 1e-9 beside another's."""
    torch.manual_seed(0)
    model = Net(None, experts=nn.ModuleList([nn.Linear(6, 4) for _ in range(4)]))
    for step in range(4):
        x, choice = torch.randn(24, 6), torch.randint(4, (24,))
        out = torch.zeros(24, 4)
        for number, expert in enumerate(model.experts):
            rows = (choice == number).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]))
        weight = torch.ones(24)
        source = torch.arange(24)
        if step:
            source[5], weight[5] = source[7], 1e-9
        close_to_loop(out[source].square().sum(1) * weight, model, torch.float32)


def test_samples_of_equal_size_need_no_switched_pass():
    assert _switches(torch.ones(3, 8, dtype=torch.float64)) == []


def test_silent_samples_are_left_on_by_themselves():
    sizes = torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 1], [1, 0, 1, 0]], dtype=torch.float64)
    found = sorted(on.tolist() for on in _switches(sizes))
    assert found == [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]


def test_unbalanced_samples_are_probed_in_pairs():
    sizes = torch.ones(2, 10, dtype=torch.float64)
    sizes[1, 4] = 1e-6
    patterns = torch.stack(_switches(sizes))
    for i in range(10):
        for j in range(10):
            assert i == j or ((patterns[:, i] == 0) & (patterns[:, j] == 1)).any()


def test_weights_are_new_in_every_check_of_a_node(monkeypatch):
    seen = []

    def spying(passes, weights=None, at=None):
        seen.append(None if weights is None else tuple(weights.tolist()))
        return run(passes, weights, at)

    run = local_probe._NodePasses.run
    monkeypatch.setattr(local_probe._NodePasses, "run", spying)
    layer, x = nn.Linear(4, 3), noise(12, 4)
    checks = []
    for step in range(4):
        seen.clear()
        index = torch.arange(12)[:, None].expand(12, 3)
        sw.gradients(layer(x).gather(0, index).square().sum(1), layer).norms()
        if step:  # the first finds the owners, the others verify them
            checks.append(seen[-1])
    assert len(set(checks)) == 3
