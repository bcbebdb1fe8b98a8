"""Changed weights and changed results have no effect on the next quantity, or are refused."""

import pytest
import torch
from by_loop import rows_by_loop
from torch import nn

import samplewise as sw

X = torch.linspace(-2, 2, 30).double().sin().view(6, 5)
WEIGHTS = torch.tensor([1.0, 0, 0, 2, 0, 0]).double()  # most are zero: these samples are left out

MODELS = {
    "rows of small parameters": lambda: nn.Linear(5, 3),
    "factors": lambda: nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300)),
    "pulled back": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 40, 3, padding=1), nn.Conv1d(40, 64, 3)
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().double()


def losses_of(model):
    return model(X).tanh().flatten(1).square().sum(1)


def assert_sums(g, weights, rows):
    found = g.sum(weights)
    for name, of_parameter in rows.items():
        torch.testing.assert_close(found[name], torch.tensordot(weights, of_parameter, 1))


def change(weights):
    weights.add_(1)


def change_data(weights):
    weights.data.add_(1)


def change_memory(weights):
    weights.numpy()[:] = 3


@pytest.mark.parametrize("changed", [change, change_data, change_memory])
def test_changed_weights(model, changed):
    losses = losses_of(model)
    g = sw.gradients(losses, model)
    rows = rows_by_loop(losses, model)
    weights = WEIGHTS.clone()
    assert_sums(g, weights, rows)
    changed(weights)
    assert_sums(g, weights, rows)


def test_changed_sums(model):
    losses = losses_of(model)
    g = sw.gradients(losses, model)
    rows = rows_by_loop(losses, model)
    for weights in (None, WEIGHTS):
        for _ in range(2):
            for total in g.sum(weights).values():
                total.fill_(9)
        assert_sums(g, torch.ones(6).double() if weights is None else weights, rows)


def test_changed_norms(model):
    g = sw.gradients(losses_of(model), model)
    expected = g.norms().clone()
    of_parameters = {name: norms.clone() for name, norms in g.norms(by="parameter").items()}
    g.norms().fill_(9)
    for norms in g.norms(by="parameter").values():
        norms.fill_(9)
    torch.testing.assert_close(g.norms(), expected)
    torch.testing.assert_close(g.norms(by="parameter"), of_parameters)


@pytest.mark.parametrize("strategy", ["fused", "full", "reference"])
def test_changed_rows(model, strategy):
    """Rows that are kept must not change; rows that are computed for the caller may."""
    losses = losses_of(model)
    rows = rows_by_loop(losses, model)
    for name in rows:
        g = sw.gradients(losses, model, strategy=strategy)
        is_kept = bool(g._evaluator.grads()[name].row_tensors)
        g[name].fill_(9)
        if is_kept:
            with pytest.raises(sw.GraphError, match="found rows modified in place"):
                g.sum(WEIGHTS)
        else:
            assert_sums(g, WEIGHTS, rows)
            torch.testing.assert_close(g.full(), rows)


def test_rows_may_change_after_they_are_released(model):
    losses = losses_of(model)
    g = sw.gradients(losses, model)
    full = g.full()
    g.backward(retain_graph=True)
    for rows in full.values():
        rows.fill_(9)
    assert_sums(g, WEIGHTS, rows_by_loop(losses, model))
