"""TRAK against the formula on rows of the plain loop, and its arguments."""

import pytest
import torch
from plain_loop import batches, make, rows

import samplewise as sw


def projection(model, dim, seed):
    """Matrix (parameters, dim) of `g.project`: rows of the identity, projected."""
    columns = []
    for name, p in model.named_parameters():
        identity = torch.eye(p.numel(), dtype=torch.float64).view(-1, *p.shape)
        q = torch.zeros_like(p, requires_grad=True)
        g = sw.gradients((identity * q).flatten(1).sum(1), {name: q})
        columns.append(g.project(dim, seed))
    return torch.cat(columns)


def by_formula(models, x, y, queries, dim, damping, seed=0):
    total, weights = 0, 0
    for k, model in enumerate(models):
        matrix = projection(model, dim, seed + k)
        features, of_queries = (rows(model, *data, sw.margin) @ matrix for data in ((x, y), queries))
        gram = features.T @ features
        damped = gram + damping * gram.trace() / dim * torch.eye(dim)
        total = total + of_queries @ torch.linalg.inv(damped) @ features.T
        weights = weights + torch.sigmoid(-sw.margin(model, (x, y)).detach())
    return total * weights / len(models) ** 2


@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_formula(count, damping):
    models = [make(n=40, seed=seed)[0] for seed in range(count)]
    _, x, y = make(n=40)
    queries = x[:7] + 0.3, y[:7]
    found = sw.trak(models, sw.margin, batches(x, y, 9), batches(*queries, 4), 16, damping=damping)
    wanted = by_formula(models, x, y, queries, 16, damping).float()
    assert found.shape == (7, 40)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
