"""Quantities made under create_graph=True are differentiated once more: penalties on gradients must train."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import CASES, INDEPENDENT

import samplewise as sw
from samplewise.testing.compare import QUANTITIES, SECOND_ORDER, as_dict, assert_same, defined_quantities, probe_for
from samplewise.testing.oracle import rows_of, wanted

TWICE_DIFFERENTIABLE = [case for case in INDEPENDENT if case.traits.second_order]
ASKED = ("norms", "dot", "gram", "weighted sum", "sum of squares", "full")


def slope_of(quantity, parameters):
    """d/d parameters of a scalar in which every element of the quantity has a weight of its own."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in as_dict(quantity).values()]
    penalty = sum((t * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).square().sum() for t in tensors)
    if not penalty.requires_grad:
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    slopes = torch.autograd.grad(penalty, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if s is None else s for (n, p), s in zip(parameters.items(), slopes, strict=True)}


def compare_slopes(case, strategy=None, asked=ASKED):
    """Attention in its plain form: the fused CPU kernel has no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        model, inputs = case.build()
        parameters = wanted(model)
        rows = rows_of(case.losses(model, inputs), parameters, create_graph=True)
        g = sw.gradients(case.losses(model, inputs), model, create_graph=True, strategy=strategy)
        probe = probe_for(parameters, len(rows))
        for name in defined_quantities(rows, asked):
            if name == "norms" and rows.norms().min() == 0:
                continue  # the root has no slope at 0
            found, expected = (slope_of(QUANTITIES[name](x, probe), parameters) for x in (g, rows))
            assert_same(found, expected, SECOND_ORDER, f"slope of {name}")


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("case", TWICE_DIFFERENTIABLE, ids=lambda case: case.name)
def test_slopes_of_quantities(case):
    compare_slopes(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWICE_DIFFERENTIABLE, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", ["fused", "full"])
def test_slopes_of_each_quantity_asked_alone(case, strategy):
    for name in ASKED:
        compare_slopes(case, strategy, [name])


def test_layer_norm_statistics_are_part_of_the_graph():
    """LayerNorm saves its mean and rstd detached: the penalty would be right and its slope would not."""
    compare_slopes(CASES["layer_norm"], asked=["norms"])


@pytest.mark.parametrize("name", ["linear_on_vectors", "layer_norm", "conv2d"])
def test_a_penalty_on_norms_trains(name):
    """Descending on the spread of the norms makes it smaller."""
    case = CASES[name]
    model, inputs = case.build()
    spreads = []
    for _ in range(8):
        spread = sw.gradients(case.losses(model, inputs), model, create_graph=True).norms().var()
        slopes = torch.autograd.grad(spread, list(model.parameters()), allow_unused=True)
        scale = sum(s.square().sum() for s in slopes if s is not None)
        with torch.no_grad():
            for p, s in zip(model.parameters(), slopes, strict=True):
                if s is not None:
                    p -= 0.1 * spread / scale * s
        spreads.append(spread.item())
    assert spreads[-1] < 0.9 * spreads[0]


def test_without_create_graph_the_answers_are_detached():
    case = CASES["layer_norm"]
    model, inputs = case.build()
    g = sw.gradients(case.losses(model, inputs), model)
    assert not g.norms().requires_grad
    assert not any(t.requires_grad for t in g.sum().values())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v)
        return self.head(h.transpose(1, 2).flatten(2)).square().sum((1, 2))


def attention(dtype):
    torch.manual_seed(0)
    return Attention().to(dtype), torch.randn(3, 5, 8, dtype=dtype)


NO_SECOND_DERIVATIVE = r"found the fused attention kernel ScaledDot.*sdpa_kernel\(torch.nn.attention.SDPBackend.MATH\)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fused_attention_has_no_second_derivative(dtype):
    model, x = attention(dtype)
    with pytest.raises(sw.GraphError, match=NO_SECOND_DERIVATIVE):
        sw.gradients(model(x), model, create_graph=True)
    x.requires_grad_()
    with pytest.raises(sw.GraphError, match=NO_SECOND_DERIVATIVE):
        sw.input_gradients(model(x), x, create_graph=True)


def test_the_remedy_for_fused_attention_helps():
    model, x = attention(torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        losses = model(x)
        rows = rows_of(model(x), wanted(model), create_graph=True)
    found = slope_of(sw.gradients(losses, model, create_graph=True).norms(), wanted(model))
    assert_same(found, slope_of(rows.norms(), wanted(model)), SECOND_ORDER, "slope of the norms")


def test_parameters_above_fused_attention_need_no_second_derivative_of_it():
    model, x = attention(torch.float64)
    norms = sw.gradients(model(x), model.head, create_graph=True).norms()
    rows = rows_of(model(x), wanted(model.head), create_graph=True).norms()
    assert_same(slope_of(norms, wanted(model)), slope_of(rows, wanted(model)), SECOND_ORDER, "slope of the norms")


def test_the_fused_lstm_kernel_has_a_second_derivative():
    """In float32, where PyTorch uses the fused kernel, against a loop in float64, where it does not."""
    torch.manual_seed(0)
    model = nn.LSTM(6, 5, batch_first=True)
    x = torch.randn(4, 7, 6)
    norms = sw.gradients(model(x)[0].square().sum((1, 2)), model, create_graph=True).norms()
    found = slope_of(norms, wanted(model))
    wide = copy.deepcopy(model).double()
    rows = rows_of(wide(x.double())[0].square().sum((1, 2)), wanted(wide), create_graph=True)
    for name, expected in slope_of(rows.norms(), wanted(wide)).items():
        assert (found[name].double() - expected).abs().max() < 1e-5 * expected.abs().max()
