"""Per-sample gradient clipping in an ordinary training loop: robust line fit with outliers."""

import torch
from torch import nn

import samplewise as sw

CLIP = 1.0


def fit(clip: float) -> tuple[float, float]:
    """Fit a line through points with 16 outliers; return (slope, offset)."""
    torch.manual_seed(0)
    x = torch.rand(256, 1) * 4 - 2
    y = 3 * x + 1 + 0.1 * torch.randn(256, 1)
    y[:16] -= 40  # the outliers
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        for rows in torch.randperm(256).split(64):
            losses = (model(x[rows]) - y[rows]).square().sum(1)
            g = sw.gradients(losses, model)
            norms = g.norms()
            scale = (clip / norms).clamp(max=1)  # 1 for a sample below the bound
            optimizer.zero_grad()
            g.backward(scale / len(rows))
            optimizer.step()
    return model.weight.item(), model.bias.item()


print("              slope  offset")
print("truth          3.00    1.00")
for name, clip in (("not clipped", float("inf")), (f"clip {CLIP}", CLIP)):
    slope, offset = fit(clip)
    print(f"{name:12}{slope:7.2f} {offset:7.2f}")
