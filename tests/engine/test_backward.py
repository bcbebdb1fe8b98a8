"""`g.backward`: what lands in `.grad`, and who is told of it."""

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.testing.case import noise

WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, 1.0])


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = noise(5, 6).float()
    return model, lambda: model(x).square().sum(1)


def weighted(model, losses):
    model.zero_grad()
    (losses() * WEIGHTS).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_adds_in_place_to_what_is_there(task, strategy):
    model, losses = task
    expected = weighted(model, losses)
    before = {name: p.grad for name, p in model.named_parameters()}
    sw.gradients(losses(), model, strategy=strategy).backward(WEIGHTS)
    for name, p in model.named_parameters():
        assert p.grad is before[name]
        torch.testing.assert_close(p.grad, 2 * expected[name])


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_gradients_that_are_one_number_can_be_added_to(strategy):
    """Of a gradient that is the same everywhere, autograd keeps one number."""
    bias = nn.Parameter(torch.ones(3))
    for _ in range(2):
        sw.gradients(bias.sum() * torch.arange(1.0, 3.0), [bias], strategy=strategy).backward()
    assert bias.grad.tolist() == [6.0, 6.0, 6.0]


def test_further_questions_after_it(task):
    model, losses = task
    g = sw.gradients(losses(), model)
    norms = g.norms().clone()
    g.backward(WEIGHTS)
    torch.testing.assert_close(g.dot(g.mean()), g.gram().mean(1))
    torch.testing.assert_close(g.norms(), norms)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_run_once(task, register):
    model, losses = task
    expected = weighted(model, losses)
    model.zero_grad()
    calls = []
    getattr(model[0].weight, register)(lambda _: calls.append(1))
    g = sw.gradients(losses(), model)
    g.norms()
    calls.clear()
    g.backward(WEIGHTS)
    assert calls == [1]
    torch.testing.assert_close(model[0].weight.grad, expected["0.weight"])


def test_sparse_embeddings_get_sparse_gradients():
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    ids = torch.arange(10).view(5, 2)
    sw.gradients(model(ids).flatten(1).square().sum(1), model).backward(WEIGHTS)
    assert model[0].weight.grad.is_sparse
    torch.optim.SparseAdam([model[0].weight]).step()


def test_unreached_parameters_are_left_alone(task):
    model, losses = task
    both = nn.ModuleList([model, nn.Linear(2, 2)])
    sw.gradients(losses(), both).backward()
    assert both[1].weight.grad is None
    assert sw.gradients(losses(), both).sum()["1.weight"].abs().sum() == 0


def test_bad_weights_leave_every_grad_as_it_was(task):
    model, losses = task
    expected = weighted(model, losses)
    with pytest.raises(sw.ParameterError, match=r"shape \(5,\)"):
        sw.gradients(losses(), model).backward(torch.ones(4))
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected[name])


@pytest.mark.parametrize("strategy", ["fused", "twice"])
def test_weights_that_are_not_finite_are_blamed_on_the_weights(task, strategy):
    model, losses = task
    g = sw.gradients(losses(), model, strategy=strategy)
    with pytest.raises(sw.ParameterError, match="weights must be finite; found nan at sample 3"):
        g.backward(torch.tensor([1.0, 1.0, 1.0, float("nan"), 1.0]))
    assert model[0].weight.grad is None


def test_explain_names_every_parameter_in_order(task):
    model, losses = task
    g = sw.gradients(losses(), nn.ModuleList([model, nn.Linear(2, 2)]))
    plan, _ = g.explain().split("\n\n")
    lines = plan.splitlines()
    assert [line.split()[0] for line in lines[3:]] == g.names
    assert "proven" in lines[3]
    assert "not reached" in lines[-1]


def test_the_graph_is_kept_unless_told_otherwise(task):
    model, losses = task
    kept = losses()
    sw.gradients(kept, model, strategy="twice").backward(WEIGHTS)
    kept.mean().backward()
    freed = losses()
    g = sw.gradients(freed, model, strategy="twice")
    g.backward(WEIGHTS, retain_graph=False)
    with pytest.raises(sw.GraphError, match="freed"):
        g.norms()
