"""What was saved for backward and is modified in place later is noticed, as autograd notices it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.testing.case import Net, noise

QUESTIONS = {
    "sum": lambda g: g.sum(),
    "full": lambda g: g.full(),
    "gram": lambda g: g.gram(),
    "dot": lambda g: g.dot({n: torch.ones_like(p) for n, p in g._parameters.items()}),
    "sum_of_squares": lambda g: g.sum_of_squares(),
    "variance": lambda g: g.variance(),
    "project": lambda g: g.project(4),
    "backward": lambda g: g.backward(),
    "row": lambda g: g[0],
    "mean": lambda g: g.mean(),
}
MODIFIED = "must not change before the last use .* modified in place"


def linear():
    x = noise(5, 40)
    return nn.Linear(40, 30), x, x


def embedding():
    ids = torch.arange(10).view(5, 2)
    return Net(lambda m, ids: m.e(ids).flatten(1), e=nn.Embedding(60, 40)), ids, ids


def convolution():
    x = noise(5, 2, 6, 6)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten()), x, x


def scale():
    x = noise(5, 6)
    return Net(lambda m, x: m.s * x, s=nn.Parameter(torch.ones(6))), x, x


def positions():
    """A position embedding, looked up once and added to every sample."""
    x, ids = noise(5, 3, 40), torch.arange(3)
    return Net(lambda m, x: (x + m.e(ids)).flatten(1), e=nn.Embedding(80, 40)), x, ids


def lstm():
    x = noise(4, 5, 6)
    return Net(lambda m, x: m.f(x)[0].transpose(0, 1).flatten(1), f=nn.LSTM(6, 4)), x, x


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("case", [linear, embedding])
def test_refilled_after_the_norms(case, question):
    model, x, buffer = case()
    g = sw.gradients(model(x).square().sum(1), model)
    norms = g.norms()
    buffer.zero_()
    with pytest.raises(sw.GraphError, match=MODIFIED):
        QUESTIONS[question](g)
    assert torch.equal(g.norms(), norms)  # known before


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("case", [convolution, scale, lstm])
def test_rows_copied_with_the_norms_are_not_affected(case, question):
    model, x, buffer = case()
    expected = QUESTIONS[question](sw.gradients(model(x).square().sum(1), model))
    g = sw.gradients(model(x).square().sum(1), model)
    g.norms()
    if question == "backward":
        expected = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
    buffer.zero_()
    found = QUESTIONS[question](g)
    if question == "backward":
        found = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(found, expected)
    assert all(value.any() for value in (expected.values() if isinstance(expected, dict) else [expected]))


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
@pytest.mark.parametrize("case", [linear, embedding, convolution, scale, positions, lstm])
def test_refilled_before_the_first_question(case, strategy):
    model, x, buffer = case()
    g = sw.gradients(model(x).tanh().square().sum(1), model, strategy=strategy)
    buffer.add_(1)
    if case is positions:
        with pytest.raises(sw.GraphError, match=MODIFIED):
            g.full()
        return
    with pytest.raises(sw.GraphError, match=MODIFIED):
        g.norms()


def test_a_slice_of_the_buffer_counts():
    layer, x = nn.Linear(40, 30), noise(5, 40)
    g = sw.gradients(layer(x).square().sum(1), layer)
    g.norms()
    x[3, 2] = 7.0
    with pytest.raises(sw.GraphError, match=MODIFIED):
        g.sum()


def test_the_base_of_a_view_counts():
    layer, ring = nn.Linear(40, 30), noise(10, 40)
    g = sw.gradients(layer(ring[:5]).square().sum(1), layer)
    g.norms()
    ring.copy_(noise(10, 40) + 1)
    with pytest.raises(sw.GraphError, match=MODIFIED):
        g.sum()


def test_an_activation_modified_in_place_counts():
    a, b = nn.Linear(40, 30), nn.Linear(30, 20)
    h = a(noise(5, 40)).tanh()
    g = sw.gradients(b(h).square().sum(1), {"b": b.weight})
    g.norms()
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(sw.GraphError, match=MODIFIED):
        g.sum()


def test_the_other_side_of_a_gram_matrix_counts():
    layer, x, y = nn.Linear(40, 30), noise(5, 40), noise(6, 40)
    g = sw.gradients(layer(x).square().sum(1), layer)
    h = sw.gradients(layer(y).square().sum(1), layer)
    h.norms()
    y.zero_()
    with pytest.raises(sw.GraphError, match=MODIFIED):
        g.gram(h)


@pytest.mark.parametrize("strategy", ["fused", "twice", "reference"])
def test_losses_modified_in_place(strategy):
    layer, x = nn.Linear(4, 3), noise(5, 4)
    losses = layer(x).square().sum(1)
    g = sw.gradients(losses, layer, strategy=strategy)
    losses *= 3
    with pytest.raises(sw.GraphError, match="losses must not be modified in place while their gradients are in use"):
        g.norms()
    with pytest.raises(sw.GraphError, match="losses must not be modified in place while their gradients are in use"):
        g.backward()


def test_an_optimizer_step_between_two_questions_is_allowed():
    """The rows of what was kept do not depend on the weights any more."""
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)), noise(5, 2, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 1]), reduction="none")
    g = sw.gradients(losses, model)
    g.norms()
    expected = g.sum()
    for name, p in model.named_parameters():
        p.grad = expected[name].clone()
    optimizer.step()
    for name, found in g.sum().items():
        assert torch.equal(found, expected[name])


STEPPED = r"modified in place after the forward pass: a parameter, for example by optimizer\.step\(\), or an input\."


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def stepped(head=None, wrap=lambda call, x: call(x)):
    """Losses of a network whose parameters an optimizer has changed since."""
    head = nn.Linear(8, 3) if head is None else head
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), head), noise(5, 6)
    logits = wrap(model, x)
    losses = logits.square().sum(1)
    losses.mean().backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, x, logits, losses


@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
def test_an_optimizer_step_before_the_first_question_is_named(strategy):
    model, _, _, losses = stepped()
    with pytest.raises(sw.GraphError, match=STEPPED):
        sw.gradients(losses, model, strategy=strategy).norms()
    with pytest.raises(sw.GraphError, match=STEPPED):  # again
        sw.gradients(losses, model, strategy=strategy).sum()
    with pytest.raises(RuntimeError):
        losses.sum().backward()


def test_an_optimizer_step_is_named_in_other_calls():
    model, x, _, losses = stepped()
    with pytest.raises(sw.GraphError, match=STEPPED):
        sw.gradients(losses, model).backward()
    model, x, logits, losses = stepped()
    with pytest.raises(sw.GraphError, match=STEPPED):
        sw.backward(losses.mean(), model, outputs=logits, transforms=[sw.clip(1.0)], denominator=5)
    model, x, logits, losses = stepped(wrap=lambda call, x: call(x.requires_grad_()))
    with pytest.raises(sw.GraphError, match=STEPPED):
        sw.input_gradients(losses, x)


def test_an_optimizer_step_is_named_for_a_custom_function():
    head = Net(lambda m, x: Scale.apply(x, m.w), w=nn.Parameter(noise(3, 8)))
    model, _, _, losses = stepped(head)
    with pytest.raises(sw.GraphError, match=STEPPED):
        sw.gradients(losses, model).norms()
