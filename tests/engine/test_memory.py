"""Nothing of size samples x parameters may come into being unless rows are asked for."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.engine.graph.saved import HOOKS_ARE_VISIBLE
from samplewise.testing.case import noise

SAMPLES = 64


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if isinstance(t, torch.Tensor)
        ]
        self.elements = max([self.elements, *made])
        return result


def wide(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(500, 700), nn.ReLU(), nn.Linear(700, 10)), noise(SAMPLES, 500).float()
    if kind == "sequence":
        return nn.Sequential(nn.Linear(400, 600), nn.ReLU(), nn.Linear(600, 10)), noise(SAMPLES, 3, 400).float()
    if kind == "convolution":
        return nn.Sequential(nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 128, 2)), noise(SAMPLES, 64, 4, 4).float()
    if kind == "embedding":
        return nn.Sequential(nn.Embedding(9000, 40), nn.Linear(40, 10)), torch.arange(SAMPLES * 3).view(SAMPLES, 3)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(700, 1000))), noise(SAMPLES, 700).float()


QUESTIONS = {
    "norms": lambda g, d: g.norms(),
    "dot": lambda g, d: g.dot(d),
    "sum": lambda g, d: g.sum(torch.ones(SAMPLES)),
    "project": lambda g, d: g.project(5),
    "sum of squares": lambda g, d: g.sum_of_squares(),
    "variance": lambda g, d: g.variance(),
    "clipped sum": lambda g, d: g.backward(1 / g.norms().clamp_min(1)),
}


def assert_no_rows(kind, question, strategy):
    model, x = wide(kind)
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    largest = max(p.numel() for p in model.parameters())
    with LargestTensor() as seen:
        losses = model(x).flatten(1).square().mean(1)
        QUESTIONS[question](sw.gradients(losses, model, strategy=strategy), direction)
    assert seen.elements < SAMPLES * largest / 3, f"{seen.elements} elements, rows would have {SAMPLES * largest}"


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("strategy", ["fused", "twice"])
@pytest.mark.parametrize("kind", ["linear", "sequence", "convolution", "embedding"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_rows_of_all_samples(kind, question, strategy):
    assert_no_rows(kind, question, strategy)


@pytest.mark.sweep(1 / 14)
@pytest.mark.parametrize("strategy", ["fused", "twice"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_rows_of_all_samples_behind_weight_norm(question, strategy):
    """Without a rule for the weight itself: rows are made in chunks, which takes a second per question."""
    assert_no_rows("weight norm", question, strategy)


def test_rows_in_chunks():
    model, x = wide("linear")
    g = sw.gradients(model(x).square().mean(1), model)
    whole = g.full()
    pieces = list(g.chunks(20))
    assert [len(piece["0.weight"]) for piece in pieces] == [20, 20, 20, 4]
    for name in g.names:
        torch.testing.assert_close(torch.cat([piece[name] for piece in pieces]), whole[name])


def test_twice_keeps_nothing_large():
    model, x = wide("linear")
    g = sw.gradients(model(x).square().mean(1), model, strategy="twice")
    g.norms()
    kept = g._evaluator._strategies["twice"]
    assert not kept.grads and not kept.rows and not kept.versions._versions


class ImageModel(nn.Module):
    """A convolution with rows much smaller than its output, and a linear layer with rows larger than its output."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(2 * 14 * 14, 8)

    def forward(self, x):
        self.hidden = self.stem(x)
        return self.head(self.hidden.tanh().flatten(1)).square().mean(1)


WEIGHTS = torch.tensor([0.5, -2.0, 0.0, 1.0]).double()


def test_second_pass_of_twice_ends_above_layers_whose_rows_are_kept():
    model = ImageModel().double()
    losses = model(noise(4, 1, 16, 16).double())
    g = sw.gradients(losses, model, strategy="twice")
    g.norms()
    assert set(g._evaluator._strategies["twice"].rows) == {"stem.weight", "stem.bias"}
    reached = []
    model.hidden.register_hook(reached.append)
    g.backward(WEIGHTS, retain_graph=True)
    assert not reached
    assert not g._evaluator._strategies["twice"].rows
    expected = torch.autograd.grad(losses, list(model.parameters()), WEIGHTS)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_second_pass_of_twice_is_whole_with_a_hook_on_a_parameter():
    model = ImageModel().double()
    losses = model(noise(4, 1, 16, 16).double())
    (expected,) = torch.autograd.grad(losses, model.stem.weight, WEIGHTS, retain_graph=True)
    g = sw.gradients(losses, model, strategy="twice")
    g.norms()
    model.stem.weight.register_hook(lambda gradient: 3 * gradient)
    g.backward(WEIGHTS)
    torch.testing.assert_close(model.stem.weight.grad, 3 * expected)


@pytest.mark.parametrize(("tokens", "held"), [(2, True), (64, False)])
def test_tensors_that_were_copied_into_rows_are_not_held(tokens, held):
    """With many tokens, rows are smaller than their factors."""
    model = nn.Linear(8, 8, bias=False).double()
    g = sw.gradients(model(noise(3, tokens, 8).double()).square().mean((1, 2)), model)
    g.norms()
    assert bool(g._evaluator._strategies["fused"].versions._versions) == held


def checkpointed_model():
    """A checkpointed block and a head; a list with an entry for each forward pass of the block; a loss function."""
    block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
    model = nn.ModuleDict({"block": block, "head": nn.Linear(6, 3)})
    calls = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))

    def losses_of(x):
        return model["head"](checkpoint(block, x, use_reentrant=False)).square().sum(1)

    return model.double(), calls, losses_of


@pytest.mark.parametrize("strategy", ["fused", "twice"])
def test_checkpointed_blocks_are_recomputed_once_for_the_pass_and_for_reading(strategy):
    model, calls, losses_of = checkpointed_model()
    x = noise(5, 6).double()
    sw.gradients(losses_of(x), model).norms()  # the first time, the ownership is verified with more passes
    g = sw.gradients(losses_of(x), model, strategy=strategy)
    calls.clear()
    g.norms()
    # Torch 2.8 and 2.9 do not show which nodes are in a block: it is recomputed for each layer, too.
    assert len(calls) == (1 if HOOKS_ARE_VISIBLE else 3)


def test_a_checkpointed_block_whose_tensors_the_current_pass_has_consumed():
    """A hook of a backward pass asks for norms; the pass has run the block by then."""
    model, _, losses_of = checkpointed_model()
    x = noise(5, 6).double().requires_grad_()
    losses = losses_of(x)
    expected = sw.gradients(losses_of(x), model).norms()
    found = []
    x.register_hook(lambda _: found.append(sw.gradients(losses, model).norms()))
    losses.sum().backward(retain_graph=True)
    torch.testing.assert_close(found, [expected])
