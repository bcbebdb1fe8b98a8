"""Weight per-sample gradients before the sum: seven line fits with outliers."""

import torch
from torch import Tensor, nn

import samplewise as sw
from samplewise.transforms.transform import SampleTransform


def points(n: int, outliers: int) -> dict[str, Tensor]:
    x = torch.rand(n, 1) * 4 - 2
    y = 3 * x + 1 + 0.1 * torch.randn(n, 1)
    y[:outliers] -= 40
    trust = torch.ones(n)
    trust[:outliers] = 0.1  # assume prior knowledge about the outliers
    return {"x": x, "y": y, "trust": trust}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(1)


torch.manual_seed(0)
data, clean = points(256, outliers=16), points(8, outliers=0)
model = nn.Linear(1, 1)


def towards_clean() -> dict[str, Tensor]:
    """Mean gradient of a few clean points, computed for every update."""
    return sw.gradients(loss_fn(model, clean), model).mean()


def cauchy(losses: Tensor) -> Tensor:
    """Custom transform: argument names select losses, norms, counts or batch."""
    return 1 / (1 + losses)


WAYS: dict[str, list[SampleTransform]] = {
    "unweighted": [],
    "clipped to norm 1": [sw.clip(1.0)],
    "normalized": [sw.normalize()],
    "without largest 10 % norms": [sw.drop(quantile=0.9)],
    "by a function of the loss": [sw.weight(cauchy, renormalize=True)],
    "by a value in the batch": [sw.weight("trust", renormalize=True)],
    "aligned with clean points": [sw.align(towards_clean)],
}

print(f"{'':27}slope  offset   (truth: 3, 1)")
for name, transforms in WAYS.items():
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, samples=64, transforms=transforms)
    for _ in range(50):
        rows = torch.randperm(256)
        step.run([{key: values[rows] for key, values in data.items()}])  # one large batch; 64 samples per update
    print(f"{name:26}{model.weight.item():6.2f}{model.bias.item():8.2f}   {step.transforms!r}")

print("\nFormula of a chain:")
print(sw.chain(sw.clip(1.0), sw.weight("trust", renormalize=True), sw.noise(0.1)))
