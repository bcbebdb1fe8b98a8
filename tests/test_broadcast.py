"""Predictions (B, 1) against targets (B,): refused where losses are not computed by the library, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw

B = 5
SENTENCE = (
    r"tensors of shapes \(5, 1\) and \(5,\) broadcast to \(5, 5\), which compares every prediction with every target\. "
    r"Use squeeze\(1\) or unsqueeze\(1\)"
)

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.randn(B, 3).double().requires_grad_(), torch.randn(B).double()


MISTAKES = {
    "square": lambda z, y: (z - y).square().mean(1),
    "target first": lambda z, y: (y - z).square().mean(1),
    "sum": lambda z, y: (z - y).square().sum(-1),
    "sum of both": lambda z, y: (z + y).square().mean(1),
    "absolute value": lambda z, y: (z - y).abs().mean(1),
    "cube": lambda z, y: ((z - y) ** 3).sum(1),
    "product": lambda z, y: ((z - y) * (z - y)).mean(1),
    "mse_loss": lambda z, y: F.mse_loss(z, y, reduction="none").mean(1),
    "l1_loss": lambda z, y: F.l1_loss(z, y, reduction="none").mean(1),
    "smooth_l1_loss": lambda z, y: F.smooth_l1_loss(z, y, reduction="none").mean(1),
    "huber_loss": lambda z, y: F.huber_loss(z, y, reduction="none").mean(1),
    "(B,) against (B, 1)": lambda z, y: (z[:, 0] - y[:, None]).square().mean(0),
}
INTENDED = {
    "same shapes": lambda z, y: (z[:, 0] - y).square(),
    "B targets per sample": lambda z, y: (z - y.outer(y.exp())).square().mean(1),
    "B thresholds, repeated": lambda z, y: (z.repeat(1, B) - y).square().mean(1),
    "equal targets": lambda z, y: (z - torch.ones(B)).square().mean(1),
    "mse_loss": lambda z, y: F.mse_loss(z[:, 0], y, reduction="none"),
}


@pytest.mark.parametrize("loss", MISTAKES.values(), ids=MISTAKES)
def test_broadcast_is_refused(problem, loss):
    model, x, y = problem
    for compute in (
        lambda: sw.gradients(loss(model(x), y), model).norms(),
        lambda: sw.input_gradients(loss(model(x), y), x),
        lambda: sw.backward(loss(model(x), y), model),
        lambda: [g.norms() for _, g in sw.scan(model, lambda model, batch: loss(model(batch[0]), batch[1]), [(x, y)])],
    ):
        with pytest.raises(sw.SamplesInteractError, match=SENTENCE):
            compute()
    assert all(p.grad is None for p in model.parameters())
    losses = loss(model(x), y)
    expected = torch.stack([torch.autograd.grad(one, model[0].weight, retain_graph=True)[0] for one in losses])
    found = sw.gradients(losses, model, interacting="allow")["0.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_check_reports_it(problem):
    model, x, y = problem
    check = sw.check(model, lambda model, batch: MISTAKES["square"](model(batch[0]), batch[1]), (x, y))
    assert not check.ok
    assert "compares every prediction with every target" in str(check)


@pytest.mark.parametrize("loss", INTENDED.values(), ids=INTENDED)
def test_other_shapes_are_accepted(problem, loss):
    model, x, y = problem
    losses = loss(model(x), y)
    sw.gradients(losses, model).norms()
    sw.input_gradients(losses, x)


def test_step_accepts_as_many_thresholds_as_samples(problem):
    """In a batch of another size there is no broadcast of this kind."""
    model, x, _ = problem
    thresholds = torch.linspace(-1, 1, B).double()

    def loss_fn(model, batch):
        return (model(batch) - thresholds).square().mean(1)

    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, transforms=[sw.clip(1.0)])
    assert step.run([x.detach()]).updates == 1
