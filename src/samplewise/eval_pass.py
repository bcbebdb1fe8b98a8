"""Helpers for passes over a dataset without training: checkpoints, checks of the loader."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from samplewise.engine.independence import storage_of

Checkpoint = tuple[Mapping[str, Any], float]  # (state_dict of the model, learning rate at that time)
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's state_dict on exit."""
    before = copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(before)


def at_each(model: nn.Module, checkpoints: Sequence[Checkpoint] | None) -> Iterator[float]:
    """Load each checkpoint in turn and yield its learning rate; without checkpoints, yield 1.0 once."""
    if checkpoints is None:
        yield 1.0
        return
    for state, rate in _checked(model, checkpoints):
        model.load_state_dict(state)
        yield float(rate)


def _checked(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    if not checkpoints:
        raise ValueError(
            "checkpoints must hold at least one (state_dict, lr); found none. Pass None to use the model as it is."
        )
    own = {storage_of(value) for value in model.state_dict().values() if isinstance(value, Tensor)}
    for k, (state, _) in enumerate(checkpoints):
        if any(isinstance(value, Tensor) and storage_of(value) in own for value in state.values()):
            raise ValueError(
                f"checkpoints must be copies of the parameters; found the model's own tensors in checkpoint {k}, "
                "which have changed since. Keep copy.deepcopy(model.state_dict())."
            )
    return checkpoints


def check_order(loader: Iterable[Any], remedy: str) -> None:
    """Raise if the loader shuffles: samples are identified by their index in the dataset."""
    samplers = (getattr(each, "sampler", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    if any(isinstance(sampler, SHUFFLING) for sampler in samplers):
        raise ValueError(f"the loader must keep the order of its dataset; found one that shuffles. {remedy}")


def check_repeatable(loader: Iterable[Any], name: str) -> None:
    """Raise if the loader is an iterator, which can be traversed only once."""
    if isinstance(loader, Iterator):
        raise ValueError(
            f"{name} must be a loader or a list, because it is iterated more than once; found an iterator "
            f"({type(loader).__name__}). Pass the loader or list from which the iterator was created."
        )
