"""Online learning: one update per sample in order of arrival, with the loss of each sample before its update."""

from time import perf_counter

import torch
from torch import Tensor, nn

import samplewise as sw

torch.manual_seed(0)
truth = torch.tensor([[1.0], [-2.0], [0.5]])
x = torch.randn(600, 3)
y = x @ truth + 0.1 * torch.randn(600, 1)
y[300:] += 3 * x[300:, :1]  # the target changes half-way


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(1)


model = nn.Linear(3, 1)
step = sw.Step(model, sw.sgd(0.02), loss_fn, samples=1, compile=True)

# Batches of 50 arrive, but each update uses one sample.
stream = zip(x.split(50), y.split(50), strict=True)
recent = []
for update in step.over(stream):
    recent.append(update.loss)  # loss of the sample before the model is trained on it
    if update.index % 100 == 99:
        weights = ", ".join(f"{w:5.2f}" for w in model.weight[0])
        print(f"after {update.index + 1} samples: loss of the last 100 {sum(recent) / 100:6.3f}, weights {weights}")
        recent.clear()
print(step.counters)

# The same updates without returning to Python after each. The second pass is timed, because the first one compiles.
for compile in (False, True):
    step = sw.Step(nn.Linear(3, 1), sw.sgd(0.02), loss_fn, samples=1, compile=compile)
    step.run([(x, y)])
    started = perf_counter()
    step.run([(x, y)])
    print(f"{step.compiled}: {(perf_counter() - started) / len(x) * 1e6:.1f} µs per update")
