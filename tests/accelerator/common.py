"""Small network and data, on the CPU or on the simulated accelerator, and the comparison of results on both."""

import sim_device as sim
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

DEVICE = "sim"
X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


def network(device, dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double().to(device)


def batches(device, size=6):
    """Two batches (x, y, row)."""
    rows = torch.arange(12)
    return [tuple(t[k : k + size].to(device) for t in (X, Y, rows)) for k in range(0, 12, size)]


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def weights(model):
    return [p.detach().cpu() for p in model.parameters()]


def assert_same_on_both(compute, tolerance=1e-12):
    """Compare the tensors and numbers that compute(device) returns on the CPU and on the accelerator."""
    expected, found = tree_leaves(compute("cpu")), tree_leaves(compute(DEVICE))
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        if isinstance(a, (torch.Tensor, float)):
            torch.testing.assert_close(torch.as_tensor(sim.raw(b)), torch.as_tensor(a), atol=tolerance, rtol=tolerance)
        else:
            assert a == b
