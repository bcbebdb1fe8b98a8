"""Online learning: one update per sample, in the order they come, while watching how well it predicts."""

from time import perf_counter

import torch
from torch import nn

import samplewise as sw

torch.manual_seed(0)
truth = torch.tensor([[1.0], [-2.0], [0.5]])
x = torch.randn(600, 3)
y = x @ truth + 0.1 * torch.randn(600, 1)
y[300:] += 3 * x[300:, :1]  # half-way the world changes


def loss_fn(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(1)


model = nn.Linear(3, 1)
step = sw.Step(model, sw.sgd(0.02), loss_fn, samples=1, compile=True)

# The loader may hand over the data in any size; an update is one sample all the same.
stream = zip(x.split(50), y.split(50), strict=True)
recent = []
for update in step.over(stream):
    recent.append(update.loss)  # of a sample that the model had not been trained on yet
    if update.index % 100 == 99:
        weights = ", ".join(f"{w:5.2f}" for w in model.weight[0])
        print(f"after {update.index + 1} samples: loss of the last hundred {sum(recent) / 100:6.3f}, weights {weights}")
        recent.clear()
print(step.counters)

# The same updates with nobody who looks in between. The second pass is timed: the first one has to compile.
for compile in (False, True):
    step = sw.Step(nn.Linear(3, 1), sw.sgd(0.02), loss_fn, samples=1, compile=compile)
    step.run([(x, y)])
    started = perf_counter()
    step.run([(x, y)])
    print(f"{step.compiled}: {(perf_counter() - started) / len(x) * 1e6:.1f} µs per update")
