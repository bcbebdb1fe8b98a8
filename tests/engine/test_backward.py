"""`g.backward`: what lands in `.grad`, and who is told of it."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.engine.graph.saved import HOOKS_ARE_VISIBLE
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


def test_further_questions_if_the_graph_is_retained(task):
    model, losses = task
    g = sw.gradients(losses(), model)
    norms = g.norms().clone()
    g.backward(WEIGHTS, retain_graph=True)
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


# ------------------------------------------------------------- the graph is freed, as in torch

FREED = r"g\.backward\(\) has freed the graph: ask before it, or use g\.backward\(retain_graph=True\)"
QUESTIONS = {
    "norms": lambda g: g.norms(),
    "dot": lambda g: g.dot(dict(g._parameters)),
    "gram": lambda g: g.gram(),
    "project": lambda g: g.project(2),
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "sum of squares": lambda g: g.sum_of_squares(),
    "full": lambda g: g.full(),
    "a row": lambda g: g[0],
    "explain": lambda g: g.explain(),
    "backward": lambda g: g.backward(),
    "backward by parameter": lambda g: g.backward(dict.fromkeys(g.names, 1.0)),
}


def masked_losses(model, samples=5):
    """Losses, and a weak reference to a tensor that only their graph holds."""
    mask = torch.linspace(0.1, 1, samples).double()
    losses = (model(torch.randn(samples, 3).double()).tanh() * mask[:, None]).square().sum(1)
    return losses, ref(mask)


def small_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_the_graph_is_freed(strategy, samples, hook, norms):
    model = small_net()
    if hook:
        model[0].weight.register_hook(lambda g: g)
    losses, mask = masked_losses(model, samples)
    expected = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
    g = sw.gradients(losses, model, strategy=strategy)
    before = g.norms() if norms else None
    g.backward(retain_graph=True)
    assert mask() is not None
    g.backward()
    assert mask() is None
    for p, once in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, 2 * once)
    for name, ask in QUESTIONS.items():
        if not (norms and name == "norms"):
            with pytest.raises(sw.GraphError, match=FREED):
                ask(g)
    if norms:
        assert torch.equal(g.norms(), before)
    assert len(g) == samples and g.names == list(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match=f"{FREED}|second time"):
        losses.sum().backward()
    with pytest.raises(sw.GraphError, match="freed"):
        sw.gradients(losses, model).norms()


def test_the_loss_above_the_outputs_is_freed():
    model = small_net()
    logits = model(torch.randn(5, 3).double())
    weights = torch.rand(5).double()
    held = ref(weights)
    loss = (logits.square().sum(1) * weights).sum()
    del weights
    sw.gradients(loss, model, outputs=logits).backward()
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match=FREED):
        loss.backward()


def test_checkpointed_blocks_are_freed():
    model = small_net()
    x = torch.randn(5, 3).double()
    held = ref(x)
    losses = checkpoint(model, x, use_reentrant=False).square().sum(1)
    del x
    g = sw.gradients(losses, model)
    g.norms()
    g.backward(WEIGHTS.double())
    if HOOKS_ARE_VISIBLE:
        gc.collect()
        assert held() is None
        with pytest.raises(RuntimeError, match=FREED):
            losses.sum().backward()


def test_a_graph_with_saved_tensor_hooks_of_the_user():
    """What they have packed is not freed: a later pass is as before."""
    model = small_net()
    with torch.autograd.graph.save_on_cpu():
        losses, _ = masked_losses(model)
    g = sw.gradients(losses, model)
    g.backward(WEIGHTS.double())
    with pytest.raises(sw.GraphError, match=FREED):
        g.sum()
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses.backward(WEIGHTS.double())
    torch.testing.assert_close([p.grad for p in model.parameters()], first)


def test_only_the_graph_of_the_parameters_is_freed():
    """As by torch.autograd.backward(losses, inputs=...)."""
    model = small_net()
    hidden = model[:2](torch.randn(5, 3).double())
    losses = model[2](hidden).square().sum(1)
    sw.gradients(losses, model[2]).backward()
    assert model[0].weight.grad is None
    hidden.sum().backward()
    assert model[0].weight.grad is not None


def test_a_failed_backward_frees_nothing(task):
    model, losses = task
    g = sw.gradients(losses(), model)
    with pytest.raises(sw.ParameterError, match="weights must be finite"):
        g.backward(torch.full((5,), torch.nan))
    expected = weighted(model, losses)
    model.zero_grad()
    g.backward(WEIGHTS)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def test_backward_with_create_graph_frees_the_graph_of_its_results():
    model = small_net()
    losses, _ = masked_losses(model)
    g = sw.gradients(losses, model, create_graph=True)
    penalty = g.norms().var()
    g.backward(retain_graph=True)
    penalty.backward(retain_graph=True)
    g.backward()
    with pytest.raises(RuntimeError, match=FREED):
        penalty.backward()


def test_gradients_of_a_scan_are_freed():
    model = small_net()
    x = torch.randn(6, 3).double()
    for _, g in sw.scan(model, lambda m, b: m(b).square().sum(1), [x], microbatch=4):
        g.backward()
        with pytest.raises(sw.GraphError, match=FREED):
            g.sum()
    total = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], total)
