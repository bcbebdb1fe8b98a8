"""Doubts that a step settles by itself, and what it looks up anew each time."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from unrestored import Unrestored

import samplewise as sw
from samplewise.step.forward import MixedPrecision
from samplewise.step.parameters import TrainedParameters


class Sloped(nn.Module):
    """Attention with learned slopes over distances that are made on the fly: (T, T), like sample data where T == B."""

    def __init__(self):
        super().__init__()
        self.project, self.slope = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = -self.slope * (places[:, None] - places).abs()
        h = self.project(x)
        return torch.softmax(h @ h.transpose(1, 2) + bias, -1) @ h


def loss_fn(model, batch):
    return model(batch).square().mean((1, 2))


def clipped_by_loop(model, x, bound):
    """name -> the clipped mean, and the norms of every parameter's part."""
    rows = [torch.autograd.grad(loss_fn(model, x[i : i + 1])[0], list(model.parameters())) for i in range(len(x))]
    total = [torch.zeros_like(p) for p in model.parameters()]
    for row in rows:
        for k, g in enumerate(row):
            total[k] += g * min(1.0, bound / g.norm().item())
    return [t / len(x) for t in total]


@pytest.mark.parametrize(
    "transforms", [[sw.clip(0.01, by="parameter")], [sw.clip(0.01, by="parameter"), sw.normalize("mean")]]
)
def test_as_many_tokens_as_samples_in_every_pass(transforms):
    """Also in the second pass over a window in pieces."""
    torch.manual_seed(0)
    model, x = Sloped().double(), torch.randn(10, 5, 4, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    expected = clipped_by_loop(model, x, 0.01)
    sw.Step(model, sw.sgd(1.0), loss_fn, samples=10, microbatch=5, transforms=transforms).run([x])
    if len(transforms) == 1:
        for p, then, right in zip(model.parameters(), before, expected, strict=True):
            torch.testing.assert_close(then - p.detach(), right, rtol=1e-9, atol=1e-12)


def test_a_coincidence_is_settled_once():
    calls = Unrestored()

    def counted(model, batch):
        calls.append(len(batch))
        return loss_fn(model, batch)

    step = sw.Step(Sloped(), sw.sgd(0.1), counted, transforms=[sw.clip(1.0)], recheck=False)
    step.run([torch.randn(5, 5, 4) for _ in range(4)])
    assert calls.take() == [5, 4, 5, 5, 5]  # with one sample less, at the first update


def test_a_model_that_is_moved_after_the_step_was_made(monkeypatch):
    """The trainer moves models; precision must follow."""
    seen = []
    monkeypatch.setattr(MixedPrecision, "autocast", lambda self, device: (seen.append(device.type), nullcontext())[1])
    step = sw.Step(nn.Linear(4, 1), sw.sgd(0.1), lambda m, b: m(b)[:, 0], precision="bf16-mixed", recheck=False)
    step(torch.randn(3, 4))
    monkeypatch.setattr(TrainedParameters, "device", torch.device("meta"))
    step(torch.randn(3, 4))
    assert seen == ["cpu", "meta"]
