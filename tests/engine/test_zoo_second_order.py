"""Quantities made under create_graph=True are differentiated once more: penalties on gradients must train."""

import pytest
import torch
from daily import every
from torch.nn.attention import SDPBackend, sdpa_kernel

import samplewise as sw
from samplewise.testing.zoo import (
    CASES,
    INDEPENDENT,
    QUANTITIES,
    SECOND_ORDER,
    as_dict,
    assert_same,
    defined_quantities,
    probe_for,
    rows_of,
    wanted,
)

TWICE_DIFFERENTIABLE = [case for case in INDEPENDENT if case.traits.second_order]
ASKED = ("norms", "dot", "gram", "weighted sum", "second moment", "full")


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


@pytest.mark.parametrize("case", every(4, TWICE_DIFFERENTIABLE), ids=lambda case: case.name)
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
