"""Update size, batch size and microbatch size are independent: the same parameters for every combination."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

torch.manual_seed(0)
x = torch.randn(100, 8, dtype=torch.float64)
y = torch.randint(0, 3, (100,))
start = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def train(batch_size: int, **options: Any) -> Tensor:
    """Train one epoch; return all parameters as one vector."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), **options)
    totals = step.run(DataLoader(TensorDataset(x, y), batch_size=batch_size))
    print(f"loader {batch_size:3}  {options!s:44} {totals.updates:3} updates, loss {totals.loss:.4f}")
    return nn.utils.parameters_to_vector(model.parameters())


print("one update per batch of the loader:")
train(20)
print("\nupdates of 30 samples; the last update has 10 samples and is divided by 10:")
whole = train(30, samples=30)  # one batch per update
ways = [
    train(10, samples=30),  # accumulation over three batches
    train(100, samples=30),  # several updates per batch
    train(7, samples=30),  # windows that start and end inside a batch
    train(30, samples=30, microbatch=8),  # at most 8 samples at a time, to save memory
    train(64, samples=30, microbatch="auto"),
]
print(f"largest difference to the first: {max((whole - way).abs().max() for way in ways):.0e}")
print("\nthe incomplete last window dropped, or kept for the next epoch:")
train(10, samples=30, tail="drop")
train(10, samples=30, tail="carry")
