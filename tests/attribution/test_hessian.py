"""The exact Hessian against torch.autograd.functional.hessian, and influence against training without a sample."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from plain_loop import batches, loss_fn, make, rows
from torch import nn
from torch.func import functional_call

import samplewise as sw
from samplewise.attribution import Hessian, hessian
from samplewise.testing.case import noise

RIDGE = 0.05


def explicit_hessian(model, x, y, loss_fn=loss_fn):
    """Hessian of the mean loss over all parameters, (P, P)."""
    names = dict(model.named_parameters())
    sizes = [p.numel() for p in names.values()]

    class Moved(nn.Module):
        def forward(self, x):
            return functional_call(model, self.values, (x,))

    def mean_loss(flat):
        moved = Moved()
        parts = flat.split(sizes)
        moved.values = {n: part.view_as(p) for (n, p), part in zip(names.items(), parts, strict=True)}
        return loss_fn(moved, (x, y)).mean()

    return torch.autograd.functional.hessian(mean_loss, nn.utils.parameters_to_vector(names.values()).detach())


def logistic_regression(n=40, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x = noise(n, 4).double()
    y = (x @ noise(4, 3).double() + noise(n, 3).double()).argmax(1)
    return model, x, y


@pytest.mark.parametrize("make_model", [logistic_regression, make])
def test_matrix(make_model):
    model, x, y = make_model(n=20)
    found = sw.attribution.hessian(model, loss_fn, batches(x, y, 7))
    torch.testing.assert_close(found.matrix, explicit_hessian(model, x, y), rtol=1e-10, atol=1e-12)
    names = ", ".join(name for name, _ in model.named_parameters())
    assert repr(found) == f"Hessian({sum(p.numel() for p in model.parameters())} parameters in {names})"


def test_rows_in_several_chunks(monkeypatch):
    monkeypatch.setattr(import_module("samplewise.attribution.curvature"), "ELEMENTS", 60)
    model, x, y = make(n=20)
    found = sw.attribution.hessian(model, nn.CrossEntropyLoss(), batches(x, y, 7))
    torch.testing.assert_close(found.matrix, explicit_hessian(model, x, y), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("damping", [None, 0.01, 1.0])
@pytest.mark.parametrize("make_model", [logistic_regression, make])
def test_influence_equals_the_formula(make_model, damping):
    """Damping is a multiple of the mean eigenvalue."""
    model, x, y = make_model(n=40)
    query = (x[:6] + 0.5, y[:6])
    matrix = explicit_hessian(model, x, y)
    values = torch.linalg.eigvalsh(matrix)
    curvature = hessian(model, loss_fn, [(x, y)])
    mean = values.mean()
    assert curvature.mean_eigenvalue == pytest.approx(mean.item(), rel=1e-9)
    if make_model is make:
        assert values[0] < -0.1 * mean
        damping = (damping or 0.1) - values[0].item() / mean.item()  # more than the smallest one needs
    inverse = torch.linalg.inv(matrix + (0.1 if damping is None else damping) * mean * torch.eye(len(matrix)).double())
    found = sw.influence(model, loss_fn, batches(x, y, 16), [query], curvature=curvature, damping=damping)
    torch.testing.assert_close(found, rows(model, *query) @ inverse @ rows(model, x, y).T, rtol=1e-6, atol=1e-9)


def trained_to_convergence(model, x, y, n):
    """Minimize sum of losses / n + ridge / 2 |parameters|^2 with Newton's method."""
    parameters = list(model.parameters())
    for _ in range(12):
        losses = loss_fn(model, (x, y)).sum() / n + RIDGE / 2 * sum(p.square().sum() for p in parameters)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(losses, parameters)])
        matrix = explicit_hessian(model, x, y) * len(x) / n
        move = torch.linalg.solve(matrix + RIDGE * torch.eye(len(matrix)), gradient)
        for p, part in zip(parameters, move.split([p.numel() for p in parameters]), strict=True):
            p.data -= part.view_as(p)
    assert gradient.norm() < 1e-12


def test_influence_predicts_training_without_a_sample():
    """The ridge penalty is what the damping adds. Leaving sample i out raises the loss of a query by influence / n."""
    model, x, y = logistic_regression(n=400)
    query = (x[:20] + 0.1, y[:20])
    trained_to_convergence(model, x, y, len(x))
    before = loss_fn(model, query).detach()
    curvature = hessian(model, loss_fn, [(x, y)])
    damping = RIDGE / curvature.mean_eigenvalue
    found = sw.influence(model, loss_fn, [(x, y)], [query], curvature=curvature, damping=damping).T
    strongest = found.norm(dim=1).topk(40).indices[::10]
    changes = []
    for i in strongest:
        rest = torch.arange(len(x)) != i
        without = nn.Sequential(nn.Linear(4, 3)).double()
        without.load_state_dict(model.state_dict())
        trained_to_convergence(without, x[rest], y[rest], len(x))
        changes.append((loss_fn(without, query).detach() - before) * len(x))
    changes = torch.stack(changes)
    assert (changes - found[strongest]).norm() < 0.05 * changes.norm()
    assert torch.corrcoef(torch.stack([changes.flatten(), found[strongest].flatten()]))[0, 1] > 0.99


def test_indefinite_hessians_need_damping():
    model, x, y = make()
    curvature = sw.attribution.hessian(model, loss_fn, [(x, y)])
    smallest = torch.linalg.eigvalsh(curvature.matrix)[0].item()
    assert smallest < 0
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    needed = -smallest / curvature.mean_eigenvalue
    with pytest.raises(
        ValueError,
        match=rf"a smallest eigenvalue of {-needed:.3g} times their mean, with damping 0. "
        rf"Pass a damping above {needed:.3g}, or none",
    ):
        curvature.solve(gradients, 0)
    curvature.solve(gradients, needed + 0.01)


def test_default_damping_makes_an_indefinite_hessian_positive_definite():
    """It is 4 times the size of the most negative eigenvalue; 0.1 times the mean, if that is enough."""
    model, x, y = make()
    curvature = sw.attribution.hessian(model, loss_fn, [(x, y)])
    smallest = torch.linalg.eigvalsh(curvature.matrix)[0]
    assert smallest < -0.1 * curvature.mean_eigenvalue
    inverse = torch.linalg.inv(curvature.matrix - 4 * smallest * torch.eye(len(curvature.matrix)).double())
    found = sw.influence(model, loss_fn, batches(x, y, 5), [(x[:3], y[:3])], curvature=curvature)
    torch.testing.assert_close(found, rows(model, x[:3], y[:3]) @ inverse @ rows(model, x, y).T, rtol=1e-7, atol=1e-9)
    assert f", default damping {-4 * smallest:.3g})" in repr(curvature)
    negative = Hessian(-torch.eye(2).double(), {"weight": (2,)})  # the mean is negative, too
    torch.testing.assert_close(
        negative.solve({"weight": torch.ones(1, 2).double()})["weight"], torch.ones(1, 2).double() / 3
    )
    model, x, y = logistic_regression()
    curvature = sw.attribution.hessian(model, loss_fn, [(x, y)])
    assert curvature.default_shift == pytest.approx(0.1 * curvature.mean_eigenvalue, rel=1e-12)


def test_a_singular_hessian_needs_damping():
    model, x, y = logistic_regression()
    with pytest.raises(ValueError, match="the Hessian plus damping must be positive definite; found a smallest"):
        sw.attribution.hessian(model, loss_fn, [(x, y)]).solve(sw.gradients(loss_fn(model, (x, y)), model).full(), 0)


def test_losses_linear_in_the_parameters_have_a_zero_hessian():
    model = nn.Linear(3, 1).double()
    x = noise(4, 3).double()
    found = sw.attribution.hessian(model, lambda model, x: model(x)[:, 0], [x])
    assert not found.matrix.any()
    for damping in (None, 0.1):
        with pytest.raises(ValueError, match=r"mean eigenvalue of the Hessian must be positive, .*; found 0. Train"):
            found.solve(sw.gradients(model(x)[:, 0], model).full(), damping)


def test_frozen_and_unused_parameters():
    model, x, y = make()
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2).double()))
    found = sw.attribution.hessian(model, loss_fn, [(x, y)])
    assert list(found.shapes) == ["unused", "0.weight", "2.weight", "2.bias"]
    assert not found.matrix[:2].any() and found.matrix[2:].any()


def test_too_many_parameters():
    model = nn.Linear(200, 101)
    with pytest.raises(sw.ParameterError, match=r"1 to 20,000 trainable parameters, .* found 20,301. Use sw.ekfac"):
        sw.attribution.hessian(model, F.cross_entropy, [])
    with pytest.raises(ValueError, match="the loader must yield at least one batch; found none"):
        sw.attribution.hessian(nn.Linear(2, 2), nn.CrossEntropyLoss(), [])


def test_refuses_another_model():
    model, x, y = logistic_regression()
    other = Hessian(torch.eye(3).double(), {"weight": (3,)})
    with pytest.raises(sw.ParameterError, match=r"other names or shapes: 0.bias, 0.weight, weight"):
        sw.influence(model, loss_fn, [(x, y)], [(x, y)], curvature=other)
