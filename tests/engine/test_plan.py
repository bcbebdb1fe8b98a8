"""A plan is made once per graph structure, and looked up only where it holds."""

import pytest
import torch
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.engine import backward, strategies
from samplewise.engine.graph import structure
from samplewise.engine.graph.structure import forget_structures
from samplewise.engine.rules import RULES, Rule
from samplewise.testing.case import Net, noise


@pytest.fixture(autouse=True)
def _no_plans():
    forget_structures()


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def losses_of(net, samples=5):
    return net(noise(samples, 4).double()).square().sum(1)


def plans_made(monkeypatch):
    made = []
    make = strategies.make_plan
    monkeypatch.setattr(strategies, "make_plan", lambda *arguments: made.append(1) or make(*arguments))
    return made


def test_one_plan_for_graphs_of_one_structure(net, monkeypatch):
    made = plans_made(monkeypatch)
    for _ in range(3):
        assert_as_loop(losses_of(net), net)
    assert len(made) == 1


def test_another_model_of_the_same_structure_shares_the_plan(net, monkeypatch):
    assert_as_loop(losses_of(net), net)
    made = plans_made(monkeypatch)
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    assert_as_loop(losses_of(other), other)
    assert not made


@pytest.mark.parametrize("change", ["batch", "names", "parameters", "operation", "setting", "interacting"])
def test_another_structure_has_its_own_plan(net, change, monkeypatch):
    assert_as_loop(losses_of(net), net)
    made = plans_made(monkeypatch)
    if change == "batch":
        assert_as_loop(losses_of(net, 6), net)
    if change == "names":
        assert_as_loop(losses_of(net), {f"model.{name}": p for name, p in net.named_parameters()})
    if change == "parameters":
        assert_as_loop(losses_of(net), {"weight": net[0].weight})
    if change == "operation":
        net[1] = nn.ReLU()
        assert_as_loop(losses_of(net), net)
    if change == "setting":
        assert_as_loop(net(noise(5, 4).double()).square().sum(1, keepdim=True).squeeze(1), net)
    if change == "interacting":
        assert_as_loop(losses_of(net), net, interacting="allow")
    assert made


def test_equal_settings_of_different_sign_are_kept_apart():
    """Rows moved up or down by a pad: the sizes of both graphs are equal."""
    layer, x = nn.Linear(4, 4).double(), noise(5, 4).double()
    for pad in ((1, -1), (2, -2), (-1, 1), (-2, 2), (0, 0)):
        moved = nn.functional.pad(layer(x), (0, 0, *pad))
        assert_as_loop(moved.square().sum(1), layer)


def test_a_new_rule_is_used_at_once(net, monkeypatch):
    assert_as_loop(losses_of(net), net)
    monkeypatch.setitem(RULES, ("Addmm", 2), Rule(lambda use: None))
    assert "no rule" in sw.gradients(losses_of(net), net).explain()
    monkeypatch.delitem(RULES, ("Addmm", 2))
    assert "no rule" in sw.gradients(losses_of(net), net).explain()


def test_sample_data_below_the_cut_are_looked_for_in_every_graph():
    """The same operations with a constant of the model, and with a tensor that has one row per sample."""
    model = Net(lambda m, x: x @ (m.w * m.mask), w=nn.Parameter(noise(5, 3).double()))
    model.register_buffer("mask", noise(5, 3).double())
    x = noise(5, 5).double()
    for _ in range(2):
        assert_as_loop(model(x).square().sum(1), model)
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients((x @ (model.w * noise(5, 3).double())).square().sum(1), model).norms()
    assert_as_loop(model(x).square().sum(1), model)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "full"])
def test_gradients_after_the_pass_and_during_it_are_bit_identical(strategy, create_graph, monkeypatch):
    """Two uses of one parameter are added in the order in which autograd runs the nodes."""
    model = Net(lambda m, x: m.f(m.f(x).tanh() + m.g(x)).square().sum(1), f=nn.Linear(4, 4), g=nn.Linear(4, 4))
    x = noise(5, 4).float()
    results = []
    for limit in (backward.FITS_CACHE, 0):
        monkeypatch.setattr(backward, "FITS_CACHE", limit)
        results.append(sw.gradients(model(x), model, strategy=strategy, create_graph=create_graph).sum())
    for name, found in results[0].items():
        assert torch.equal(found, results[1][name])


def kept_plans():
    return [
        one for kept in structure._structures.values() for sizes in kept.sizes.values() for one in sizes.plans.values()
    ]


def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(structure, "MOST_KEPT", 40)
    layer = nn.Linear(4, 4).double()
    for samples in range(2, 20):
        sw.gradients(layer(noise(samples, 4).double()).square().sum(1), layer).norms()
        assert 1 <= len(kept_plans()) <= 10
        assert sum(map(len, structure._recent.values())) <= 10


def test_plans_hold_no_tensors(net):
    sw.gradients(losses_of(net), net).norms()
    (kept,) = kept_plans()
    assert not any(isinstance(value, torch.Tensor) for value in _values(kept))


def test_owners_of_rows_are_kept_for_shapes_that_are_met_again(net):
    """Routing by data has new shapes in each step, and an owner for each row."""
    layer = nn.Linear(4, 4).double()
    order = torch.tensor([2, 0, 1])
    for count in (3, 4, 5):
        losses = layer(noise(3, count, 4).double())[order].square().sum((1, 2))
        assert_as_loop(losses, layer)
        assert not kept_plans()
    for _ in range(2):
        assert_as_loop(layer(noise(3, 5, 4).double())[order].square().sum((1, 2)), layer)
        assert len(kept_plans()) == 1


def _values(thing, depth=0):
    yield thing
    if depth < 8 and isinstance(thing, dict):
        for value in thing.values():
            yield from _values(value, depth + 1)
    elif depth < 8 and isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _values(value, depth + 1)
    elif hasattr(thing, "__dataclass_fields__"):
        yield from _values(vars(thing), depth + 1)
