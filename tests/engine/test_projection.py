"""Projections of gradients against explicit matrices, and the error of their inner products."""

from math import isqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.engine.gradients import project
from samplewise.engine.grads.kernels import generator_of, random_signs
from samplewise.engine.projection import TILES, Projection

B, T, DIM = 5, 4, 150  # DIM // TILES = 4: tiles of 2 x 2 dimensions, 38 of them


class Language(nn.Module):
    """Embedding tied to the head, a linear layer with a bias, a convolution and a normalization."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(23, 20)
        self.linear = nn.Linear(20, 20)
        self.conv = nn.Conv1d(20, 20, 3, padding=1)
        self.norm = nn.LayerNorm(20)

    def forward(self, tokens):
        h = self.norm(torch.tanh(self.linear(self.table(tokens))))
        h = h + torch.tanh(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return h @ self.table.weight.T


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Language().double()


@pytest.fixture
def tokens():
    return torch.randint(23, (B, T + 1), generator=torch.Generator().manual_seed(1))


def losses_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def jacobian(losses, p):
    return torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0].flatten() for loss in losses])


def matrix_of(name, shape, dim, seed):
    """Matrix (elements, dim) of the factored projection of a parameter, as the documentation of the module says."""
    o, i = shape[0], shape[1:].numel()
    if i == 1 or o * i <= dim:
        generator = generator_of(name, seed)
        places = torch.randint(0, dim, (o * i,), generator=generator)
        signs = torch.randint(0, 2, (o * i,), generator=generator, dtype=torch.float64) * 2 - 1
        return F.one_hot(places, dim) * signs[:, None]
    side = isqrt(dim // TILES)
    tiles = -(-dim // side**2)
    left, right = (signs.double() for signs in random_signs(name, shape, side, tiles, seed, torch.device("cpu")))
    # Column (p, q, n) is the Kronecker product of left[:, p, n] and right[:, q, n].
    columns = [
        torch.kron(left[:, p, n], right[:, q, n]) for p in range(side) for q in range(side) for n in range(tiles)
    ]
    return torch.stack(columns[:dim], 1) / dim**0.5


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_factored_projections_are_products_with_a_kronecker_matrix(model, tokens, strategy):
    losses = losses_of(model, tokens)
    wanted = sum(
        jacobian(losses, p) @ matrix_of(name, p.shape, DIM, 3).double() for name, p in model.named_parameters()
    )
    projected = sw.gradients(losses, model, strategy=strategy).project(DIM, seed=3)
    torch.testing.assert_close(projected, wanted, rtol=1e-12, atol=1e-12)


def test_dense_projections_are_products_with_independent_signs(model, tokens):
    losses = losses_of(model, tokens)
    wanted = 0
    for name, p in model.named_parameters():
        left, right = random_signs(name, p.shape, 1, DIM, 3, torch.device("cpu"))
        wanted += jacobian(losses, p) @ torch.einsum("opk,iqk->oik", left.double(), right.double()).flatten(0, 1)
    projected = sw.gradients(losses, model).project(DIM, seed=3, method="dense")
    torch.testing.assert_close(projected, wanted / DIM**0.5, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["factored", "dense"])
def test_projections_do_not_depend_on_the_batch(model, tokens, method):
    whole = sw.gradients(losses_of(model, tokens), model).project(DIM, method=method)
    order = torch.tensor([3, 0, 4, 1, 2])
    parts = [sw.gradients(losses_of(model, part), model).project(DIM, method=method) for part in tokens[order].split(2)]
    torch.testing.assert_close(torch.cat(parts), whole[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["factored", "dense"])
def test_parameters_are_scaled_and_add_to_their_block(model, tokens, method):
    g = sw.gradients(losses_of(model, tokens), model)
    half = {name: slice(0, 130) if "linear" in name else slice(130, 200) for name in g.names}
    scale = {name: torch.rand(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    projected = project(g, Projection(200, 2, method, blocks=half, scale=scale))
    rows = g.full()
    scaled = {name: nn.Parameter(torch.zeros_like(scale[name])) for name in ("linear.weight", "linear.bias")}
    losses = sum((rows[name] * scale[name] * p).flatten(1).sum(1) for name, p in scaled.items())
    wanted = sw.gradients(losses, scaled).project(130, 2, method=method)
    torch.testing.assert_close(projected[:, :130], wanted, rtol=1e-12, atol=1e-12)


def test_inner_products_are_unbiased_with_the_stated_variance():
    """The gradient of a linear layer with one token is an outer product l r^T, whose error is the largest."""
    torch.manual_seed(0)
    layer = nn.Linear(60, 50, bias=False).double()
    x, weights = torch.randn(2, 60).double(), torch.randn(50).double()
    side, draws = 4, 400
    dim = TILES * side**2
    g = sw.gradients(layer(x) @ weights, layer)
    exact = g.gram()
    relative = {}
    for method in ("factored", "dense"):
        products = torch.stack([(p := g.project(dim, seed, method=method)) @ p.T for seed in range(draws)])
        error = products / exact.diagonal().mean() - exact / exact.diagonal().mean()
        spread = error.std(0)
        assert (error.mean(0).abs() < 4 * spread / draws**0.5).all()
        relative[method] = spread.diagonal().square().mean()
    assert relative["factored"] == pytest.approx(((1 + 2 / side) ** 2 - 1) / TILES, rel=0.25)
    assert relative["dense"] == pytest.approx(8 / dim, rel=0.25)


def test_small_parameters_have_the_error_of_a_matrix_of_signs():
    torch.manual_seed(0)
    p = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    a = torch.randn(40).double()
    g = sw.gradients((a * p).sum()[None], {"p": p})
    squares = torch.stack([g.project(64, seed).square().sum() for seed in range(2000)]) / a.square().sum()
    assert squares.mean() == pytest.approx(1, abs=0.02)
    exact = 2 * (1 - a.pow(4).sum().item() / a.square().sum().item() ** 2) / 64
    assert squares.var() == pytest.approx(exact, rel=0.2)


def test_projections_can_be_differentiated(model, tokens):
    def projected(weight):
        parameters = dict(model.named_parameters()) | {"linear.weight": weight}
        logits = torch.func.functional_call(model, parameters, (tokens[:, :-1],))
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)
        return sw.gradients(losses, parameters, create_graph=True).project(70, seed=1)

    weight = model.linear.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(projected, weight, atol=1e-6, fast_mode=True)


def test_unknown_methods_are_refused(model, tokens):
    g = sw.gradients(losses_of(model, tokens), model)
    with pytest.raises(ValueError, match=r"method must be 'factored' or 'dense'; found 'kronecker'\."):
        g.project(8, method="kronecker")
