"""Training of one model on a subset: random state, order of the samples, outputs for the queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from samplewise.attribution.outputs import OutputFn, outputs_and_weights
from samplewise.core.state import eval_mode, random_state_restored
from samplewise.step.step import Step

MakeStep = Callable[[], Step]


def number_of_samples(dataset: Any) -> int:
    """Length of a map-style dataset; raises TypeError for others."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "dataset must be a map-style dataset, with a length and an index; found "
            f"{type(dataset).__name__}. Subsets are chosen by index: pass a list of samples, or a TensorDataset."
        )
    return len(dataset)


@dataclass(frozen=True)
class Training:
    """Settings that are the same for all models."""

    make_step: MakeStep
    dataset: Dataset[Any]
    queries: Iterable[Any]
    output_fn: OutputFn
    epochs: int
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def new_step(self, seed: int) -> Step:
        """A new model with its step, initialized from the seed. The caller restores the random state."""
        torch.manual_seed(seed)
        step = self.make_step()
        if not isinstance(step, Step):
            raise TypeError(f"make_step() must return a sw.Step with a new model; found {type(step).__name__}.")
        return step

    def order(self, subset: Tensor, seed: int, epoch: int) -> Tensor:
        """Samples of the subset, shuffled for an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return subset[torch.randperm(len(subset), generator=generator)]

    def batches(self, order: Tensor) -> Iterable[Any]:
        """Batches of the samples in this order."""
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is None:
            return (tuple(t[part] for t in self.dataset.tensors) for part in order.split(self.batch_size))
        chosen = Subset(self.dataset, order.tolist())
        return DataLoader(chosen, batch_size=self.batch_size, collate_fn=self.collate_fn)

    def trained(self, subset: Tensor, seed: int) -> nn.Module:
        """A new model, trained on the subset. Depends on the seed only, not on the random state."""
        with random_state_restored():
            step = self.new_step(seed)
            step.model.train()
            for epoch in range(self.epochs):
                step.run(self.batches(self.order(subset, seed, epoch)))
        return step.model

    def outputs(self, model: nn.Module) -> Tensor:
        """Outputs of the queries, (queries,), on the CPU."""
        with eval_mode(model), torch.no_grad():
            parts = [outputs_and_weights(self.output_fn(model, batch))[0].cpu() for batch in self.queries]
        if not parts:
            raise ValueError("queries must yield at least one batch; found none. Pass a loader or a list.")
        return torch.cat(parts)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads in the block; None leaves it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
