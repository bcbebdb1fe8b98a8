"""Every quantity of every case against rows of the Jacobian, in float64."""

import pytest
import torch
from zoo import CASES, INDEPENDENT

import samplewise as sw
from samplewise.testing.case import DEFAULT_B
from samplewise.testing.compare import (
    CORE,
    QUANTITIES,
    as_dict,
    assert_agrees,
    assert_same,
    defined_quantities,
    largest,
    other_losses,
    probe_for,
)
from samplewise.testing.oracle import real, rows_of, wanted
from samplewise.testing.runner import FP64, prepare_comparison

all_cases = pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.name)
module_free = pytest.mark.parametrize(
    "case", [case for case in INDEPENDENT if not case.traits.needs_module], ids=lambda case: case.name
)


HANDFUL = [
    CASES[name]
    for name in (
        "causal_language_model_with_tied_head",
        "conv2d_with_groups",
        "experts_chosen_per_token",
        "lstm_batch_second",
        "checkpointed_blocks_in_a_row",
        "weight_norm",
        "learned_temperature",
        "complex_weight_in_a_spectral_convolution",
    )
]


def prepare(case, B=DEFAULT_B):
    model, inputs = case.build(B)
    return model, lambda: case.losses(model, inputs), rows_of(case.losses(model, inputs), wanted(model))


@pytest.mark.sweep(1 / 6)
@all_cases
def test_all_quantities_of_one_g(case):
    compare_all_quantities(case, None)


@pytest.mark.sweep(1 / 12)
@all_cases
def test_all_quantities_of_one_g_twice(case):
    compare_all_quantities(case, "twice")


@pytest.mark.sweep(1 / 12)
@all_cases
def test_all_quantities_of_one_g_full(case):
    compare_all_quantities(case, "full")


def compare_all_quantities(case, strategy):
    prepared = prepare_comparison(case, FP64)
    g = sw.gradients(prepared.losses(), prepared.model, strategy=strategy)
    assert list(g.names) == prepared.rows.names
    assert len(g) == len(prepared.rows)
    prepared.compare(strategy=strategy)


@pytest.mark.sweep(1 / 3)
@all_cases
def test_a_quantity_asked_alone(case):
    """Each case with one of the quantities; test_every_quantity_asked_alone has all of them."""
    name = ("norms", "weighted sum", "gram", "full")[INDEPENDENT.index(case) % 4]
    model, losses, rows = prepare(case)
    assert_agrees(sw.gradients(losses(), model), rows, probe_for(wanted(model), len(rows)), [name])


@pytest.mark.sweep(1 / 10)
@pytest.mark.parametrize("case", HANDFUL, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
@pytest.mark.parametrize("name", QUANTITIES)
def test_a_quantity_asked_alone_of_every_strategy(case, strategy, name):
    model, losses, rows = prepare(case)
    other = (
        sw.gradients(other_losses(losses()), model, strategy=strategy),
        rows_of(other_losses(losses()), wanted(model)),
    )
    g = sw.gradients(losses(), model, strategy=strategy)
    assert_agrees(g, rows, probe_for(wanted(model), len(rows)), [name], other=other)


@pytest.mark.slow
@all_cases
@pytest.mark.parametrize("strategy", ["fused", "twice"])
def test_every_quantity_asked_alone(case, strategy):
    model, losses, rows = prepare(case)
    probe = probe_for(wanted(model), len(rows))
    for name in defined_quantities(rows, QUANTITIES.keys() - {"gram with another"}):
        assert_agrees(sw.gradients(losses(), model, strategy=strategy), rows, probe, [name])


def compare_paired_dots(case, strategy=None):
    """With the same losses in reverse order, times a factor of each sample."""
    model, losses, rows = prepare(case)
    factors = torch.linspace(-1, 2, len(rows), dtype=rows.dtype)
    theirs = {
        name: torch.einsum("b,b...->b...", factors.to(row.dtype), row.flip(0)) for name, row in rows.full().items()
    }
    ga = sw.gradients(losses(), model, strategy=strategy)
    gb = sw.gradients(losses().flip(0) * factors, model, strategy=strategy)
    pairs = {name: (real(row) * real(theirs[name])).reshape(len(rows), -1).sum(1) for name, row in rows.full().items()}
    assert_same(ga.dot(gb, by="parameter"), pairs, what="paired dot by parameter", terms=largest(rows.flat()) ** 2)
    assert_same(ga.dot(gb), sum(pairs.values()), what="paired dot", terms=largest(rows.flat()) ** 2)


@pytest.mark.sweep(1 / 12)
@all_cases
def test_paired_dot(case):
    compare_paired_dots(case)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("case", HANDFUL, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_paired_dot_of_every_strategy(case, strategy):
    compare_paired_dots(case, strategy)


@pytest.mark.sweep(1 / 5)
@all_cases
def test_backward_adds_the_weighted_sum_to_grad(case):
    model, losses, rows = prepare(case)
    probe = probe_for(wanted(model), len(rows))
    for p in wanted(model).values():
        p.grad = torch.ones_like(p)
    sw.gradients(losses(), model).backward(probe.weights)
    found = {name: p.grad for name, p in wanted(model).items()}
    assert_same(found, {name: 1 + t for name, t in rows.sum(probe.weights).items()}, what=".grad")


@pytest.mark.parametrize("case", HANDFUL, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_backward_of_every_strategy(case, strategy):
    model, losses, rows = prepare(case)
    sw.gradients(losses(), model, strategy=strategy).backward()
    assert_same({name: p.grad for name, p in wanted(model).items()}, rows.sum(), what=".grad")


@pytest.mark.sweep(1 / 32)
@all_cases
def test_projection_is_the_same_linear_map_in_every_strategy(case):
    model, losses, _ = prepare(case)
    reference = sw.gradients(losses(), model, strategy="reference").project(9, seed=3)
    assert reference.shape == (DEFAULT_B, 9)
    assert_same(sw.gradients(losses(), model).project(9, seed=3), reference, what="project")


@pytest.mark.sweep(1 / 32)
@module_free
def test_answers_do_not_depend_on_how_the_parameters_are_handed_over(case):
    model, losses, rows = prepare(case)
    by_name = dict(reversed(wanted(model).items()))
    assert_same(sw.gradients(losses(), by_name).norms(), rows.norms(), what="norms, dict")
    tensors = sw.gradients(losses(), list(wanted(model).values()))
    assert list(tensors.names) == [str(k) for k in range(len(rows.names))]
    assert_same(tensors.norms(), rows.norms(), what="norms, list")


@pytest.mark.sweep(1 / 5)
@module_free
def test_one_parameter_alone(case):
    """The others stay in the graph, wanted by nobody."""
    model, losses, rows = prepare(case)
    reached = max(rows.names, key=lambda name: rows[name].abs().sum().item())
    g = sw.gradients(losses(), {reached: wanted(model)[reached]})
    assert_same(g.full(), {reached: rows[reached]}, what="full")
    assert_same(g.norms(), rows.norms(by="parameter")[reached], what="norms")


@pytest.mark.parametrize("case", HANDFUL, ids=lambda case: case.name)
def test_quantities_in_any_order_share_one_g(case):
    model, losses, rows = prepare(case)
    g, probe = sw.gradients(losses(), model), probe_for(wanted(model), len(rows))
    for _ in range(2):
        assert_agrees(g, rows, probe, CORE[::-1])


def test_projection_keeps_norms_and_inner_products_on_average():
    case = CASES["linear_on_sequences"]
    model, losses, rows = prepare(case)
    g = sw.gradients(losses(), model)
    draws = torch.stack([(p := g.project(64, seed=seed)) @ p.T for seed in range(60)])
    error = (draws.mean(0) - rows.gram()).abs().max() / rows.gram().abs().max()
    assert error < 0.1  # 60 draws of 64 dims: about sqrt(2 / 3840) = 0.023


def test_projection_is_linear_and_depends_on_the_seed_alone():
    case = CASES["causal_language_model_with_tied_head"]
    model, losses, _ = prepare(case)
    weights = torch.arange(1.0, 1 + DEFAULT_B, dtype=torch.float64)
    each = sw.gradients(losses(), model).project(7, seed=5)
    together = sw.gradients((losses() * weights).sum()[None], model).project(7, seed=5)
    assert_same(together[0], weights @ each, what="project")
    assert not torch.allclose(each, sw.gradients(losses(), model).project(7, seed=6))


def test_explain_is_a_table_that_names_every_parameter():
    model, losses, _ = prepare(CASES["causal_language_model_with_tied_head"])
    g = sw.gradients(losses(), model)
    g.norms()
    assert all(name in str(g.explain()) for name in g.names)


def test_frozen_parameters_are_left_out_and_unreached_ones_are_zero():
    case = CASES["unused_layer"]
    model, inputs = case.build()
    model.f.bias.requires_grad_(False)
    g = sw.gradients(case.losses(model, inputs), model)
    assert set(g.names) == {"f.weight", "idle.weight", "idle.bias", "lonely"}
    assert all(as_dict(g.sum())[name].eq(0).all() for name in ("idle.weight", "idle.bias", "lonely"))
    assert g.sum()["idle.weight"].shape == (3, 6)
    g.backward()
    assert model.idle.weight.grad is None
    assert model.f.weight.grad is not None
