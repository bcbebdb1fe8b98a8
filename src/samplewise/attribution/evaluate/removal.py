"""Retraining without the training samples with the highest scores of a query: does its output change?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samplewise.attribution.evaluate.lds import oriented
from samplewise.attribution.evaluate.retrain import retrain
from samplewise.attribution.evaluate.training import MakeStep, number_of_samples
from samplewise.core.text import render


@dataclass(frozen=True)
class Removal:
    """Mean decrease of the output of a query after retraining without k training samples, for each kind of scores."""

    k: int
    decrease: Mapping[str, float]  # mean over queries
    standard_error: Mapping[str, float]  # over queries
    per_query: Mapping[str, Tensor] = field(repr=False)  # (queries,)

    def __str__(self) -> str:
        rows = [(name, f"{mean:.3f}", f"{self.standard_error[name]:.3f}") for name, mean in self.decrease.items()]
        queries = len(next(iter(self.per_query.values())))
        title = f"decrease of the output without {self.k} training samples, {queries} queries"
        return render(("removed by", "decrease", "± standard error"), rows, title)


def removal(
    scores: Tensor,
    k: int,
    make_step: MakeStep,
    dataset: Dataset[Any],
    queries: Iterable[Any],
    folder: str | os.PathLike[str],
    *,
    baselines: Mapping[str, Tensor] | None = None,
    repeats: int = 1,
    seed: int = 0,
    **training: Any,
) -> Removal:
    """Decrease of each query's output when the model is retrained without the k samples with its highest scores.

    A model is trained for each query and each kind of scores, so use few queries. The decrease is the mean output of
    `repeats` models of all samples minus that of `repeats` models without the k samples.

    scores: (queries, n), or (n, queries) as in `lds`
    baselines: name -> scores for comparison, such as nearest neighbors; removing random samples is added
    training: further arguments of `retrain`, such as epochs, batch_size and output_fn
    """
    n = number_of_samples(dataset)
    if type(k) is not int or not 0 < k < n:
        raise ValueError(f"k must be an integer from 1 to {n - 1}, fewer than the training samples; found {k!r}.")
    count = _number_of_queries(scores, n)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(count, n, generator=generator)
    kinds = {"these scores": scores, "random": random, **(baselines or {})}
    kept = [remaining for each in kinds.values() for remaining in _without_highest(oriented(each, count, n), k)]
    options: dict[str, Any] = {"repeats": repeats, "seed": seed, **training}
    folder = os.fspath(folder)
    whole = retrain(make_step, dataset, [torch.arange(n)], queries, os.path.join(folder, "all"), **options)
    if whole.shape[-1] != count:
        raise ValueError(f"scores must have a row for each of the {whole.shape[-1]} queries; found {count}.")
    without = retrain(make_step, dataset, kept, queries, os.path.join(folder, f"without-{k}"), **options)
    whole, without = (_mean_of_repeats(each, repeats) for each in (whole, without))
    own = without.view(len(kinds), count, count).diagonal(dim1=1, dim2=2)
    per_query = dict(zip(kinds, whole[0] - own, strict=True))
    return Removal(
        k,
        {name: float(each.mean()) for name, each in per_query.items()},
        {name: float(each.std() / count**0.5) for name, each in per_query.items()},
        per_query,
    )


def _number_of_queries(scores: Tensor, n: int) -> int:
    if scores.dim() != 2 or n not in scores.shape:
        raise ValueError(f"scores must have shape (queries, n) with n = {n}; found {tuple(scores.shape)}.")
    return scores.shape[0] if scores.shape[1] == n else scores.shape[1]


def _without_highest(scores: Tensor, k: int) -> list[Tensor]:
    """Indices of all samples but the k with the highest scores, ascending, for each query."""
    return [row.argsort(descending=True, stable=True)[k:].sort().values for row in scores]


def _mean_of_repeats(outcomes: Tensor, repeats: int) -> Tensor:
    return (outcomes.mean(0) if repeats > 1 else outcomes).double()
