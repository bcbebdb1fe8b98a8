"""A derived ownership is believed only after passes in which the gradients could have shown it to be wrong."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.engine.graph.graph import Graph
from samplewise.engine.graph.structure import forget_structures
from samplewise.engine.ownership import layouts, verify
from samplewise.engine.ownership.weighted_passes import distinct_powers
from samplewise.testing.case import Net, noise


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(verify, "_records", {})
    forget_structures()


@pytest.fixture
def wrong_flip(monkeypatch):
    """An operation that is listed wrongly: it moves rows and is taken for elementwise."""
    monkeypatch.setitem(layouts.MOVERS, "Flip", layouts.elementwise)


def shifted(m, x):
    return m.b(F.pad(m.a(x), (0, 0, 1, -1))).squeeze(1).square()


def flipped(m, x):
    return m.b(m.a(x).flip(0)).squeeze(1).square()


def two(forward):
    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 1)).double()


def test_rows_shifted_by_a_pad_that_keeps_the_size():
    model, x = two(shifted), noise(4, 4).double()
    assert_as_loop(model(x), model)


@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
@pytest.mark.parametrize("forward", [shifted, flipped])
def test_zero_gradients_verify_nothing(forward, strategy, wrong_flip):
    model, x = two(forward), noise(4, 4).double()
    weight = model.b.weight.detach().clone()
    with torch.no_grad():
        model.b.weight.zero_()
    assert_as_loop(model(x), model, strategy=strategy)
    with torch.no_grad():
        model.b.weight.copy_(weight)
    assert_as_loop(model(x), model, strategy=strategy)
    assert_as_loop(model(x), model, strategy=strategy)


def test_dead_relu_verifies_nothing(wrong_flip):
    model, x = two(lambda m, x: m.b(m.a(x).flip(0).relu()).squeeze(1).square()), noise(5, 4).double()
    bias = model.a.bias.detach().clone()
    with torch.no_grad():
        model.a.bias.fill_(-100)
    assert_as_loop(model(x), model)
    with torch.no_grad():
        model.a.bias.copy_(bias)
    assert_as_loop(model(x), model)


def test_one_sample_with_a_gradient_does_not_verify_for_all(wrong_flip):
    """The middle row of five stays where it is when rows are flipped."""
    model, x = two(flipped), noise(5, 4).double()
    middle = torch.tensor([0.0, 0, 1, 0, 0]).double()
    assert_as_loop(model(x) * middle, model)
    assert_as_loop(model(x) * torch.ones(5).double(), model)


def test_gradients_that_are_not_finite_verify_nothing(wrong_flip):
    model, x = two(lambda m, x: m.b(m.a(x).flip(0).abs().sqrt()).squeeze(1)), noise(4, 4).double()
    with torch.no_grad():
        kept = model.a.weight.clone(), model.a.bias.clone()
        model.a.weight.zero_()
        model.a.bias.zero_()
    with pytest.raises(sw.NonFiniteGradientError):
        sw.gradients(model(x), model).norms()
    with torch.no_grad():
        model.a.weight.copy_(kept[0])
        model.a.bias.copy_(kept[1])
    assert_as_loop(model(x), model)


def test_a_question_about_the_last_layer_does_not_verify_the_others(wrong_flip):
    model, x = two(flipped), noise(4, 4).double()
    losses = model(x)
    last = {"b.weight": model.b.weight}
    sw.gradients(losses, last).norms()
    assert_as_loop(losses, model)
    assert_as_loop(model(x), model)


def test_input_gradients_verify_their_own_proof(wrong_flip):
    """Rows are flipped between x and the losses: each element of x matters to one sample, but not to its own."""
    x = noise(4, 4).double().requires_grad_()
    layer = nn.Linear(4, 1).double()
    found = sw.input_gradients(layer(x.flip(0)).squeeze(1).square(), x)
    (expected,) = torch.autograd.grad(layer(x.flip(0)).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_what_was_refuted_is_not_asked_again(wrong_flip, monkeypatch):
    model, x = two(flipped), noise(4, 4).double()
    assert_as_loop(model(x), model)
    monkeypatch.setattr(verify, "_compare", None)
    assert_as_loop(model(x), model)


def test_what_was_verified_is_not_asked_again(monkeypatch):
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), noise(4, 4).double()
    assert_as_loop(model(x).square().sum(1), model)
    monkeypatch.setattr(verify, "_compare", None)
    assert_as_loop(model(x).square().sum(1), model)


def test_a_layer_that_never_has_a_gradient_costs_no_passes(monkeypatch):
    model = Net(lambda m, x: m.b(m.a(x)).squeeze(1).square() + 0 * m.dead(x).sum(1), dead=nn.Linear(4, 3), **_layers())
    model, x = model.double(), noise(4, 4).double()
    assert_as_loop(model(x), model)
    monkeypatch.setattr(verify, "_compare", None)
    assert_as_loop(model(x), model)


def _layers():
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)}


@pytest.mark.parametrize("samples", [2, 3, 17, 40, 300])
def test_any_two_samples_have_different_weights_in_some_pass(samples):
    losses = torch.ones(samples, requires_grad=True) * 1.0
    graph = Graph(losses, {})
    codes = torch.stack(list(distinct_powers(graph, torch.rand(samples))), 1)
    assert len(codes.unique(dim=0)) == samples


def test_rows_swapped_in_pairs_of_two_samples(wrong_flip):
    """With two samples a drawn code would be the same for both in one case of seven."""
    for seed in range(20):
        verify._records.clear()
        forget_structures()
        torch.manual_seed(seed)
        model, x = two(flipped), noise(2, 4).double()
        assert_as_loop(model(x), model)


def test_verification_leaves_the_random_numbers_alone():
    model, x = two(shifted), noise(4, 4).double()
    state = torch.get_rng_state()
    sw.gradients(model(x), model).norms()
    assert torch.equal(state, torch.get_rng_state())


def test_the_memory_of_graph_structures_is_bounded(monkeypatch):
    monkeypatch.setattr(verify, "MOST_REMEMBERED", 3)
    x = noise(4, 4).double()
    for depth in range(1, 9):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)]).double()
        sw.gradients(model(x).square().sum(1), model).norms()
        assert len(verify._records) <= 3
