"""Parameters that are looked up, viewed and permuted before they meet the samples."""

import pytest
import torch
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.testing.case import default_dtype

B, N = 4, 3


@pytest.fixture(autouse=True)
def _double():
    with default_dtype(torch.float64):
        yield


INDEX = torch.tensor([[4, 1, 0], [2, 4, -1], [3, 3, 2]])

TABLES = {
    "relative position bias": lambda w: w[INDEX.view(-1)].view(N, N, 2).permute(2, 0, 1).contiguous().unsqueeze(0),
    "index of two dims": lambda w: w[INDEX].permute(-1, 0, 1),
    "transposed": lambda w: w[INDEX].transpose(0, -1),
    "transposed twice": lambda w: w[INDEX].transpose(-1, 1).transpose(0, 1),
    "scaled": lambda w: 16 * torch.sigmoid(w[INDEX].permute(2, 0, 1)),
    "tokens of one column": lambda w: w[:, 1][INDEX],
    "rows and columns": lambda w: w[INDEX, torch.tensor([0, 1, 1])],
    "columns": lambda w: w.T[:, INDEX],
    "mask": lambda w: w[torch.tensor([True, False, True, True, False])][:, :1],
    "twice": lambda w: w[INDEX][:, torch.tensor([2, 0, 0])].permute(2, 0, 1),
    "of a product": lambda w: (w @ w.T)[INDEX][..., 0],
}


class Biased(nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(0)
        self.table = table
        self.weight = nn.Parameter(torch.randn(5, 2))
        self.layer = nn.Linear(6, 2 * N * N)

    def forward(self, x):
        return (self.layer(x).view(-1, 2, N, N) + self.table(self.weight)).sin().flatten(1).square().sum(1)


@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table(name, strategy):
    model = Biased(TABLES[name])
    for _ in range(2):
        assert_as_loop(model(torch.randn(B, 6)), model, strategy=strategy)


@pytest.mark.parametrize("name", ["relative position bias", "transposed"])
def test_second_derivatives_of_a_table(name):
    model = Biased(TABLES[name])
    x = torch.randn(B, 6)
    rows = sw.gradients(model(x), model, create_graph=True).full()["weight"]
    losses = model(x)
    single = [torch.autograd.grad(loss, model.weight, create_graph=True)[0] for loss in losses]
    found, expected = (
        torch.autograd.grad(r.square().sum(), list(model.parameters())) for r in (rows, torch.stack(single))
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_indices_that_change():
    """Indices are read in each step."""
    index = INDEX.clone()
    model = Biased(lambda w: w[index].permute(2, 0, 1))
    for step in range(4):
        index = (INDEX + step) % 5
        assert_as_loop(model(torch.randn(B, 6)), model)


def test_a_relative_position_bias_needs_no_backward_pass_per_sample():
    model = Biased(TABLES["relative position bias"])
    grads = sw.gradients(model(torch.randn(B, 6)), model)._evaluator.grads()
    assert "through" not in grads["weight"].describe()
