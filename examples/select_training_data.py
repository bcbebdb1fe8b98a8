"""Choose training data for a target task: 400 of 4,000 samples, a quarter of which belong to the task.

The pool mixes four tasks with different inputs and different rules for the labels. Only some samples of one task are
given as the target set. A model that was trained on a few samples of the pool shows which of them have gradients like
those of the target set. A new model trained on the selected samples beats one trained on as many random samples.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

TASKS, FEATURES, CLASSES = 4, 20, 4
POOL, TARGET, TEST, CHOSEN = 4000, 40, 1000, 400
SEEDS = 5
torch.set_num_threads(1)  # tensors are small


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def sample(rules: tuple[Tensor, Tensor], tasks: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs around the center of each sample's task, and labels by the rule of the task."""
    centers, weights = rules
    x = centers[tasks] + torch.randn(len(tasks), FEATURES)
    return x, torch.einsum("nf,nfc->nc", x - centers[tasks], weights[tasks]).argmax(1)


def train(x: Tensor, y: Tensor, epochs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            loss_fn(model, (x[part], y[part])).mean().backward()
            optimizer.step()
    return model, optimizer


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def run(seed: int) -> list[float]:
    torch.manual_seed(seed)
    rules = 0.7 * torch.randn(TASKS, FEATURES), torch.randn(TASKS, FEATURES, CLASSES)
    tasks = torch.randint(TASKS, (POOL,))
    x, y = sample(rules, tasks)
    target = sample(rules, torch.zeros(TARGET, dtype=torch.int64))
    test = sample(rules, torch.zeros(TEST, dtype=torch.int64))

    model, optimizer = train(x[:CHOSEN], y[:CHOSEN], epochs=5)
    with tempfile.TemporaryDirectory() as directory:
        store = sw.attribution.ProjectedStore(directory, dim=256)
        store.fill(model, loss_fn, list(zip(x.split(500), y.split(500), strict=True)), second_moments=optimizer)
        chosen = sw.attribution.select(store, store.project(model, loss_fn, [target]), CHOSEN)

    drawn = torch.randperm(POOL)[:CHOSEN]
    results = [accuracy(train(x[part], y[part], epochs=30)[0], *test) for part in (chosen, drawn)]
    return [*results, (tasks[chosen] == 0).float().mean().item()]


selected, drawn, share = torch.tensor([run(seed) for seed in range(SEEDS)]).T
print(f"accuracy on the target task, trained on {CHOSEN} of {POOL} samples, mean and spread of {SEEDS} seeds")
print(f"  selected  {selected.mean():.3f} +- {selected.std():.3f}   ({share.mean():.0%} of them belong to the task)")
print(f"  random    {drawn.mean():.3f} +- {drawn.std():.3f}")
assert (selected > drawn).all()
