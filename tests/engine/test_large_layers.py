"""Layers that are large enough for blocks of Gram matrices, for rows in several tensors and for factors of patches."""

import pytest
import torch
from by_loop import assert_as_loop, norms_by_loop, rows_by_loop
from torch import nn

import samplewise as sw
from samplewise.engine.grads import factored
from samplewise.engine.grads.factored import FactoredGrad, OneHot, Term
from samplewise.engine.rules import convolution
from samplewise.engine.rules.convolution import ConvolutionGrad
from samplewise.testing.case import noise as noise_in_float32

TOKENS = [47, 48, 63, 64, 65, 100, 129, 197, 256]


def noise(*shape):
    return noise_in_float32(*shape).double()


def factors(tokens, samples=3):
    return noise(samples, tokens, 90), noise(samples, tokens, 110)


def grad_of(left, right):
    return FactoredGrad([Term(left, right)], (left.shape[2], right.shape[2]))


def rows_of(left, right):
    return torch.einsum("bto,bti->boi", left, right)


@pytest.mark.parametrize("tokens", TOKENS)
def test_norms_from_blocks_of_the_gram_matrix(tokens):
    left, right = factors(tokens)
    expected = rows_of(left, right).flatten(1).square().sum(1)
    torch.testing.assert_close(grad_of(left, right)._squared_norms_by_pairs(True), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", [64, 100])
def test_blocks_are_differentiable(tokens):
    left, right = (f.requires_grad_() for f in factors(tokens))
    expected = torch.autograd.grad(rows_of(left, right).square().sum((1, 2)).sqrt().sum(), (left, right))
    norms = grad_of(left, right)._squared_norms_by_pairs(True).sqrt()
    torch.testing.assert_close(torch.autograd.grad(norms.sum(), (left, right)), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("tokens", [64, 128])
def test_a_sample_that_cancels_between_blocks(tokens):
    left, right = factors(tokens)
    half = tokens // 2
    left[1, half:] = -left[1, :half]
    right[1, half:] = right[1, :half]
    left[1, 0] += 1e-6
    expected = rows_of(left, right).flatten(1).square().sum(1)
    grad = grad_of(left, right)
    torch.testing.assert_close(grad._squared_norms_by_pairs(True), expected, rtol=1e-8, atol=0)
    assert grad._squared_norms_by_pairs(False).isnan().tolist() == [False, True, False]


def test_factors_are_not_changed():
    left, right = factors(64)
    before = left.clone(), right.clone()
    grad_of(left, right)._squared_norms_by_pairs(True)
    torch.testing.assert_close((left, right), before, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fused", "twice"])
@pytest.mark.parametrize("part", [1, 1000, 2**22])
def test_rows_in_several_tensors(monkeypatch, strategy, part):
    monkeypatch.setattr(factored, "LARGEST_PART", part)
    layer, x, weights = nn.Linear(12, 14).double(), noise(5, 60, 12), noise(5)
    losses = layer(x).square().sum((1, 2))
    assert_as_loop(losses, layer, strategy=strategy)
    rows = rows_by_loop(losses, layer)
    g = sw.gradients(losses, layer, strategy=strategy)
    torch.testing.assert_close(g.sum(weights), {n: torch.einsum("b,b...->...", weights, r) for n, r in rows.items()})
    torch.testing.assert_close(g[1:4], {name: r[1:4] for name, r in rows.items()})
    torch.testing.assert_close(g.sum_of_squares(), {name: r.square().sum(0) for name, r in rows.items()})
    torch.testing.assert_close(g.dot({name: r[0] for name, r in rows.items()}), g.gram()[0])


@pytest.mark.parametrize("first", ["head", "embedding"])
@pytest.mark.parametrize("weights", [None, [0.5, -2.0, 3.0], [0.0, 0.0, 2.0]])
def test_sum_of_an_embedding_tied_to_the_head(weights, first):
    head, embedding = noise(3, 10, 40), noise(3, 12, 7)
    inputs, positions = noise(3, 10, 7), torch.arange(36).view(3, 12) % 5
    terms = [Term(head, inputs), Term(OneHot(positions, 40), embedding)]
    grad = FactoredGrad(terms if first == "head" else terms[::-1], (40, 7))
    before = [t.clone() for t in (head, embedding, inputs)]
    w = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    rows = rows_of(head, inputs) + rows_of(nn.functional.one_hot(positions, 40).double(), embedding)
    expected = rows.sum(0) if w is None else torch.einsum("b,boi->oi", w, rows)
    torch.testing.assert_close(grad.sum(w), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad.transpose().sum(w), expected.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([head, embedding, inputs], before, rtol=0, atol=0)


def test_sum_of_a_tied_embedding_is_differentiable():
    table, tokens = noise(9, 4).requires_grad_(), torch.arange(12).view(3, 4) % 9
    losses = (nn.functional.embedding(tokens, table) @ table.T).tanh().square().sum((1, 2))
    weights = noise(3)
    rows = torch.stack([torch.autograd.grad(one, table, create_graph=True)[0] for one in losses])
    expected = torch.autograd.grad(torch.einsum("b,boi->oi", weights, rows).sin().sum(), table, retain_graph=True)
    summed = sw.gradients(losses, {"table": table}, create_graph=True).sum(weights)["table"]
    torch.testing.assert_close(torch.autograd.grad(summed.sin().sum(), table), expected, rtol=1e-10, atol=1e-12)


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(32, 64, 3, padding=1), (32, 4)),
    "2d": (lambda: nn.Conv2d(32, 64, 3, padding=1), (32, 2, 2)),
    "2d, oblong": (lambda: nn.Conv2d(32, 64, (3, 2), stride=(2, 1), padding=(1, 0)), (32, 4, 3)),
    "2d, dilated": (lambda: nn.Conv2d(32, 64, 3, stride=2, padding=2, dilation=2), (32, 3, 4)),
    "3d": (lambda: nn.Conv3d(16, 48, 2), (16, 2, 2, 3)),
    "1x1": (lambda: nn.Conv2d(64, 96, 1), (64, 2, 2)),
}


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, "channels last"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_few_positions(case, memory_format, images):
    make, shape = CONVOLUTIONS[case]
    layer, x, weights = make().double(), noise(4 * images, *shape), noise(4)
    if memory_format == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    losses = layer(x).tanh().flatten(1).square().sum(1).view(4, images).sum(1)
    g = sw.gradients(losses, layer)
    assert "factors" in g.explain()
    assert_as_loop(losses, layer)
    sums = {name: torch.einsum("b,b...->...", weights, r) for name, r in rows_by_loop(losses, layer).items()}
    g.norms()
    torch.testing.assert_close(g.sum(weights), sums)


FEW_CHANNELS = {
    "whole block": (lambda: nn.Conv2d(1, 5, 8, stride=2, padding=2), (1, 14, 14)),
    "filled block": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 6, 5)),
    "oblong": (lambda: nn.Conv2d(2, 5, (4, 3), stride=(3, 1), padding=(1, 0), dilation=(2, 1)), (2, 12, 7)),
    "dilated": (lambda: nn.Conv2d(5, 4, (2, 3), stride=(1, 2), padding=(0, 2), dilation=(1, 2)), (5, 4, 9)),
    "3d": (lambda: nn.Conv3d(3, 4, (3, 2, 1), stride=(2, 1, 1), padding=(1, 0, 1)), (3, 5, 4, 3)),
}


@pytest.fixture
def strips(monkeypatch):
    """A list that gets the number of samples of each chunk whose rows are computed from strips."""
    chunks = []
    by_strips = ConvolutionGrad._rows_by_strips

    def counted(form, start, stop):
        chunks.append(stop - start)
        return by_strips(form, start, stop)

    monkeypatch.setattr(ConvolutionGrad, "_rows_by_strips", counted)
    return chunks


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, "channels last"])
@pytest.mark.parametrize("case", FEW_CHANNELS)
def test_convolutions_of_few_channels(case, memory_format, images, strips, monkeypatch):
    monkeypatch.setattr(convolution, "is_plain", lambda tensor: True)  # also in float64, where no kernel is faster
    monkeypatch.setattr(convolution, "CHUNK", 1500)
    make, shape = FEW_CHANNELS[case]
    layer, x = make().double(), noise(7 * images, *shape)
    if memory_format == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    losses = layer(x).tanh().flatten(1).square().sum(1).view(7, images).sum(1)
    assert_as_loop(losses, layer)
    assert len(strips) > 1


@pytest.mark.parametrize(("kernel_size", "expected"), [(3, [6]), (2, []), (7, [])])
def test_strips_are_used_in_float32_if_they_fill_a_block_of_channels(kernel_size, expected, strips):
    layer, x = nn.Conv2d(3, 5, kernel_size), noise(6, 3, 9, 9)
    norms = sw.gradients(layer(x.float()).square().flatten(1).sum(1), layer).norms()
    assert strips == expected
    torch.testing.assert_close(norms.double(), norms_by_loop(layer.double()(x).square().flatten(1).sum(1), layer))


def test_rows_from_strips_are_differentiable(strips):
    layer, x = nn.Conv2d(3, 4, 3), noise(2, 3, 5, 5).float()
    losses = layer(x).square().flatten(1).sum(1)
    rows = torch.stack([torch.autograd.grad(one, layer.weight, create_graph=True)[0] for one in losses])
    expected = torch.autograd.grad(rows.sin().sum(), layer.weight, retain_graph=True)
    found = sw.gradients(losses, {"weight": layer.weight}, create_graph=True)["weight"]
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), layer.weight), expected, rtol=1e-4, atol=1e-4)
    assert strips
