"""`ga.dot(gb)`: inner products of sample i's gradients of two losses, against the plain loop in float64."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import rows_by_loop
from torch import nn

import samplewise as sw
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.testing.case import noise


class TwoHeads(nn.Module):
    """A body with tokens, and two heads; `tied` uses the embedding once more as a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Linear(6, 6)
        self.qkv = nn.Parameter(noise(12, 6))
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 2)

    def hidden(self, tokens):
        h = torch.tanh(self.body(self.embed(tokens)))
        q, k = self.qkv.chunk(2)
        return h + torch.tanh(F.linear(h, q)) * F.linear(h, k)

    def losses(self, tokens):
        h = self.hidden(tokens)
        one = self.first(h).square().flatten(1).sum(1) + (h @ self.embed.weight.T).logsumexp(2).sum(1)
        return one, self.second(h.mean(1)).sin().sum(1)


def model_and_tokens():
    torch.manual_seed(0)
    return TwoHeads().double(), torch.randint(0, 7, (4, 3))


def dots_by_loop(one, other, model):
    mine, theirs = rows_by_loop(one, model), rows_by_loop(other, model)
    return {name: (row * theirs[name]).reshape(len(row), -1).sum(1) for name, row in mine.items()}


@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
def test_two_losses_of_one_batch(strategy):
    model, tokens = model_and_tokens()
    one, other = model.losses(tokens)
    expected = dots_by_loop(one, other, model)
    ga, gb = (sw.gradients(losses, model, strategy=strategy) for losses in (one, other))
    torch.testing.assert_close(ga.dot(gb), sum(expected.values()), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gb.dot(ga), ga.dot(gb), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ga.gram(gb).diagonal(), ga.dot(gb), rtol=1e-10, atol=1e-12)


def test_by_parameter_with_zeros_where_one_of_the_losses_does_not_reach():
    model, tokens = model_and_tokens()
    one, other = model.losses(tokens)
    found = sw.gradients(one, model).dot(sw.gradients(other, model), by="parameter")
    for name, expected in dots_by_loop(one, other, model).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
    assert not found["first.weight"].any() and not found["second.weight"].any()
    assert found["body.weight"].all()


def test_of_two_batches_and_with_names_in_another_order():
    model, tokens = model_and_tokens()
    one, _ = model.losses(tokens)
    other, _ = model.losses((tokens + 1) % 7)
    parameters = dict(model.named_parameters())
    ga, gb = sw.gradients(one, parameters), sw.gradients(other, dict(reversed(parameters.items())))
    torch.testing.assert_close(ga.dot(gb), sum(dots_by_loop(one, other, model).values()), rtol=1e-10, atol=1e-12)


def test_factors_are_not_multiplied_out(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 40)).double()
    x = torch.randn(4, 3, 40, dtype=torch.float64)
    one, other = model(x).square().sum((1, 2)), model(x).exp().sum((1, 2))
    expected = sum(dots_by_loop(one, other, model).values())
    multiplied = []
    rows = FactoredGrad.rows
    monkeypatch.setattr(FactoredGrad, "rows", lambda form, *part: multiplied.append(form) or rows(form, *part))
    found = sw.gradients(one, model).dot(sw.gradients(other, model))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not multiplied


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_factors_of_two_dtypes(dtypes):
    """As of two passes of which one was under autocast."""

    def form(dtype):
        use = torch.nn.functional.linear(x.to(dtype), w := weight.detach().to(dtype).requires_grad_())
        return sw.gradients(use.square().sum((1, 2)), [w])

    x, weight = noise(4, 2, 30).detach(), noise(20, 30).detach()
    one, other = (form(dtype)._evaluator.grads()["0"] for dtype in dtypes)
    assert isinstance(one, FactoredGrad) and isinstance(other, PerSampleGrad)
    expected = (one.rows(0, 4).double() * other.rows(0, 4).double()).sum((1, 2))
    torch.testing.assert_close(one.paired_dot(other).double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_cancel_in_float32():
    """The products of single tokens are 1e10 times as large as their sum."""
    x = noise(3, 1, 40).repeat(1, 2, 1).float()
    weight = noise(30, 40).float().requires_grad_()
    large = torch.tensor([1024.0, -1024.0])[:, None] + torch.randint(1, 8, (3, 2, 30)) / 1024

    def losses(weight, x):
        y = F.linear(x, weight)
        return (y * large.to(y.dtype)).sum((1, 2))

    g = sw.gradients(losses(weight, x), [weight])
    wide = weight.detach().double().requires_grad_()
    rows = rows_by_loop(losses(wide, x.double()), {"0": wide})["0"]
    expected = rows.square().sum((1, 2))
    assert ((g.dot(g).double() - expected).abs() < 0.05 * expected).all()


@pytest.mark.parametrize("which", ["first", "second", "both"])
def test_differentiable_if_one_of_the_two_is(which):
    model, tokens = model_and_tokens()
    one, other = model.losses(tokens)
    shared = [model.embed.weight, model.body.weight, model.body.bias, model.qkv]
    ga = sw.gradients(one, shared, create_graph=which != "second")
    gb = sw.gradients(other, shared, create_graph=which != "first")
    with torch.no_grad():  # the mode of the caller does not matter
        found = ga.dot(gb)
    expected = 0
    for loss, theirs in zip(one, other, strict=True):
        mine = torch.autograd.grad(loss, shared, create_graph=which != "second", retain_graph=True)
        rows = torch.autograd.grad(theirs, shared, create_graph=which != "first", retain_graph=True)
        expected = expected + sum((a * b).sum() for a, b in zip(mine, rows, strict=True))
    slopes = [torch.autograd.grad(v, model.body.weight, retain_graph=True)[0] for v in (found.sum(), expected)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-11)


def test_refusals():
    model, tokens = model_and_tokens()
    one, other = model.losses(tokens)
    g = sw.gradients(one, model)
    with pytest.raises(sw.ParameterError, match=r"same number of samples; found 4 and 3\. Use g\.gram\(other\)"):
        g.dot(sw.gradients(other[:3], model))
    with pytest.raises(
        sw.ParameterError, match="dot needs two Gradients of the same parameters; found different names"
    ):
        g.dot(sw.gradients(other, model.body))


def test_hessian_vector_products_of_each_sample():
    """The gradient of g.dot(v): row i is the Hessian of loss i times v."""
    model, tokens = model_and_tokens()
    parameters = dict(model.named_parameters())
    v = {name: noise(*p.shape).double() for name, p in parameters.items()}
    one, _ = model.losses(tokens)
    products = sw.gradients(sw.gradients(one, model, create_graph=True).dot(v), model)
    expected = []
    for loss in model.losses(tokens)[0]:
        row = torch.autograd.grad(loss, parameters.values(), create_graph=True, allow_unused=True)
        slope = sum((g * v[name]).sum() for name, g in zip(parameters, row, strict=True) if g is not None)
        expected.append(torch.autograd.grad(slope, parameters.values(), retain_graph=True, materialize_grads=True))
    full = products.full()
    for k, name in enumerate(parameters):
        torch.testing.assert_close(full[name], torch.stack([row[k] for row in expected]), rtol=1e-9, atol=1e-11)
    assert products.norms().shape == (4,)
