"""A small classification in float64, and its gradients by the plain loop: rows of the Jacobian."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import noise


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(n=12, classes=3, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, classes)).double()
    return model, noise(n, 5).double(), torch.arange(n) % classes


def batches(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


def rows(model, x, y, loss_fn=loss_fn):
    """(n, parameters): one backward pass per sample."""
    found = []
    for i in range(len(y)):
        (loss,) = loss_fn(model, (x[i : i + 1], y[i : i + 1]))
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(found)
