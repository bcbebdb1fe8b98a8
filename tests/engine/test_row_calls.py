"""Heads that are fused with the loss: exact, with calls of their backward that get the rows of each sample alone."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.engine import row_calls
from samplewise.errors import SamplesMayInteractWarning

B, T, D, V = 4, 5, 6, 11


def slopes(x, weight, bias, labels):
    """d cross-entropy / d logits"""
    return (x @ weight.t() + bias).softmax(-1) - F.one_hot(labels, V)


class Head(torch.autograd.Function):
    """Losses and largest logits of rows (N, D); the backward takes two rows at a time."""

    calls = None  # list of the numbers of rows of each call
    change = None  # of the gradients in the backward pass

    @staticmethod
    def forward(ctx, x, weight, bias, labels, scale):
        ctx.save_for_backward(x, weight, bias)
        ctx.labels = labels
        ctx.scale = scale
        logits = x @ weight.t() + bias
        return scale * F.cross_entropy(logits, labels, reduction="none"), logits.amax(1)

    @staticmethod
    def backward(ctx, gradient, of_largest):
        x, weight, bias = ctx.saved_tensors
        Head.calls.append(len(gradient))
        of_x, of_weight, of_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for rows in torch.arange(len(x)).split(2):
            logits = x[rows] @ weight.t() + bias
            s = ctx.scale * gradient[rows, None] * slopes(x[rows], weight, bias, ctx.labels[rows])
            s = s + of_largest[rows, None] * F.one_hot(logits.argmax(1), V)
            of_x[rows] = s @ weight
            of_weight += s.t() @ x[rows]
            of_bias += s.sum(0)
        if Head.change is not None:
            of_x, of_weight = Head.change(of_x, of_weight, x)
        return of_x, of_weight, of_bias, None, None


class Model(nn.Module):
    def __init__(self, tied=False, both=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.weight = self.embedding.weight if tied else nn.Parameter(torch.randn(V, D))
        self.bias = nn.Parameter(torch.randn(V))
        self.both = both
        self.double()

    def forward(self, tokens, mask=None):
        h = torch.tanh(self.layer(self.embedding(tokens)))[:, :-1]
        labels = tokens[:, 1:]
        if mask is not None:  # other rows are not computed, as in TRL on GPUs
            losses, _ = Head.apply(h[mask], self.weight, self.bias, labels[mask], 2.0)
            return h.new_zeros(mask.shape).masked_scatter(mask, losses).sum(1)
        losses, largest = Head.apply(h.flatten(0, 1), self.weight, self.bias, labels.flatten(), 2.0)
        return (losses + largest**2 if self.both else losses).view(labels.shape).mean(1)


def tokens(size=B):
    return torch.randint(V, (size, T + 1))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(Head, "calls", [])
    monkeypatch.setattr(Head, "change", None)
    return Head.calls


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "large"])
@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"both": True}], ids=["one output", "tied", "two outputs"])
def test_fused_heads(kind, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(row_calls, "KEPT", 0)
        monkeypatch.setattr(row_calls, "LARGE", 0)
    model = Model(**kind)
    for size in (B, B, 3):
        assert_as_loop(model(tokens(size)), model)
    losses = model(tokens())
    Head.calls.clear()
    g = sw.gradients(losses, model)
    g.norms()
    assert max(Head.calls) == T  # neither the pass nor the verification needs the rows of the batch
    Head.calls.clear()
    g.sum(torch.rand(B))
    assert Head.calls == ([] if kept else [B * T] * 2)


def test_rows_that_differ_in_number():
    model = Model()
    for step in range(3):
        mask = torch.rand(B, T, generator=torch.Generator().manual_seed(step)) < 0.6
        mask[0] = step == 0  # a sample without rows
        assert_as_loop(model(tokens(), mask), model)


def test_losses_of_the_batch_through_the_losses_of_tokens():
    model = Model()
    for _ in range(2):
        batch = tokens()
        losses = model(batch)
        stats = sw.backward(losses.sum(), model, outputs=losses, transforms=[sw.clip(1.0)])
        torch.testing.assert_close(stats.norms, sw.gradients(model(batch), model).norms())


def test_the_remedy_for_hidden_states_as_outputs():
    """A trained head is not below the hidden states: the message names it, and what it advises is exact."""
    model = Model()
    batch = tokens()
    h = torch.tanh(model.layer(model.embedding(batch)))[:, :-1]
    losses, _ = Head.apply(h.flatten(0, 1), model.weight, model.bias, batch[:, 1:].flatten(), 2.0)
    losses = losses.view(B, T)
    message = "Function 'Head' computes it from outputs and from 'weight', as a trained head that is fused with the "
    with pytest.raises(sw.GraphError, match=message):
        sw.gradients(losses.sum(), model, outputs=h)
    norms = sw.gradients(losses.sum(), model, outputs=losses).norms()
    torch.testing.assert_close(norms, sw.gradients(model(batch) * T, model).norms())
    penalized = (losses.sum() + model.weight.square().sum(), losses)
    with pytest.raises(sw.GraphError, match="depends on 'weight' on another path, as a penalty on weights"):
        sw.gradients(penalized[0], model, outputs=penalized[1])


# Functions that do not treat rows apart: one call of their backward per sample, or a refusal.
CHANGES = {
    "number of rows": lambda of_x, of_weight, x: (of_x, of_weight / len(x)),
    "mean of the rows": lambda of_x, of_weight, x: (of_x, of_weight * x.mean()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("later", [False, True])
def test_rows_that_depend_on_each_other(change, later, monkeypatch):
    """The rows are those of the backward as it is, which need not be a derivative."""
    model = Model(both=later)  # another structure
    if later:
        assert_as_loop(model(tokens()), model)
    monkeypatch.setattr(Head, "change", CHANGES[change])
    for _ in range(2):
        assert_as_loop(model(tokens()), model)


@pytest.mark.parametrize("later", [False, True])
def test_a_head_that_mixes_samples_is_noticed(later, monkeypatch):
    model = Model(tied=True, both=later)  # another structure
    if later:
        assert_as_loop(model(tokens()), model)
    monkeypatch.setattr(Head, "change", lambda of_x, of_weight, x: (of_x + of_x.mean(0), of_weight))
    with pytest.warns(SamplesMayInteractWarning, match=r"Function 'Head' .* mixes samples"):
        sw.gradients(model(tokens()), model).norms()


def test_a_head_that_is_not_linear_is_refused(monkeypatch):
    model = Model()
    assert_as_loop(model(tokens()), model)
    monkeypatch.setattr(Head, "change", lambda of_x, of_weight, x: (of_x.sign(), of_weight.sign()))
    with pytest.raises(sw.GraphError, match="the backward of Function 'Head' is not linear"):
        sw.gradients(model(tokens()), model).norms()
