"""Gradients of small parameters are computed together, and are the same as if each were computed alone."""

import pytest
import torch
from by_loop import assert_as_loop, rows_by_loop
from torch import nn

import samplewise as sw
from samplewise.engine import plan
from samplewise.engine.gradients import accumulate
from samplewise.engine.grads.dense import PackedGrad
from samplewise.errors import NonFiniteGradientError

X = torch.linspace(-2, 2, 20).double().sin().view(5, 4)


@pytest.fixture
def net():
    layers = (nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3), nn.PReLU(), nn.Linear(3, 2))
    return nn.Sequential(*layers).double()


def losses_of(net):
    return net(X).square().sum(1)


def expected_sums(net, weights):
    return {name: torch.tensordot(weights, rows, 1) for name, rows in rows_by_loop(losses_of(net), net).items()}


def assert_sums(found, expected):
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total)


def test_small_parameters_share_a_matrix(net, monkeypatch):
    monkeypatch.setattr(plan, "may_have_hooks", lambda graph: False)  # other tests may have registered some
    g = sw.gradients(losses_of(net), net)
    grads = g._evaluator.grads()
    packs = {id(grad.pack) for grad in grads.values() if isinstance(grad, PackedGrad)}
    assert len(packs) == 1
    assert sum(isinstance(grad, PackedGrad) for grad in grads.values()) > 4
    assert_as_loop(losses_of(net), net)


def test_small_parameters_are_released_before_large_ones(monkeypatch):
    """So that an all-reduce of a large parameter and a bias can start while other large ones are summed."""
    monkeypatch.setattr(plan, "may_have_hooks", lambda graph: False)
    layers = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300)).double()
    g = sw.gradients(losses_of(layers), layers)
    g.norms()
    order = []
    accumulate(g, None, retain_graph=True, ready=lambda p: order.append(p.dim()))
    assert order == [1, 1, 2, 2]


def test_norms_of_parameters_before_and_after_those_of_samples(net):
    rows = rows_by_loop(losses_of(net), net)
    expected = {name: row.reshape(5, -1).norm(dim=1) for name, row in rows.items()}
    for order in ((None, "parameter", None), ("parameter", None, "parameter")):
        g = sw.gradients(losses_of(net), net)
        for by in order:
            if by is None:
                torch.testing.assert_close(g.norms(), torch.stack(list(expected.values())).norm(dim=0))
            else:
                assert_sums(g.norms(by=by), expected)


def test_packs_with_and_without_hooks_have_the_same_bits(net):
    """Rows are copied at once if a hook may change gradients in place; they are packed in any case."""
    found = []
    for hooks in (0, 1):
        losses = losses_of(net)
        for _ in range(hooks):
            losses.register_hook(lambda gradient: None)
        g = sw.gradients(losses, net)
        found.append({"norms": g.norms(), **g.sum(torch.linspace(0.1, 1, 5).double())})
        assert any(isinstance(grad, PackedGrad) for grad in g._evaluator.grads().values())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def by_hook(x):
    x.register_hook(lambda gradient: gradient.mul_(2))
    return x


def by_node_hook(x):
    x.grad_fn.register_prehook(lambda gradients: (gradients[0].mul_(2),))
    return x


@pytest.mark.parametrize("doubled", [InPlace.apply, by_hook, by_node_hook])
@pytest.mark.parametrize("strategy", ["fused", "twice"])
def test_gradients_that_are_changed_in_place_during_the_pass(doubled, strategy):
    """An addition passes the same tensor to both operands: rows of a bias must be read before it changes."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    bias = nn.Parameter(torch.randn(4).double())

    def losses():
        return (doubled(layer(X).tanh() * 1) + bias).square().sum(1)

    parameters = {"weight": layer.weight, "bias": bias}
    rows = [torch.autograd.grad(losses()[i], list(parameters.values())) for i in range(5)]
    g = sw.gradients(losses(), parameters, strategy=strategy)
    for k, name in enumerate(parameters):
        expected = torch.stack([row[k] for row in rows])
        torch.testing.assert_close(g.norms(by="parameter")[name], expected.flatten(1).norm(dim=1))
        torch.testing.assert_close(g.sum()[name], expected.sum(0))


def test_sums_are_not_remembered(net):
    """Neither changed weights nor changed results have an effect on the next sum."""
    g = sw.gradients(losses_of(net), net)
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.0]).double()
    for _ in range(2):
        found = g.sum(weights)
        assert_sums(found, expected_sums(net, weights))
        for total in found.values():
            total.fill_(9)
        assert_sums(g.sum(weights), expected_sums(net, weights))
        weights.mul_(-3)


def test_a_sum_with_weights_of_zero(net):
    found = sw.gradients(losses_of(net), net).sum(torch.zeros(5).double())
    assert not any(total.any() for total in found.values())


def test_sums_of_some_parameters_before_others(net):
    """Weights of each parameter differ, also between calls of which not all sums were used."""
    g = sw.gradients(losses_of(net), net)
    first = torch.arange(5).double()
    grads = g._evaluator.grads()
    grads["0.bias"].sum(first)
    other = first.cos()
    for name, weights in zip(g.names, [first, other] * len(g.names), strict=False):
        torch.testing.assert_close(grads[name].sum(weights), expected_sums(net, weights)[name])
    by_name = {name: torch.full((5,), k + 1.0).double() for k, name in enumerate(g.names)}
    found = g.sum(by_name)
    for name, weights in by_name.items():
        torch.testing.assert_close(found[name], expected_sums(net, weights)[name])


def test_gradients_of_several_dtypes():
    layers = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 4)])
    for strategy in ("fused", "twice"):
        losses = layers[1](layers[0](X).tanh().float()).square().sum(1)
        assert_as_loop(losses, layers, rtol=1e-5, atol=1e-6, strategy=strategy)


def test_weights_that_were_made_in_inference_mode(net):
    g = sw.gradients(losses_of(net), net)
    with torch.inference_mode():
        weights = torch.arange(5).double()
    assert_sums(g.sum(weights), expected_sums(net, torch.arange(5).double()))


def test_gradients_accumulate_in_place(net):
    g = sw.gradients(losses_of(net), net)
    weights = torch.linspace(0, 1, 5).double()
    for _ in range(2):
        g.backward(weights, retain_graph=True)
    for name, total in expected_sums(net, weights).items():
        torch.testing.assert_close(net.get_parameter(name).grad, 2 * total)
    net.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in net.parameters())


def test_a_sum_that_overflows_although_norms_are_finite():
    """Weights above 1 may overflow; weights of at most 1 cannot."""
    layer = nn.Linear(3, 2)
    x = torch.full((4, 3), 1e10)
    losses = (layer(x) * 1e5).sum(1)
    g = sw.gradients(losses, layer)
    assert g.norms().isfinite().all()
    g.backward(torch.ones(4))
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    g = sw.gradients((layer(x) * 1e5).sum(1), layer)
    g.norms()
    with pytest.raises(NonFiniteGradientError):
        g.backward(torch.full((4,), 1e30))
