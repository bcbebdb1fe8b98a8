"""A small classification problem for the loops of other frameworks, and its training by one sample at a time."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 22
BOUND = 0.7
LR = 0.3
CLASSES = 3


def dataset(dtype=torch.float64):
    """x, y, and counts such as numbers of tokens."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64) * torch.linspace(0.2, 3, SAMPLES)[:, None]
    y = torch.randint(CLASSES, (SAMPLES,), generator=g)
    counts = torch.randint(1, 5, (SAMPLES,), generator=g)
    return TensorDataset(x.to(dtype), y, counts)


def network(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, CLASSES)).to(dtype)


def windows_of(size, epochs=1, samples=SAMPLES):
    """Indices of the samples of each update."""
    return [range(start, min(start + size, samples)) for _ in range(epochs) for start in range(0, samples, size)]


def one_by_one(windows, bound=BOUND, dtype=torch.float64, counted=False):
    """Parameters after updates with the mean of clipped gradients, from one backward pass per sample, and the norms."""
    data = dataset(dtype)
    model = network(dtype)
    parameters = list(model.parameters())
    norms = []
    for window in windows:
        totals = [torch.zeros_like(p) for p in parameters]
        denominator = 0
        for i in window:
            x, y, count = data[i]
            factor = count.item() if counted else 1
            loss = factor * F.cross_entropy(model(x[None]), y[None])
            row = torch.autograd.grad(loss, parameters)
            norms.append(torch.cat([r.flatten() for r in row]).norm())
            for total, r in zip(totals, row, strict=True):
                total += r * min(1, bound / norms[-1])
            denominator += factor
        with torch.no_grad():
            for p, total in zip(parameters, totals, strict=True):
                p -= LR * total / denominator
    return flat(model), torch.stack(norms)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
