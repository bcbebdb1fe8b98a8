"""A model that stays on a slow path gets one warning with cause, place, cost and remedy; other models get none."""

import warnings

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.engine import slow_paths
from samplewise.engine.ownership import layouts
from samplewise.testing.case import noise

B = 5


class Product(torch.autograd.Function):
    """Matrix product whose backward torch.vmap may not call."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.t(), weight)  # its first dimension is not that of the samples
        return x @ weight

    @staticmethod
    def backward(ctx, g):
        columns, weight = ctx.saved_tensors
        return g @ weight.t(), columns @ g


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return (g * 100).round() / 100


class OwnProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(noise(4, 3))

    def forward(self, x):
        return Product.apply(x, self.weight).square().sum(1)


class OwnRounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Rounded.apply(self.layer(x)).square().sum(1)


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).erf().square().sum(1)


SLOW = {
    "no rule": (OwnProduct, "Function 'Product' has no rule.*costs 5 calls of it in each step.*generate_vmap_rule"),
    "not linear": (OwnRounding, "Function 'Rounded' is not linear.*costs 5 backward passes in each step. Remove the"),
    "not derived": (
        Bounded,
        r"Addmm combines sample data.*Bounded.forward, test_slow_paths.py:\d+\), so that.*about ten backward passes",
    ),
}


def steps(model, count):
    """TrainingWarnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            sw.gradients(model(noise(B, 4)), model).norms()
    return [w for w in caught if issubclass(w.category, sw.TrainingWarning)]


@pytest.mark.parametrize("name", SLOW)
def test_one_warning_in_the_third_step(name, monkeypatch):
    make, words = SLOW[name]
    monkeypatch.setitem(layouts.MOVERS, "Erf", lambda node, place, shape, children: [None])  # as if it mixed samples
    model = make()
    assert not steps(model, slow_paths.STEPS - 1)
    (warning,) = steps(model, 4)
    pattern = f"^per-sample gradients of this model are computed in a slow way in each step: .*{words}"
    with pytest.raises(sw.TrainingWarning, match=pattern):
        raise warning.message
    assert warning.filename == __file__


def test_steps_are_counted_per_model():
    for _ in range(slow_paths.STEPS):
        assert not steps(OwnProduct(), slow_paths.STEPS - 1)


def test_layers_of_one_step_are_counted_once():
    model = nn.ModuleList(OwnProduct() for _ in range(slow_paths.STEPS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.gradients(sum(layer(noise(B, 4)) for layer in model), model).norms()


@pytest.mark.parametrize("layers", [[nn.Linear(4, 3)], [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]])
def test_ordinary_models_get_none(layers):
    model = nn.Sequential(*layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            sw.gradients(model(noise(B, 4)).square().sum(1), model).norms()
