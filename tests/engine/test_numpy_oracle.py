"""A second oracle that shares nothing with autograd: backpropagation of an MLP by hand, in NumPy.

    h0 = x      zk = h(k-1) Wk' + bk      hk = tanh(zk)      loss = Σ_o cost_o · log cosh(out_o − y_o)

The loss is a custom one: every instance has costs of its own.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import samplewise as sw

WIDTHS = (7, 9, 5, 4)


def problem(B, seed=0):
    draw = np.random.default_rng(seed)
    layers = [(draw.normal(size=(o, i)) / np.sqrt(i), draw.normal(size=o)) for i, o in pairwise(WIDTHS)]
    return (
        layers,
        draw.normal(size=(B, WIDTHS[0])),
        draw.normal(size=(B, WIDTHS[-1])),
        draw.uniform(0.1, 3, size=(B, WIDTHS[-1])),
    )


def by_hand(layers, x, y, cost):
    """Losses (B,) and, for each layer, gradients (B, out, in) and (B, out)."""
    inputs, h = [], x
    for k, (w, b) in enumerate(layers):
        inputs.append(h)
        z = h @ w.T + b
        h = np.tanh(z) if k < len(layers) - 1 else z
    error = h - y
    losses = (cost * np.log(np.cosh(error))).sum(1)
    slope, gradients = cost * np.tanh(error), []
    for k in reversed(range(len(layers))):
        a = inputs[k]
        gradients.insert(0, (slope[:, :, None] * a[:, None, :], slope))
        slope = (slope @ layers[k][0]) * (1 - a**2)  # a = tanh(z), and its slope is 1 − a²
    return losses, gradients


def in_torch(layers, x, y, cost):
    modules = []
    for w, b in layers:
        modules += [nn.Linear(*w.shape[::-1], dtype=torch.float64), nn.Tanh()]
        modules[-2].weight.data, modules[-2].bias.data = torch.from_numpy(w.copy()), torch.from_numpy(b.copy())
    model = nn.Sequential(*modules[:-1])
    error = model(torch.from_numpy(x)) - torch.from_numpy(y)
    return model, (torch.from_numpy(cost) * error.cosh().log()).sum(1)


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("strategy", [None, "fused", "twice", "full", "reference"])
@pytest.mark.parametrize("B", [1, 2, 13, 100])
def test_every_quantity(B, strategy):
    layers, x, y, cost = problem(B)
    losses, gradients = by_hand(layers, x, y, cost)
    model, torch_losses = in_torch(layers, x, y, cost)
    close(torch_losses.detach(), losses)
    g = sw.gradients(torch_losses, model, strategy=strategy)

    named = dict(zip(g.names, [part for pair in gradients for part in pair], strict=True))
    flat = np.concatenate([part.reshape(B, -1) for part in named.values()], 1)
    draw = np.random.default_rng(1)
    weights = draw.normal(size=B)
    direction = {name: draw.normal(size=part.shape[1:]) for name, part in named.items()}

    close(g.norms(), np.sqrt((flat**2).sum(1)))
    close(g.gram(), flat @ flat.T)
    close(
        g.dot({k: torch.from_numpy(v) for k, v in direction.items()}),
        sum((named[k] * v).reshape(B, -1).sum(1) for k, v in direction.items()),
    )
    for name, part in named.items():
        close(g.norms(by="parameter")[name], np.sqrt((part.reshape(B, -1) ** 2).sum(1)))
        close(g.full()[name], part)
        close(g[name], part)
        close(g[B - 1][name], part[B - 1])
        close(g.sum(torch.from_numpy(weights))[name], np.tensordot(weights, part, 1))
        close(g.mean()[name], part.mean(0))
        close(g.sum_of_squares()[name], (part**2).sum(0))
        if B > 1:
            close(g.variance()[name], part.var(0, ddof=1))


def test_gradients_by_hand_agree_with_finite_differences():
    """The oracle of the oracle."""
    layers, x, y, cost = problem(3)
    _, gradients = by_hand(layers, x, y, cost)
    for k, (w, b) in enumerate(layers):
        for array, gradient in ((w, gradients[k][0]), (b, gradients[k][1])):
            place = tuple(size // 2 for size in array.shape)
            kept, step = array[place], 1e-6
            array[place] = kept + step
            plus, _ = by_hand(layers, x, y, cost)
            array[place] = kept - step
            minus, _ = by_hand(layers, x, y, cost)
            array[place] = kept
            np.testing.assert_allclose(
                (plus - minus) / (2 * step), gradient[(slice(None), *place)], rtol=1e-6, atol=1e-8
            )


def test_clipped_sum_by_hand():
    """The usual reason to ask: each gradient scaled to at most C, then summed into .grad."""
    layers, x, y, cost = problem(20)
    _, gradients = by_hand(layers, x, y, cost)
    parts = [part for pair in gradients for part in pair]
    norms = np.sqrt(sum((part.reshape(20, -1) ** 2).sum(1) for part in parts))
    C = np.median(norms)
    model, losses = in_torch(layers, x, y, cost)
    g = sw.gradients(losses, model)
    g.backward((C / g.norms()).clamp(max=1))
    for p, part in zip(model.parameters(), parts, strict=True):
        close(p.grad, np.tensordot(np.minimum(1, C / norms), part, 1))
