"""Quantized layers with trained adapters (QLoRA): exact, and their ownership is derived once per structure."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import rows_by_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.engine.ownership import local_probe
from samplewise.errors import SamplesInteractError

B, T, D = 4, 3, 64


class Product(torch.autograd.Function):
    """Product with a frozen weight, which may begin to mix samples in the backward pass."""

    mixes = False

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight, x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        weight, x = ctx.saved_tensors
        return (gradient + gradient.mean(0) * x.mean() if Product.mixes else gradient) @ weight, None


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(D, D) / 8)

    def forward(self, x):
        return Product.apply(x, self.weight)


def bitsandbytes(kind):
    """Function that makes a layer of bitsandbytes with random weights."""
    bnb = pytest.importorskip("bitsandbytes")

    def make():
        if kind == "nf4":
            layer = bnb.nn.Linear4bit(D, D, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        else:
            layer = bnb.nn.Linear8bitLt(D, D, bias=False, has_fp16_weights=False)
        return layer.to("cpu")

    return make


class Adapted(nn.Module):
    """Frozen layers, each with an adapter of rank 2 beside it."""

    def __init__(self, make, layers=3, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(make().requires_grad_(False) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(D, 2) / 8) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(2, D)) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):

            def block(h, layer=layer, down=down, up=up):
                return F.gelu(layer(h) + h @ down @ up)

            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean((1, 2))


def assert_exact(model, x, rtol):
    """Norms and clipped sum, compared with one backward pass per sample."""
    losses = model(x)
    rows = rows_by_loop(losses, {name: p for name, p in model.named_parameters() if p.requires_grad})
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    g = sw.gradients(losses, model)
    torch.testing.assert_close(g.norms(), norms, rtol=rtol, atol=0)
    sums = g.sum(1 / norms)
    for name, r in rows.items():
        torch.testing.assert_close(sums[name], torch.einsum("b...,b->...", r, 1 / norms), rtol=rtol, atol=rtol)


def counted_calls(monkeypatch):
    calls = []

    def call(node, gradients):
        calls.append(node)
        return original(node, gradients)

    original = local_probe.call
    monkeypatch.setattr(local_probe, "call", call)
    return calls


@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_layers_are_exact_and_one_of_them_is_verified_in_each_step(checkpointed, monkeypatch):
    torch.manual_seed(0)
    model = Adapted(Frozen, 3 + checkpointed, checkpointed).double()
    for _ in range(3):
        assert_exact(model, torch.randn(B, T, D, dtype=torch.double), 1e-9)
    calls = counted_calls(monkeypatch)
    sw.gradients(model(torch.randn(B, T, D, dtype=torch.double)), model).norms()
    assert len(calls) == (not checkpointed)


def test_a_frozen_layer_that_begins_to_mix_samples_is_noticed(monkeypatch):
    torch.manual_seed(0)
    model = Adapted(Frozen, layers=2).double()

    def norms():
        return sw.gradients(model(torch.randn(B, T, D, dtype=torch.double)), model).norms()

    for _ in range(3):
        norms()
    monkeypatch.setattr(Product, "mixes", True)
    with pytest.raises(SamplesInteractError, match="must not depend on other samples"):
        norms()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_of_bitsandbytes(kind, monkeypatch):
    torch.manual_seed(0)
    model = Adapted(bitsandbytes(kind))
    for _ in range(2):
        assert_exact(model, torch.randn(B, T, D), 1e-5)
    calls = counted_calls(monkeypatch)
    sw.gradients(model(torch.randn(B, T, D)), model).norms()
    assert len(calls) == 1
