"""Helpers for passes over a dataset without training: checkpoints, checks of the loader, shares of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from samplewise.core.batches import check_loader
from samplewise.core.text import with_progress
from samplewise.engine.ownership.independence import storage_of
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank

Checkpoint = tuple[Mapping[str, Any], float]  # (state_dict of the model, learning rate at that time)
Result = TypeVar("Result")
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
    # Raise if there are no checkpoints, or if one shares memory with the model, which changes it.
    if not checkpoints:
        raise ValueError(
            "checkpoints must hold at least one (state_dict, lr); found none. Pass None to use the model as it is."
        )
    storages = {storage_of(value) for value in model.state_dict().values() if isinstance(value, Tensor)}
    for k, (state, _) in enumerate(checkpoints):
        if any(isinstance(value, Tensor) and storage_of(value) in storages for value in state.values()):
            raise ValueError(
                f"checkpoints must be copies of the parameters; found the model's own tensors in checkpoint {k}, "
                "which have changed since. Keep copy.deepcopy(model.state_dict())."
            )
    for state, rate in checkpoints:
        model.load_state_dict(state)
        yield float(rate)


def check_order(loader: Iterable[Any], remedy: str) -> None:
    """Raise if this is no loader, or if it shuffles: samples are identified by their index in the dataset."""
    check_loader(loader)
    if any(isinstance(sampler, SHUFFLING) for sampler in _samplers(loader)):
        raise ValueError(f"the loader must keep the order of its dataset; found one that shuffles. {remedy}")


def check_repeatable(loader: Iterable[Any], name: str) -> None:
    """Raise if the loader is an iterator, which can be traversed only once."""
    if isinstance(loader, Iterator):
        raise ValueError(
            f"{name} must be a loader or a list, because it is iterated more than once; found an iterator "
            f"({type(loader).__name__}). Pass the loader or list from which the iterator was created."
        )


def check_train_and_queries(train: Iterable[Any], queries: Iterable[Any]) -> None:
    """Raise if scores of training samples for queries would not be in the order of the datasets."""
    for loader, name in ((train, "train"), (queries, "queries")):
        check_order(loader, "Use shuffle=False: rows and columns of the result are in the order of the loaders.")
        check_repeatable(loader, name)


def map_over_ranks(
    compute: Callable[[Any], Result], loader: Iterable[Any], title: str | None = None
) -> Iterator[Result]:
    """Yield compute(batch) for each batch, in order, on every rank. Rank r computes batches r, r + size, ...

    Results of several ranks are exchanged with pickle; they should be small, and on the CPU. Every rank must pass the
    same loader and exhaust the iterator. If `compute` raises on a rank, all ranks raise.

    title: name of the pass, whose progress is shown on stderr; default: nothing is shown
    """
    check_has_all_samples(loader)
    batches = iter(_with_progress(loader, title))
    while turn := list(islice(batches, collectives.size())):
        share = turn[collectives.rank() : collectives.rank() + 1]  # empty if the last turn has fewer batches than ranks
        results = on_every_rank(lambda share=share: [compute(batch) for batch in share])  # type: ignore[misc]
        yield from (result for results in collectives.all_gather_object(results) for result in results)


def share_of_rank(loader: Iterable[Any], title: str | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number, batch) of the batches of this rank: r, r + size, ... Every rank must pass the same loader.

    title: as in `map_over_ranks`
    """
    check_has_all_samples(loader)
    if collectives.size() > 1:
        check_order(loader, "Use shuffle=False, so that all ranks have the same batches.")
    return (
        (number, batch)
        for number, batch in enumerate(_with_progress(loader, title))
        if number % collectives.size() == collectives.rank()
    )


def _with_progress(loader: Iterable[Any], title: str | None) -> Iterable[Any]:
    return loader if title is None or collectives.rank() else with_progress(loader, f"{title}, batches")


def check_has_all_samples(loader: Iterable[Any]) -> None:
    """Raise if there are several ranks and the loader has the samples of one."""
    if collectives.size() > 1 and any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader)):
        raise ValueError(
            "every rank must pass a loader of all samples, which are divided among the ranks here; found a loader with "
            "a DistributedSampler, which has the samples of one rank. Remove the sampler."
        )


def _samplers(loader: Iterable[Any]) -> Iterator[Any]:
    return (getattr(source, "sampler", None) for source in (loader, getattr(loader, "batch_sampler", None)))
