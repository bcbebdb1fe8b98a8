"""Weigh each sample's gradient before they are summed: a line through points of which a few are far off."""

import torch
from torch import nn

import samplewise as sw


def points(n, outliers):
    x = torch.rand(n, 1) * 4 - 2
    y = 3 * x + 1 + 0.1 * torch.randn(n, 1)
    y[:outliers] -= 40
    trust = torch.ones(n)
    trust[:outliers] = 0.1  # suppose that somebody has an idea which ones they are
    return {"x": x, "y": y, "trust": trust}


def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum(1)


torch.manual_seed(0)
data, clean = points(256, outliers=16), points(8, outliers=0)
model = nn.Linear(1, 1)


def towards_clean():
    """The gradient of a few points that we are sure of, made anew for every update."""
    return sw.gradients(loss_fn(model, clean), model).mean()


def cauchy(losses):
    """One's own: a function that asks by argument name for losses, norms, counts or the batch."""
    return 1 / (1 + losses)


WAYS = {
    "as they are": [],
    "no longer than 1": [sw.clip(1.0)],
    "directions alone": [sw.normalize()],
    "without the longest tenth": [sw.drop(quantile=0.9)],
    "by a function": [sw.weight(cauchy, renormalise=True)],
    "by a number in the batch": [sw.weight("trust", renormalise=True)],
    "towards clean ones": [sw.align(towards_clean)],
}

print(f"{'':27}slope  offset   (truth: 3, 1)")
for name, transforms in WAYS.items():
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, samples=64, transforms=transforms)
    for _ in range(50):
        rows = torch.randperm(256)
        step.run([{key: values[rows] for key, values in data.items()}])  # one large batch; an update is 64 of it
    print(f"{name:26}{model.weight.item():6.2f}{model.bias.item():8.2f}   {step.transforms!r}")

print("\nWhat the update of a chain is:")
print(sw.chain(sw.clip(1.0), sw.weight("trust", renormalise=True), sw.noise(0.1)))
