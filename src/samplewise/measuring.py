"""What everybody needs who measures a model over a data set: evaluation mode, checkpoints, an order that stays."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from samplewise.engine.interaction import storage_of
from samplewise.replay import modes

Checkpoint = tuple[Mapping[str, Any], float]  # a model's state_dict, and the learning rate at that time
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and the like; each module's mode is put back."""
    restore = modes(model)
    model.eval()
    try:
        yield
    finally:
        restore()


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Whatever is loaded into the model meanwhile."""
    before = copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(before)


def at_each(model: nn.Module, checkpoints: Sequence[Checkpoint] | None) -> Iterator[float]:
    """Loads one after the other and yields its learning rate; without any, 1 for the model as it stands."""
    if checkpoints is None:
        yield 1.0
        return
    for state, rate in _checked(model, checkpoints):
        model.load_state_dict(state)
        yield float(rate)


def _checked(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    if not checkpoints:
        raise ValueError("checkpoints must hold at least one (state_dict, lr); found none. Pass None for the present.")
    own = {storage_of(value) for value in model.state_dict().values() if isinstance(value, Tensor)}
    for k, (state, _) in enumerate(checkpoints):
        if any(isinstance(value, Tensor) and storage_of(value) in own for value in state.values()):
            raise ValueError(
                f"checkpoints must be copies of the parameters; found the model's own tensors in checkpoint {k}, "
                "which have changed since. Keep copy.deepcopy(model.state_dict())."
            )
    return checkpoints


def check_order(loader: Iterable[Any], remedy: str) -> None:
    """A sample is known by its place, so that the places must mean something."""
    samplers = (getattr(each, "sampler", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    if any(isinstance(sampler, SHUFFLING) for sampler in samplers):
        raise ValueError(f"the loader must keep the order of its data set; found one that shuffles. {remedy}")


def check_repeatable(loader: Iterable[Any], name: str) -> None:
    if isinstance(loader, Iterator):
        raise ValueError(
            f"{name} must be a loader or a list, to be gone through more than once; found an iterator "
            f"({type(loader).__name__}). Pass what it was made of."
        )
