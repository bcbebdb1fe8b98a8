"""Penalty on per-sample gradient norms, with create_graph=True."""

import torch
from torch import nn

import samplewise as sw


def train(penalty: float) -> tuple[float, float, float]:
    """Fit a noisy curve; return the mean loss, the mean norm and the largest norm after training."""
    torch.manual_seed(0)
    x = torch.rand(64, 1) * 6 - 3
    y = torch.sin(x) + 0.3 * torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        losses = (model(x) - y).square().sum(1)
        # create_graph=True: the norms are differentiable.
        norms = sw.gradients(losses, model, create_graph=True).norms()
        optimizer.zero_grad()
        (losses.mean() + penalty * norms.square().mean()).backward()
        optimizer.step()
    losses = (model(x) - y).square().sum(1)
    norms = sw.gradients(losses, model).norms()
    return losses.mean().item(), norms.mean().item(), norms.max().item()


print("penalty    loss   mean norm   largest norm")
for penalty in (0.0, 0.01, 0.03):
    loss, mean, largest = train(penalty)
    print(f"{penalty:7} {loss:7.3f} {mean:11.3f} {largest:14.3f}")
