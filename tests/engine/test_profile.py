"""The table of times of `g.explain()`: its stages and causes. The times themselves are not compared with anything."""

import re

import pytest
import torch
from test_slow_paths import B, Bounded, OwnProduct, OwnRounding
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import samplewise as sw
from samplewise.engine import slow_paths
from samplewise.engine.gradients import time_profile
from samplewise.engine.ownership import layouts
from samplewise.testing.case import noise


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def losses_of(model, x=None):
    return model(noise(B, 4) if x is None else x).square().sum(1)


def stages(g):
    """Stage -> cause, from the text that users see."""
    table = g.explain().split("\n\n")[1].splitlines()
    assert re.fullmatch(r"time of norms and a weighted sum; a plain backward pass takes \d+\.\d{3} ms", table[0])
    assert table[1].split() == ["stage", "ms", "share", "x", "backward", "cause"]
    lines = [line for line in table[3:] if not line.startswith("slow: ")]
    matches = [re.fullmatch(r"(\S.*?) +\d+\.\d{3} +\d+% +\d+\.\d\d(?: +(\S.*))?", line) for line in lines]
    assert all(matches)
    return {match[1]: match[2] or "" for match in matches}


def test_a_fast_model():
    model = mlp()
    assert stages(sw.gradients(losses_of(model), model)) == {
        "reading the graph": "",
        "search for hooks": "",
        "ownership: kept plan": "",
        "backward pass to the cut": "",
        "rules and norms: Addmm": "",
        "rules and norms: small parameters, packed": "",
        "weighted sums": "",
        "in all": "",
    }


def test_shares_add_up_and_the_forward_pass_is_the_first_stage():
    model = mlp()
    calls = []
    g = sw.gradients(losses_of(model), model)
    times = time_profile(g, lambda: calls.append(losses_of(model)))
    assert times.stages[0].name == "forward pass"
    assert calls[0].requires_grad
    assert times.plain > 0
    assert all(stage.seconds >= 0 for stage in times.stages)
    assert f"in all {sum(stage.seconds for stage in times.stages) * 1e3:.3f} 100%" in re.sub(" +", " ", times.table)
    assert not times.slow_paths


def test_a_function_without_a_vmap_rule():
    model = OwnProduct()
    g = sw.gradients(model(noise(B, 4)), model)
    assert stages(g)["rules and norms: Function 'Product'"] == "no rule, one call of its backward per sample"
    assert "\nslow: Function 'Product' has no rule, so that its backward is called once per sample." in g.explain()


def test_an_operation_without_a_rule():
    weight = nn.Parameter(noise(B, 4))
    scale = nn.Parameter(noise(4))
    table = stages(sw.gradients(torch.addcmul(weight.detach(), noise(B, 4), scale).square().sum(1), [scale]))
    assert table["rules and norms: Addcmul"] == "no rule"


def test_a_function_is_verified_during_the_pass():
    model = mlp()
    table = stages(sw.gradients(losses_of(model[2], Swish.apply(model[0](noise(B, 4)))), model))
    assert table["verification during the pass"] == "Function 'Swish'"


@pytest.mark.parametrize("around", ["hook", "mode"])
def test_hooks_are_verified_during_the_pass(around):
    model = mlp()
    hidden = model[0](noise(B, 4))
    if around == "hook":
        hidden.register_hook(lambda g: g * 2)
        table = stages(sw.gradients(losses_of(model[2], hidden), model))
    else:
        with FlopCounterMode(display=False):
            table = stages(sw.gradients(losses_of(model[2], hidden), model))
    assert table["verification during the pass"] == "hooks on activations or nodes, or a dispatch mode"


def test_a_claim_about_a_node_is_verified():
    model = mlp()
    table = stages(
        sw.gradients(losses_of(model[2], model[0](noise(B, 3, 4))[torch.arange(B), torch.arange(B) % 3]), model)
    )
    assert table["ownership: 1 claim verified"] == "Index"


def test_a_probe_of_the_whole_graph(monkeypatch):
    monkeypatch.setitem(layouts.MOVERS, "Erf", lambda node, place, shape, children: [None])  # as if it mixed samples
    model = Bounded()
    g = sw.gradients(model(noise(B, 4)), model)
    cause = stages(g)["ownership: probe of the whole graph"]
    assert cause.startswith("Addmm combines sample data with gradients of several samples (above 'layer'; Bounded.forw")
    assert f"\nslow: {cause}, so that the owners of all gradients are found by passes" in g.explain()


def test_a_backward_that_is_not_linear():
    model = OwnRounding()
    g = sw.gradients(model(noise(B, 4)), model)
    assert stages(g)["one backward pass per sample"] == "the backward of Function 'Rounded' is not linear"
    assert "\nslow: the backward of Function 'Rounded' is not linear, so that rows come from" in g.explain()


def test_operations_on_parameters():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    table = stages(sw.gradients(losses_of(model), model))
    assert table["rules and norms: Addmm"] == "operations between it and its parameters"


def test_rows_in_another_order():
    model = mlp()
    order = torch.tensor([2, 0, 4, 1, 3])
    table = stages(sw.gradients(losses_of(model)[order], model))
    assert table["rules and norms: Addmm"] == "rows of samples in an irregular order"


@pytest.mark.parametrize("strategy", ["twice", "full"])
def test_other_strategies_have_the_same_stages(strategy):
    model = mlp()
    table = stages(sw.gradients(losses_of(model), model, strategy=strategy))
    expected = {"ownership: kept plan", "backward pass to the cut", "rules and norms: Addmm", "weighted sums"}
    assert expected <= set(table)


def test_one_backward_pass_per_sample():
    model = mlp()
    table = stages(sw.gradients(losses_of(model), model, strategy="reference"))
    assert table["one backward pass per sample"] == "strategy 'reference'"
    table = stages(sw.gradients(losses_of(model)[:1], model))
    assert table["one backward pass per sample"] == "one sample, or nested tensors"


def test_many_kinds_of_operations_share_a_line():
    models = [nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.PReLU(), nn.Bilinear(4, 4, 4)]
    models += [nn.Embedding(3, 4), nn.Conv1d(1, 1, 1)]
    x = noise(B, 4)
    linear, layer_norm, group_norm, prelu, bilinear, embedding, convolution = models
    h = prelu(group_norm(layer_norm(linear(x))))
    h = bilinear(h, x) + embedding(torch.arange(B) % 3) + convolution(h[:, None])[:, 0]
    table = stages(sw.gradients(h.square().sum(1), nn.ModuleList(models)))
    rules = [name for name in table if name.startswith("rules and norms: ")]
    assert len(rules) == 7
    assert re.fullmatch(r"rules and norms: \d other operations?", rules[-1])


def test_sharded_models_have_no_times():
    model = mlp()
    g = sw.gradients(losses_of(model), model)
    g._graph.sharded = True
    assert time_profile(g) is None


def test_gradients_that_are_not_finite():
    p = nn.Parameter(torch.tensor([0.0, 1.0]))
    losses = torch.sqrt(p * torch.ones(B, 2)).sum(1)
    assert "weighted sums" in stages(sw.gradients(losses, [p]))


def test_steps_of_the_measurement_are_not_counted_as_steps_on_a_slow_path(monkeypatch, recwarn):
    monkeypatch.setattr(slow_paths, "_seen", type(slow_paths._seen)())
    model = OwnProduct()
    sw.gradients(model(noise(B, 4)), model).explain()
    (seen,) = slow_paths._seen.values()
    assert [len(graphs) for graphs in seen.values()] == [1]  # its own pass
    assert not recwarn


def test_the_gradients_stay_as_they_were():
    model = mlp()
    g = sw.gradients(losses_of(model), model)
    norms = g.norms()
    g.explain()
    assert torch.equal(g.norms(), norms)
    assert all(p.grad is None for p in model.parameters())
