"""Asking changes nothing: not the model, its buffers, .grad, flags, nor any random generator; nor does failing."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from zoo import CASES, INDEPENDENT, INTERACTING

import samplewise as sw
from samplewise.testing.case import noise, squared_loss
from samplewise.testing.compare import other_losses, probe_for
from samplewise.testing.oracle import wanted

QUESTIONS = {
    "norms": lambda g, p: g.norms(),
    "norms by parameter": lambda g, p: g.norms(by="parameter"),
    "dot": lambda g, p: g.dot(p.direction),
    "gram": lambda g, p: g.gram(),
    "sum": lambda g, p: g.sum(p.weights),
    "mean": lambda g, p: g.mean(),
    "sum of squares": lambda g, p: g.sum_of_squares(),
    "variance": lambda g, p: g.variance(),
    "project": lambda g, p: g.project(4),
    "full": lambda g, p: g.full(),
    "sample": lambda g, p: g[1],
    "name": lambda g, p: g[g.names[0]],
    "explain": lambda g, p: str(g.explain()),
    "repr": lambda g, p: repr(g),
}
VARIED = (
    "causal_language_model_with_tied_head",
    "batch_norm_in_eval_mode",
    "checkpointed_dropout",
    "dropout_with_one_mask",
    "lstm_batch_first",
    "spectral_norm_in_eval_mode",
    "experts_chosen_per_token",
    "custom_function_that_saves",
)


class Snapshot:
    """Everything that must not change."""

    def __init__(self, model, *others):
        self.model = model
        self.tensors = [*model.parameters(), *model.buffers(), *others]
        self.values = [t.detach().clone() for t in self.tensors]
        self.grads = [p.grad for p in model.parameters()]
        self.grad_values = [None if g is None else g.clone() for g in self.grads]
        self.state = self.read()

    def read(self):
        """What can be compared with ==."""
        return {
            "versions": [t._version for t in self.tensors],
            "flags": [(m.training, len(m._forward_hooks), len(m._backward_hooks)) for m in self.model.modules()],
            "wanted": [p.requires_grad for p in self.model.parameters()],
            "hooks": [len(p._backward_hooks or ()) for p in self.model.parameters()],
            "torch's generator": torch.get_rng_state().tolist(),
            "Python's generator": random.getstate(),
            "NumPy's generator": repr(np.random.get_state()),
            "settings": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")),
        }

    def assert_unchanged(self):
        assert all(torch.equal(t.detach(), value) for t, value in zip(self.tensors, self.values, strict=True))
        grads = [p.grad for p in self.model.parameters()]
        assert all(a is b for a, b in zip(grads, self.grads, strict=True))
        assert all(a is None or torch.equal(a, b) for a, b in zip(grads, self.grad_values, strict=True))
        state = self.read()
        changed = [name for name, value in self.state.items() if state[name] != value]
        assert not changed, f"changed: {changed}"


def started(case, with_grad=True):
    model, inputs = case.build()
    if with_grad:
        for p in wanted(model).values():
            p.grad = torch.ones_like(p)
    losses = case.losses(model, inputs)
    return model, losses, Snapshot(model, losses, *[x for x in inputs if x.is_floating_point()])


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("question", QUESTIONS)
def test_after_every_question(name, strategy, question):
    model, losses, before = started(CASES[name])
    QUESTIONS[question](sw.gradients(losses, model, strategy=strategy), probe_for(wanted(model), len(losses)))
    before.assert_unchanged()


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.name)
def test_norms_and_sum_of_every_animal_then_an_ordinary_backward(case):
    model, losses, before = started(case, with_grad=False)
    g = sw.gradients(losses, model)
    norms, total = g.norms(), g.mean()
    before.assert_unchanged()
    losses.mean().backward()
    for p, (name, mean) in zip(wanted(model).values(), total.items(), strict=True):
        found = torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        torch.testing.assert_close(found, mean, rtol=1e-9, atol=1e-12, msg=name)
    assert torch.equal(norms, g.norms())


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
def test_losses_can_go_backward_afterwards(name, strategy):
    model, losses, _ = started(CASES[name], with_grad=False)
    mean = sw.gradients(losses, model, strategy=strategy).mean()
    losses.mean().backward()
    for key, p in wanted(model).items():
        torch.testing.assert_close(p.grad, mean[key], rtol=1e-9, atol=1e-12)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("case", INTERACTING, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", [None, "twice"])
def test_after_a_refusal(case, strategy):
    model, losses, before = started(case)
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients(losses, model, strategy=strategy).norms()
    before.assert_unchanged()
    losses.mean().backward()


@pytest.mark.parametrize("strategy", [None, "twice", "full"])
def test_after_an_exception_in_the_middle_of_a_backward(strategy):
    """A hook of the user's raises while gradients flow."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    hidden = model[0](noise(5, 6))
    armed = [True]

    def explode(_):
        if armed[0]:
            raise ArithmeticError("the user's own")

    hidden.register_hook(explode)
    losses = squared_loss(model[2](model[1](hidden)))
    before = Snapshot(model, losses)
    with pytest.raises((ArithmeticError, sw.SamplewiseError)):
        sw.gradients(losses, model, strategy=strategy).norms()
    before.assert_unchanged()
    armed[0] = False
    losses.mean().backward()


def test_after_wrong_questions():
    model, losses, before = started(CASES["linear_on_sequences"])
    g = sw.gradients(losses, model)
    for ask in (lambda: g.sum(torch.ones(3)), lambda: g.dot({}), lambda: g["nose"], lambda: g[77]):
        with pytest.raises((sw.SamplewiseError, LookupError)):
            ask()
        before.assert_unchanged()
    g.norms()
    before.assert_unchanged()


@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
def test_backward_changes_grad_alone(strategy):
    case = CASES["causal_language_model_with_tied_head"]
    model, inputs = case.build()
    losses = case.losses(model, inputs)
    before = Snapshot(model, losses)
    sw.gradients(losses, model, strategy=strategy).backward()
    assert all(p.grad is not None and not p.grad.requires_grad for p in model.parameters())
    for p in model.parameters():
        p.grad = None
    before.assert_unchanged()


def test_a_second_pair_of_gradients():
    model, losses, before = started(CASES["conv2d"])
    sw.gradients(losses, model).gram(sw.gradients(other_losses(losses), model))
    before.assert_unchanged()


def test_create_graph_changes_nothing_either():
    model, losses, before = started(CASES["layer_norm"])
    penalty = sw.gradients(losses, model, create_graph=True).norms().sum()
    before.assert_unchanged()
    torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    before.assert_unchanged()


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def classifier():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model.eval(), (noise(9, 6), torch.arange(9) % 3)


def test_check():
    model, batch = classifier()
    before = Snapshot(model, batch[0])
    assert str(sw.check(model, loss_fn, batch))
    before.assert_unchanged()


def test_check_of_a_model_in_training_mode():
    model, batch = classifier()
    model.train()
    before = Snapshot(model, batch[0])
    with contextlib.suppress(sw.SamplewiseError):
        sw.check(model, loss_fn, batch)
    before.assert_unchanged()


@pytest.mark.parametrize("microbatch", [4, "auto"])
def test_scan(microbatch):
    model, (x, y) = classifier()
    before = Snapshot(model, x)
    found = torch.cat(
        [g.norms() for _, g in sw.scan(model, loss_fn, [(x[:5], y[:5]), (x[5:], y[5:])], microbatch=microbatch)]
    )
    before.assert_unchanged()
    torch.testing.assert_close(found, sw.gradients(loss_fn(model, (x, y)), model).norms())


def test_input_gradients():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = noise(5, 6).requires_grad_()
    losses = squared_loss(model(x))
    before = Snapshot(model, losses)
    sw.input_gradients(losses, x)
    before.assert_unchanged()
    assert x.grad is None
    losses.mean().backward()
