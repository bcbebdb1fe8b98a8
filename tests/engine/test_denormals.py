"""Gradients that vanish: denormal numbers lose bits, and their samples are still known."""

import pytest
import torch
from by_loop import rows_by_loop
from torch import nn

import samplewise as sw
from samplewise.engine import backward
from samplewise.testing.case import Net, noise

B = 8


def assert_rows(losses, model, rtol, **options):
    """Rows, norms and sums; the tolerance is relative to the largest element of each parameter's rows."""
    g = sw.gradients(losses, model, **options)
    rows = rows_by_loop(losses, model)
    by_parameter = g.norms(by="parameter")
    full, sums = g.full(), g.sum()
    for name, row in rows.items():
        exact = row.double()
        size = float(exact.abs().max())
        tiny = torch.finfo(row.dtype).tiny
        assert float((full[name].double() - exact).abs().max()) <= rtol * size + 0.01 * tiny
        assert float((sums[name].double() - exact.sum(0)).abs().max()) <= B * (rtol * size + 0.01 * tiny)
        norms = (exact / max(size, tiny)).flatten(1).norm(dim=1) * max(size, tiny)  # squares would underflow
        assert float((by_parameter[name].double() - norms).abs().max()) <= 10 * (rtol * float(norms.max()) + tiny)


def last_states(layer, T, dtype):
    """Losses of the last state of sequences of different lengths."""
    torch.manual_seed(0)
    layer = layer.to(dtype)
    x, lengths = torch.randn(B, T, 8).to(dtype), torch.randint(T // 2, T + 1, (B,))
    return layer(x)[0][torch.arange(B), lengths - 1].square().sum(1), layer


RECURRENT = {
    "RNN": (nn.RNN, 200, torch.float32),
    "RNN, relu": (lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), 150, torch.float32),
    "RNN, two layers": (lambda *a, **k: nn.RNN(*a, num_layers=2, **k), 150, torch.float32),
    "GRU": (nn.GRU, 300, torch.float32),
    "LSTM": (nn.LSTM, 300, torch.float32),
    "LSTM, float64": (nn.LSTM, 300, torch.float64),
    "RNN, bfloat16": (nn.RNN, 150, torch.bfloat16),
    "RNN, float64": (nn.RNN, 1000, torch.float64),
}


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name):
    make, T, dtype = RECURRENT[name]
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for _ in range(2):
        losses, layer = last_states(make(8, 16, batch_first=True), T, dtype)
        assert_rows(losses, layer, rtol)


@pytest.mark.parametrize("strategy", ["twice", "full"])
def test_other_strategies(strategy):
    losses, layer = last_states(nn.RNN(8, 16, batch_first=True), 120, torch.float32)
    assert_rows(losses, layer, 1e-5, strategy=strategy)


def test_no_more_passes_than_samples_need(monkeypatch):
    """Codes, balanced passes, and switched passes, of which the number is logarithmic."""
    losses, layer = last_states(nn.RNN(8, 16, batch_first=True), 200, torch.float32)
    passes = []
    run = backward._gradients  # passes from the losses, without those from views of a weight to the weight
    monkeypatch.setattr(backward, "_gradients", lambda *args: passes.append(1) or run(*args))
    sw.gradients(losses, layer).norms()
    assert 0 < len(passes) <= 20


def stacked(activation, depth, scale):
    def forward(m, x):
        for layer in m.layers:
            x = activation(layer(x) * scale)
        return x[torch.arange(B).flip(0)].square().sum(1)

    torch.manual_seed(0)
    return Net(forward, layers=nn.ModuleList([nn.Linear(6, 6) for _ in range(depth)]))


STACKS = {
    "sigmoid": lambda: stacked(torch.sigmoid, 60, 1.0),
    "tanh": lambda: stacked(torch.tanh, 80, 0.5),
    "saturated tanh": lambda: stacked(torch.tanh, 12, 20.0),
    "small weights": lambda: stacked(lambda h: h, 12, 1e-3),
    "softplus": lambda: stacked(nn.functional.softplus, 60, 0.3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_deep_stacks(name, dtype):
    model = STACKS[name]().to(dtype)
    assert_rows(model(noise(B, 6).to(dtype)), model, 1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("digits", [20, 30, 36, 38, 40, 44])
def test_small_losses(digits, dtype):
    """Also losses that are denormal themselves, all of them or one beside others."""
    size = 10.0**-digits if dtype is not torch.float64 else 10.0 ** (-7 * digits)
    layer = nn.Linear(6, 5).to(dtype)
    order = torch.randperm(B)
    x = noise(B, 6).to(dtype)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert_rows(layer(x)[order].square().sum(1) * size, layer, rtol)
    scale = torch.ones(B).to(dtype)
    scale[::2] = size
    assert_rows(layer(x)[order].square().sum(1) * scale, layer, rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_with_sharp_scores(dtype):
    """Weights of exp(-80) and less in the softmax, and ownership that is probed."""
    torch.manual_seed(0)
    model = Net(None, q=nn.Linear(6, 6), k=nn.Linear(6, 6, bias=False), v=nn.Linear(6, 6)).to(dtype)
    for size in (1, 10, 30, 60):
        x = noise(B, 5, 6).to(dtype)
        scores = model.q(x) @ model.k(x).mT * size
        mixed = scores.softmax(-1) @ model.v(x)
        losses = mixed[torch.arange(B), torch.randint(5, (B,))].square().sum(1)
        assert_rows(losses, model, 1e-4 if dtype is torch.float32 else 2e-2, interacting="allow")


def test_long_products_of_positions():
    torch.manual_seed(0)
    layer = nn.Linear(6, 1)
    x = noise(B, 120, 6)
    decay = torch.sigmoid(layer(x)).squeeze(2).cumprod(1)
    losses = decay[torch.arange(B), torch.randint(60, 120, (B,))]
    assert_rows(losses, layer, 1e-4)


def test_float16_denormals_have_owners():
    """The denormals of float16 begin at 6e-5: they are not small."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5).half()
    for size in (1e-1, 1e-3, 1e-4):
        order = torch.randperm(B)
        assert_rows(layer(noise(B, 6).half())[order].square().sum(1) * size, layer, 2e-2)


def test_samples_that_share_denormal_elements_still_interact():
    layer = nn.Linear(6, 5)
    shared = layer(noise(B, 6))
    order = torch.arange(B)
    order[1] = 0
    losses = (shared - shared.mean(0))[order].square().sum(1) * 1e-38
    with pytest.raises(sw.SamplesInteractError, match="must not depend on other samples"):
        sw.gradients(losses, layer).norms()
    assert_rows(losses, layer, 1e-3, interacting="allow")
