"""Training of models on subsets, one at a time or several of the same architecture as one batched model.

Parameters of stacked models have shape (models, *shape), and the loss is computed with `torch.vmap`. Optimizers that
act on each element alone, such as SGD and Adam, then update the stacked parameters as they would update each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from samplewise.attribution.projected_features import OutputFn, outputs_and_weights
from samplewise.core.losses import LossFn, per_sample
from samplewise.core.state import eval_mode, random_state_restored
from samplewise.dataset_pass import check_order, check_repeatable
from samplewise.step.step import Step

MakeStep = Callable[[], Step]
# Optimizers whose update of an element depends on the gradients of this element only.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
ELEMENTS = 2**24  # of all stacked parameters; more does not make a model cheaper
SAMPLES_IN_MEMORY = 2**30  # bytes of the dataset, which is collated as a whole


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

    def __post_init__(self) -> None:
        check_order(self.queries, "Use shuffle=False: outputs are in the order of the queries.")
        check_repeatable(self.queries, "queries")

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
        subset = Subset(self.dataset, order.tolist())
        return DataLoader(subset, batch_size=self.batch_size, collate_fn=self.collate_fn)

    def train(self, subset: Tensor, seed: int) -> nn.Module:
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


def stack_size(step: Step) -> int:
    """Number of models to train at a time: 1 if this step cannot be stacked."""
    elements = sum(p.numel() for p in step.model.parameters())
    return max(1, ELEMENTS // max(elements, 1)) if _is_stackable(step) else 1


def _is_stackable(step: Step) -> bool:
    config = step.config
    parameters = list(step.model.parameters())
    return (
        not (config.transforms.transforms or config.max_grad_norm or config.precision)
        and config.samples is None
        and step.scheduler is None
        and config.on_nonfinite in (None, "raise")
        and type(step.optimizer) in ELEMENTWISE
        and not isinstance(step.loss_fn, nn.Module)
        and not list(step.model.buffers())
        and len({id(p) for group in step.optimizer.param_groups for p in group["params"]}) == len(parameters)
        and all(p.requires_grad for p in parameters)
    )


class _Loss(nn.Module):
    """Loss of a batch as a module, so that `functional_call` can replace the parameters of the model."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        losses, counts = per_sample(self.loss_fn(self.model, batch))
        return losses.sum() / (len(losses) if counts is None else counts.sum())


class Stack:
    """Models with stacked parameters, and one optimizer for all."""

    def __init__(self, steps: Sequence[Step]):
        self._models = [step.model for step in steps]
        self._loss = _Loss(steps[0].model, steps[0].loss_fn)
        self._names = [name for name, _ in self._loss.named_parameters()]
        columns = zip(*(step.model.parameters() for step in steps), strict=True)
        self._stacked = [nn.Parameter(torch.stack([p.detach() for p in column])) for column in columns]
        # Optimizer of the same class and settings, which are all in the groups, for the stacked parameters:
        optimizer: Any = steps[0].optimizer
        stack_of = dict(zip(steps[0].model.parameters(), self._stacked, strict=True))
        groups = [{**group, "params": [stack_of[p] for p in group["params"]]} for group in optimizer.param_groups]
        self._optimizer = type(optimizer)(groups)

    def update(self, batch: Any) -> None:
        """One update of all models; the leaves of the batch have shape (models, samples, ...)."""

        def loss_of(parameters: tuple[Tensor, ...], batch: Any) -> Tensor:
            named = dict(zip(self._names, parameters, strict=True))
            return torch.func.functional_call(self._loss, named, (batch,))

        self._optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
            losses = torch.vmap(loss_of, randomness="error")(tuple(self._stacked), batch)
        losses.sum().backward()
        self._optimizer.step()

    def models(self) -> list[nn.Module]:
        """The models, with their trained parameters."""
        with torch.no_grad():
            for k, model in enumerate(self._models):
                for p, stacked in zip(model.parameters(), self._stacked, strict=True):
                    p.copy_(stacked[k])
        return self._models


def collate_all(training: Training) -> Any | None:
    """All samples as one batch of tensors; None if they are too large, or not tensors of equal shapes."""
    if training.collate_fn is not None:
        return None
    if isinstance(training.dataset, TensorDataset):
        return training.dataset.tensors
    samples: Any = training.dataset
    try:
        leaves = tree_flatten(default_collate([samples[0]]))[0]
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves) * len(samples)
        return default_collate([samples[i] for i in range(len(samples))]) if size <= SAMPLES_IN_MEMORY else None
    except (TypeError, RuntimeError, AttributeError):
        return None


def train_stack(training: Training, data: Any, subsets: Sequence[Tensor], seeds: Sequence[int]) -> list[nn.Module]:
    """Models trained on subsets of equal size, as `Training.train` trains each, to rounding."""
    with random_state_restored():
        steps = [training.new_step(seed) for seed in seeds]
    for step in steps:
        step.model.train()
    stack = Stack(steps)
    for epoch in range(training.epochs):
        orders = [training.order(subset, seed, epoch) for subset, seed in zip(subsets, seeds, strict=True)]
        for part in torch.stack(orders).split(training.batch_size, dim=1):
            stack.update(tree_map(lambda leaf, part=part: leaf[part], data))
    return stack.models()


def can_be_stacked(training: Training, data: Any, subset: Tensor, seed: int) -> bool:
    """True if the first updates of two stacked models are those of the models alone, to rounding."""
    small = Training(training.make_step, training.dataset, (), training.output_fn, 1, training.batch_size)
    samples = subset[: 2 * training.batch_size]
    try:
        stacked = train_stack(small, data, [samples, samples], [seed, seed + 1])
    except (RuntimeError, ValueError, TypeError, AttributeError):  # operations that vmap does not support
        return False
    for k, model in enumerate(stacked):
        alone = small.train(samples, seed + k)
        pairs = [(a.detach(), b.detach()) for a, b in zip(alone.parameters(), model.parameters(), strict=True)]
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max())) for a, b in pairs):
            return False
    return True
