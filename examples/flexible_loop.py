"""Train in six equivalent ways, from the Trainer to a loop with `sw.gradients`, with equal parameters."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

torch.manual_seed(0)
x, y = torch.randn(60, 8), torch.randint(0, 3, (60,))
batches = list(zip(x.split(12), y.split(12), strict=True))
start = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
BOUND = 0.7


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def trainer(step: sw.Step, model: nn.Module) -> None:
    sw.Trainer(step, progress=False, device="cpu").fit(batches, epochs=1)


def run(step: sw.Step, model: nn.Module) -> None:
    print(step.run(batches))


def loop(step: sw.Step, model: nn.Module) -> None:
    for update in step.over(batches):  # one update per iteration
        if update.index == 2:
            print(f"update {update.index}: loss {update.loss:.3f}, norms up to {update.norms.max():.3f}")


def feed(step: sw.Step, model: nn.Module) -> None:
    for batch in batches:
        for update in step(batch):  # the updates completed by this batch: none, one or several
            print(f"a batch of 12 completed update {update.index} of {update.samples} samples")
    step.flush()  # update with the remaining samples


def by_hand(step: sw.Step, model: nn.Module) -> None:
    for first, second in zip(batches[::2], [*batches[1::2], None], strict=True):
        step.accumulate(first)
        if second is not None:
            step.accumulate(second)
        step.apply()


def below(step: sw.Step, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in zip(x.split(24), y.split(24), strict=True):
        g = sw.gradients(loss_fn(model, (inputs, targets)), model)
        optimizer.zero_grad()
        g.backward((BOUND / g.norms()).clamp(max=1) / len(g))
        optimizer.step()


found = []
for drive in (trainer, run, loop, feed, by_hand, below):
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = sw.Step(model, optimizer, loss_fn, samples=24, transforms=[sw.clip(BOUND)])
    drive(step, model)
    found.append(nn.utils.parameters_to_vector(model.parameters()))
print(f"largest difference between the six results: {max((found[0] - other).abs().max() for other in found):.0e}")
