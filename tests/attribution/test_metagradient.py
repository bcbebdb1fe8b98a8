"""Metagradients against finite differences of retraining, in float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

SAMPLES = 24


class Attention(nn.Module):
    """Tiny transformer with dropout: classes of sequences of tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.query_key_value = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.query_key_value(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.drop(mixed.transpose(1, 2).flatten(2)))
        return self.head(x.mean(1))


def mlp(transforms):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01, dampening=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return sw.Step(model, optimizer, nn.CrossEntropyLoss(), 5, transforms=transforms, scheduler=scheduler)


def cnn(transforms):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)
    return sw.Step(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        10,
        microbatch=4,
        transforms=transforms,
        scheduler=scheduler,
        max_grad_norm=0.3,
        tail="drop",
    )


def transformer(transforms):
    model = Attention()
    optimizer = torch.optim.AdamW(
        [{"params": model.head.parameters(), "lr": 0.02}, {"params": [*model.parameters()][:-2], "lr": 0.01}],
        weight_decay=0.1,
        amsgrad=True,
    )
    soft = sw.weight(lambda losses: 1 / (1 + losses), renormalize=True)
    return sw.Step(
        model, optimizer, nn.CrossEntropyLoss(), 7, transforms=[sw.clip(0.6), soft, *transforms], tail="carry"
    )


def inputs(make):
    if make is transformer:
        return torch.randint(7, (SAMPLES, 5))
    return torch.randn(SAMPLES, *((4,) if make is mlp else (1, 6, 6)), dtype=torch.float64)


def data(make):
    torch.manual_seed(1)
    x = inputs(make)
    y = torch.randint(3, (SAMPLES,))
    loader = DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=6, shuffle=True)
    return loader, [(inputs(make)[:2], torch.tensor([0, 1])), (inputs(make)[:1], torch.tensor([2]))]


def fresh(make, *transforms):
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make(transforms)
    finally:
        torch.set_default_dtype(before)


def train(make, run, loader, *transforms, epochs=3):
    step = fresh(make, *transforms)
    sw.Trainer(step, run, progress=False).fit(loader, epochs=epochs)
    return step.model.eval()


def losses(model, queries):
    with torch.no_grad():
        return torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in queries])


def finite_differences(make, loader, queries, samples, size=1e-5):
    """Derivative of the losses of the queries with respect to the weights of some samples, (queries, samples)."""
    columns = []
    for i in samples:
        sides = []
        for sign in (1, -1):
            weights = torch.ones(SAMPLES, dtype=torch.float64)
            weights[i] += sign * size
            sides.append(losses(train(make, None, loader, sw.weight(weights, index="id")), queries))
        columns.append((sides[0] - sides[1]) / (2 * size))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_equals_finite_differences_of_retraining(make, tmp_path):
    loader, queries = data(make)
    train(make, tmp_path, loader)
    state = torch.get_rng_state()
    found = sw.metagradient(tmp_path, partial(fresh, make), loader, queries, device="cpu")
    assert found.shape == (3, SAMPLES)
    assert torch.equal(torch.get_rng_state(), state)
    samples = [0, 5, 17]
    wanted = finite_differences(make, loader, queries, samples)
    torch.testing.assert_close(found[:, samples], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert not (tmp_path / "metagradient").exists()
