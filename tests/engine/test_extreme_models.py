"""Gradients too small to be squared, copies of buffers, and models of very many parameters."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop, count_passes, norms_by_loop
from torch import nn
from torch.nn.utils import parametrizations

import samplewise as sw
from samplewise.testing.case import Net, noise

CASES = {
    "linear": lambda: (nn.Linear(6, 4), noise(5, 6)),
    "tokens": lambda: (nn.Sequential(nn.Linear(40, 30), nn.Flatten()), noise(5, 3, 40)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), noise(5, 2, 6, 6)),
    "embedding": lambda: (Net(lambda m, i: m.e(i).flatten(1), e=nn.Embedding(70, 8)), torch.arange(10).view(5, 2)),
    "tied": lambda: (Net(lambda m, i: F.linear(m.e(i), m.e.weight).flatten(1), e=nn.Embedding(9, 6)), _ids()),
    "norm": lambda: (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), noise(5, 6)),
    "weight norm": lambda: (parametrizations.weight_norm(nn.Linear(6, 4)), noise(5, 6)),
    "thirds": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), noise(5, 3, 8)),
}


def _ids():
    return torch.arange(15).view(5, 3) % 9


def outputs(name, model, x):
    return model(x, x, x)[0].flatten(1) if name == "thirds" else model(x)


@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
@pytest.mark.parametrize("size", [1e-12, 1e-21, 1e-26, 1e-30])
@pytest.mark.parametrize("name", CASES)
def test_norms_of_small_gradients(name, size, strategy):
    model, x = CASES[name]()
    model, x = model.float(), x.float() if x.is_floating_point() else x
    weights = torch.tensor([size, 1, 0, size * 7, size])
    losses = outputs(name, model, x).square().sum(1) * weights
    found = sw.gradients(losses, model, strategy=strategy)
    expected = norms_by_loop(losses, model)
    torch.testing.assert_close(found.norms().double(), expected, rtol=2e-4, atol=0)
    by_parameter = torch.stack(list(found.norms(by="parameter").values())).double()
    whole = torch.linalg.vector_norm(by_parameter / weights.clamp_min(1e-38), dim=0) * weights
    torch.testing.assert_close(whole, expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize("size", [1e-160, 1e-200, 1e-280])
def test_norms_of_small_gradients_in_float64(size):
    layer, x = nn.Linear(6, 4).double(), noise(5, 6).double()
    losses = layer(x).square().sum(1)
    found = sw.gradients(losses * size, layer).norms()
    torch.testing.assert_close(found / size, sw.gradients(losses, layer).norms(), rtol=1e-9, atol=0)


def test_layer_with_small_gradients_beside_others():
    model, x = Net(None, a=nn.Linear(6, 4), b=nn.Linear(6, 4)), noise(5, 6).float()
    model = model.float()
    losses = model.a(x).square().sum(1) * 1e-25 + model.b(x).square().sum(1)
    found = sw.gradients(losses, model).norms(by="parameter")
    expected = norms_by_loop(losses, {"a.weight": model.a.weight})
    torch.testing.assert_close(found["a.weight"].double(), expected, rtol=1e-5, atol=0)


def test_underflowed_norms_can_be_differentiated():
    layer, x = nn.Linear(6, 4).float(), noise(4, 6).float()
    losses = layer(x).square().sum(1) * torch.tensor([1e-24, 1.0, 0.0, 1e-24])
    norms = sw.gradients(losses, layer, create_graph=True).norms()
    (found,) = torch.autograd.grad(norms.sum(), layer.weight)
    assert found.isfinite().all()
    again = sw.gradients(layer(x).square().sum(1)[1:2], layer, create_graph=True).norms()
    (expected,) = torch.autograd.grad(again.sum(), layer.weight)
    torch.testing.assert_close(found, expected)


def test_samples_without_a_gradient_have_norm_zero():
    layer, x = nn.Linear(6, 4).float(), noise(4, 6).float()
    assert sw.gradients(layer(x).sum(1) * torch.tensor([0.0, 1, 0, 1]), layer).norms().tolist()[::2] == [0, 0]


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (4, 4)])
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_with_as_many_features_as_samples(norm, shape):
    model = norm(nn.Linear(*shape)).double()
    for _ in range(2):
        assert_as_loop(model(noise(4, shape[0]).double()).square().sum(1), model)


@pytest.mark.parametrize("copied", [torch.clone, lambda b: b + 0.0, lambda b: b.detach().contiguous().clone()])
def test_a_copy_of_a_buffer_is_no_sample_data(copied):
    model = Net(lambda m, x: x @ (m.w.t() @ copied(m.code)), w=nn.Parameter(torch.randn(4, 6)))
    model.register_buffer("code", torch.randn(4, 6))
    model = model.double()
    assert_as_loop(model(noise(4, 6).double()).square().sum(1), model)


def test_sample_data_like_a_buffer_in_shape_alone_still_interact():
    model = Net(lambda m, x: x @ (m.w.t() @ x), w=nn.Parameter(torch.randn(4, 6)))
    model.register_buffer("code", torch.randn(4, 6))
    model = model.double()
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients(model(noise(4, 6).double()).square().sum(1), model).norms()


def test_scalars_that_are_stacked_share_their_passes(monkeypatch):
    scalars = [nn.Parameter(torch.tensor(0.1 * k, dtype=torch.float64)) for k in range(300)]
    x = noise(4, 300).double()
    losses = (x * torch.stack(scalars)).tanh().sum(1).square()
    passes = count_passes(monkeypatch)
    assert_as_loop(losses, {str(k): s for k, s in enumerate(scalars)})
    assert len(passes) < 40


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (2,)])
def test_many_thousand_parameters(shape):
    count = 10_000
    parameters = [nn.Parameter(torch.full(shape, 1e-3 * (k % 7), dtype=torch.float64)) for k in range(count)]
    x = noise(3, count, *shape).double()
    losses = (x * torch.stack(parameters)).flatten(1).sum(1).square()
    g = sw.gradients(losses, parameters)
    rows = torch.autograd.grad(losses, parameters, torch.tensor([0.0, 1, 0]).double(), retain_graph=True)
    expected = torch.stack([row.flatten() for row in rows]).norm()
    torch.testing.assert_close(g.norms()[1], expected)
    second = g.sum(torch.tensor([0.0, 1, 0]).double())
    torch.testing.assert_close(g.dot(second)[1], expected**2)
    assert g.explain().count("\n") > count
