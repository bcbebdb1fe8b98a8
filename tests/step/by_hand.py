"""Updates by hand: one backward pass a sample, then plain arithmetic. What a step does is compared with this."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import samplewise as sw
from samplewise.transforms.chain import as_chain

LR = 0.1
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def cut(data, size):
    return [{key: values[k : k + size] for key, values in data.items()} for k in range(0, len(data["x"]), size)]


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def squared(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum(1)


def counted(model, batch):
    return squared(model, batch) * batch["n"], batch["n"]


@dataclass
class Window:
    """What is known of the samples of one update, or of groups of them."""

    losses: Tensor
    counts: Tensor
    grads: dict  # name -> (B, *shape)
    batch: dict | None

    @property
    def parts(self):
        return {name: g.flatten(1).square().sum(1).sqrt() for name, g in self.grads.items()}

    @property
    def norms(self):
        return torch.stack(list(self.parts.values())).square().sum(0).sqrt()

    def dots(self, reference):
        return sum((g * reference[name]).flatten(1).sum(1) for name, g in self.grads.items())


def one_by_one(model, loss_fn, batch):
    names = [name for name, _ in model.named_parameters()]
    losses, counts, rows = [], [], []
    for sample in cut(batch, 1):
        found = loss_fn(model, sample)
        loss, count = found if isinstance(found, tuple) else (found, torch.ones(1))
        rows.append(torch.autograd.grad(loss.sum(), list(model.parameters())))
        losses.append(loss.detach())
        counts.append(count.double())
    grads = dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))
    return Window(torch.cat(losses), torch.cat(counts), grads, batch)


@torch.no_grad()
def descend(model, grads, c, below):
    """p -= lr × Σ c·g / below."""
    for name, p in model.named_parameters():
        p -= LR * torch.tensordot(c[name] if isinstance(c, dict) else c, grads[name], dims=1) / below


def clipped(norms, bound):
    return torch.tensor([1.0 if n <= bound else bound / n for n in norms.tolist()], dtype=torch.float64)


def fitted(transforms, table, data, number):
    """Transforms and data for windows of `number` samples: tensors by place have that length, and no window is
    shorter.
    """
    parts = as_chain(transforms).transforms
    places = [getattr(t, "positions", None) is not None for t in parts]
    if not any(places):
        return transforms, data
    rows = len(table) // number * number
    made = [sw.weight(table[:number]) if place else t for t, place in zip(parts, places, strict=True)]
    return made, {name: column[:rows] for name, column in data.items()}
