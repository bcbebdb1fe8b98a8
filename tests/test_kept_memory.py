"""What forward passes keep for their backward passes, counted."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.core.memory import OverBudget, count_saved_bytes

X = torch.ones(10, 6)  # 240 bytes


def test_bytes_of_what_is_saved():
    """The first layer saves its input, tanh its output, which the second layer saves once more."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with count_saved_bytes(model) as kept:
        out = model(X)
    assert kept.now == kept.most == 4 * (10 * 6 + 10 * 8)
    out.sum().backward()
    del out
    assert kept.now == 0
    assert kept.most == 4 * (10 * 6 + 10 * 8)


def test_the_most_at_a_time_and_not_the_sum():
    model = nn.Linear(6, 3)
    with count_saved_bytes(model) as kept:
        for rows in (2, 10, 4):
            model(torch.ones(rows, 6)).sum().backward()
    assert kept.most == 4 * 10 * 6


def test_what_is_saved_under_two_backward_passes_counts_until_the_last():
    w = torch.ones(6, requires_grad=True)
    with count_saved_bytes() as kept:
        y, z = X * w, X * w
    assert kept.now == 240
    y.sum().backward()
    assert kept.now == 240
    z.sum().backward()
    assert kept.now == 0


def test_weights_and_buffers_are_not_counted():
    model = nn.Linear(6, 3)
    model.register_buffer("scale", torch.ones(10, 6))
    w = torch.ones(6, requires_grad=True)
    with count_saved_bytes(model) as kept:
        _ = model.weight * 2, model.scale * w
    assert kept.now == 0


def test_a_view_of_a_data_set_counts_for_what_it_shows():
    data = torch.ones(1000, 6)
    with count_saved_bytes() as kept:
        _out = data[:10] * torch.ones(10, 1, requires_grad=True)
    assert kept.now == 240


def test_a_checkpointed_block_is_computed_again():
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 1))
    with count_saved_bytes(model) as kept:
        out = checkpoint(model, X, use_reentrant=False)
        out.sum().backward()
    assert kept.most < 4 * 10 * 100


def test_the_engine_reads_what_is_held():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = sw.gradients(model(X).square().sum(1), model).norms()
    with count_saved_bytes(model):
        assert torch.equal(sw.gradients(model(X).square().sum(1), model).norms(), plain)


def test_a_bound_stops_the_forward_pass():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with count_saved_bytes(model, budget=560):
        model(X)
    with count_saved_bytes(model, budget=559), pytest.raises(OverBudget):
        model(X)


@pytest.mark.parametrize("ask", [None, lambda g: g.norms(), lambda g: g.backward()])
def test_a_graph_that_goes_without_a_backward_pass_is_freed(ask):
    """Some operations save what they return: held as it is, it would hold the operation, which holds it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with count_saved_bytes(model) as kept:
        losses = model(X).square().sum(1)
        if ask is not None:
            ask(sw.gradients(losses, model))
        del losses
    assert kept.now == 0


def test_second_derivatives_through_what_is_held():
    w = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)

    def curvature():
        (slope,) = torch.autograd.grad(w.tanh().exp().sum(), w, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)[0]

    plain = curvature()
    with count_saved_bytes():
        assert torch.equal(curvature(), plain)
