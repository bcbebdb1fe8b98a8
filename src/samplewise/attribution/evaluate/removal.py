"""Retraining without the training samples with the highest scores of a query: does its output change?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samplewise.attribution.evaluate.lds import by_query, check_scores
from samplewise.attribution.evaluate.retrain import retrain
from samplewise.attribution.evaluate.training import MakeStep, Training, number_of_samples
from samplewise.attribution.projected_features import OutputFn, margin
from samplewise.core.state import random_state_restored
from samplewise.core.text import Table, Tabular, plural

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Removal(Tabular):
    """Mean decrease of the output of a query after retraining without k training samples, for each kind of scores.

    decrease, standard_error: mean over queries and its standard error, by kind: "these scores", "random", baselines
    per_query: decrease of each query (queries,), by kind
    """

    k: int
    decrease: Mapping[str, float]
    standard_error: Mapping[str, float]
    per_query: Mapping[str, Tensor]

    def _table(self) -> Table:
        rows = [(name, f"{mean:.3f}", f"{self.standard_error[name]:.3f}") for name, mean in self.decrease.items()]
        queries = plural(len(next(iter(self.per_query.values()))), "query", "queries")
        title = f"decrease of the output without {plural(self.k, 'training sample')}, {queries}"
        return Table(("removed by", "decrease", "± standard error"), rows, title)

    def to_pandas(self) -> pandas.DataFrame:
        """DataFrame with the decrease of each query: a row per query, a column for each kind of scores."""
        return by_query(self.per_query)


def removal(
    scores: Tensor,
    k: int,
    make_step: MakeStep,
    dataset: Dataset[Any],
    queries: Iterable[Any],
    directory: str | os.PathLike[str],
    *,
    baselines: Mapping[str, Tensor] | None = None,
    repeats: int = 1,
    seed: int = 0,
    epochs: int,
    batch_size: int = 64,
    output_fn: OutputFn = margin,
    processes: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Removal:
    """Decrease of each query's output when the model is retrained without the k samples with its highest scores.

    A model is trained for each query and each kind of scores, so use few queries. The decrease is the mean output of
    `repeats` models of all samples minus that of `repeats` models without the k samples.

    scores: (queries, training samples), as in `lds`
    baselines: name -> scores for comparison, such as nearest neighbors; removing random samples is added
    directory, epochs, batch_size, output_fn, repeats, processes, collate_fn: as in `retrain`
    """
    n = number_of_samples(dataset)
    if type(k) is not int or not 0 < k < n:
        raise ValueError(f"k must be an integer from 1 to {n - 1}, fewer than the training samples; found {k!r}.")
    training = Training(make_step, dataset, queries, output_fn, epochs, batch_size, collate_fn)
    with random_state_restored():  # outputs of a new model: errors are found before anything is trained
        count = len(training.outputs(training.new_step(0).model))
    check_scores(scores, count, n)
    for name, baseline in (baselines or {}).items():
        check_scores(baseline, count, n, f"baselines[{name!r}]")
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(count, n, generator=generator)
    kinds = {"these scores": scores, "random": random, **(baselines or {})}
    remaining = [  # indices of all samples but the k with the highest scores, ascending
        row.argsort(descending=True, stable=True)[k:].sort().values for matrix in kinds.values() for row in matrix
    ]

    def outputs_of(subsets: list[Tensor], name: str) -> Tensor:
        outputs = retrain(
            make_step,
            dataset,
            subsets,
            queries,
            Path(directory) / name,
            epochs=epochs,
            batch_size=batch_size,
            output_fn=output_fn,
            repeats=repeats,
            seed=seed,
            processes=processes,
            collate_fn=collate_fn,
        )
        return (outputs.mean(0) if repeats > 1 else outputs).double()

    full = outputs_of([torch.arange(n)], "all")
    # Each model was trained without the samples of one query, and gives outputs of all queries: those of its own count.
    outputs_without = outputs_of(remaining, f"without-{k}").view(len(kinds), count, count).diagonal(dim1=1, dim2=2)
    per_query = dict(zip(kinds, full[0] - outputs_without, strict=True))
    return Removal(
        k,
        {name: float(decrease.mean()) for name, decrease in per_query.items()},
        {name: float(decrease.std() / count**0.5) for name, decrease in per_query.items()},
        per_query,
    )
