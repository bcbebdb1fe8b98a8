"""Linear datamodeling score: rank correlation between predicted and actual outputs of retrained models.

Scores predict the output of a model trained on a subset as the sum of the scores of the subset's samples. The
prediction is compared with the outputs of models that were trained on these subsets, by Spearman's rank correlation
over subsets, for each query.

Legend: q query, s subset, i training sample, m repeated training of the same subset with another seed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samplewise.core.files import absolute, write_json
from samplewise.core.package import import_package
from samplewise.core.text import Table, Tabular, plural

if TYPE_CHECKING:
    import pandas

BOOTSTRAPS = 200

Subsets = Tensor | Sequence[Tensor]  # (count, size), or a list of 1-D tensors: indices of training samples


def subsets(dataset_size: int, count: int, *, fraction: float = 0.5, seed: int = 0) -> Tensor:
    """Random subsets of the training samples: indices (count, round(fraction * dataset_size)), ascending."""
    for name, number in (("dataset_size", dataset_size), ("count", count)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")
    size = round(fraction * dataset_size)
    if not 0 < fraction < 1 or not 0 < size < dataset_size:
        raise ValueError(
            f"fraction must be between 0 and 1, and leave some of the {dataset_size} samples in and some out; found "
            f"{fraction!r}."
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(dataset_size, generator=generator)[:size].sort().values for _ in range(count)])


@dataclass(frozen=True, repr=False)
class LDS(Tabular):
    """Linear datamodeling score of attribution scores, shown beside baselines.

    mean: over queries
    standard_error: of the mean, by bootstrap over subsets and queries
    per_query: (queries,)
    subsets: number of subsets
    agreement: mean rank correlation between two trainings of the same subsets with different seeds; None without
        repetitions
    ceiling: expected score of a prediction without error, because the outputs that it is compared with contain the
        noise of the seeds; None without repetitions
    baselines: LDS of other scores, by name
    """

    mean: float
    standard_error: float
    per_query: Tensor
    subsets: int
    agreement: float | None = None
    ceiling: float | None = None
    baselines: Mapping[str, LDS] = field(default_factory=dict)

    def _table(self) -> Table:
        limit = "" if self.ceiling is None else f", ceiling {self.ceiling:.3f}"
        title = f"LDS over {self.subsets} subsets and {plural(len(self.per_query), 'query', 'queries')}{limit}"
        rows = [(name, f"{result.mean:.3f}", f"{result.standard_error:.3f}") for name, result in self._all().items()]
        return Table(("scores", "LDS", "± standard error"), rows, title)

    def to_pandas(self) -> pandas.DataFrame:
        """DataFrame with the score of each query: a row per query, a column for these scores and for each baseline."""
        return by_query({name: result.per_query for name, result in self._all().items()})

    def _all(self) -> dict[str, LDS]:
        return {"these scores": self, **self.baselines}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write mean, standard error, ceiling and baselines to a JSON file, which `samplewise attribute` shows."""
        target = absolute(path)
        content = {
            "mean": self.mean,
            "standard_error": self.standard_error,
            "agreement": self.agreement,
            "ceiling": self.ceiling,
            "queries": len(self.per_query),
            "subsets": self.subsets,
            "baselines": {name: result.mean for name, result in self.baselines.items()},
        }
        write_json(target, content)


def lds(
    scores: Tensor,
    subsets: Subsets,
    outcomes: Tensor,
    *,
    baselines: Mapping[str, Tensor] | None = None,
    bootstraps: int = BOOTSTRAPS,
    seed: int = 0,
) -> LDS:
    """Linear datamodeling score of attribution scores: 1 if they rank the retrained models perfectly, 0 by chance.

    scores: (queries, training samples), as returned by `sw.influence` and `sw.trak`
    subsets: indices of the training samples of each model, (count, size) or a list of 1-D tensors
    outcomes: outputs of the models (count, queries), as returned by `retrain`; larger must mean better, as for scores.
        With repeated trainings, (repeats, count, queries): scores are compared with their mean, and the agreement of
        the repetitions gives the noise ceiling.
    baselines: name -> scores, to be evaluated in the same way, as returned by `baselines`; random scores are added
    bootstraps: number of resamplings of subsets and queries for the standard error
    """
    repeats = _repeats(outcomes)
    needed = 1 + max((int(indices.max()) for indices in subsets if len(indices)), default=0)
    check_scores(scores, repeats.shape[2], needed, or_more=True)
    members = membership(subsets, scores.shape[1])
    if repeats.shape[1] != len(members):
        raise ValueError(f"outcomes must have a row for each of the {len(members)} subsets; found {repeats.shape[1]}.")
    actual = repeats.mean(0).T
    agreement = _agreement(repeats)
    ceiling = None if agreement is None else _reliability_of_mean(agreement, len(repeats)) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    draws = _draws(actual, bootstraps, generator)

    def evaluate(scores: Tensor, beside: Mapping[str, LDS]) -> LDS:
        predicted = scores.double().cpu() @ members.T
        per_query = spearman(predicted, actual)
        means = torch.stack([spearman(predicted[q][:, s], actual[q][:, s]).mean() for q, s in draws])
        return LDS(float(per_query.mean()), float(means.std()), per_query, len(members), agreement, ceiling, beside)

    for name, baseline in (baselines or {}).items():
        check_scores(baseline, len(scores), scores.shape[1], f"baselines[{name!r}]")
    random = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    matrices = {"random": random, **(baselines or {})}
    return evaluate(scores, {name: evaluate(baseline, {}) for name, baseline in matrices.items()})


def membership(subsets: Subsets, n: int) -> Tensor:
    """Matrix (count, n) in float64: 1 if the sample is in the subset, 0 otherwise."""
    members = torch.zeros(len(subsets), n, dtype=torch.float64)
    for row, indices in zip(members, subsets, strict=True):
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < n:
            raise ValueError(
                f"subsets must hold indices of the {n} training samples that have scores; found "
                f"{int(indices.min())} to {int(indices.max())}."
            )
        if len(indices.unique()) < len(indices):
            raise ValueError("a subset must have each training sample once; found a repeated index.")
        row[indices] = 1
    return members


def check_scores(scores: Tensor, queries: int, samples: int, name: str = "scores", *, or_more: bool = False) -> None:
    """Raise ValueError unless the scores are finite, of shape (queries, training samples). or_more: there may be more
    training samples than `samples`.
    """

    def fit(rows: int, columns: int) -> bool:
        return rows == queries and (columns == samples or (or_more and columns > samples))

    shape = tuple(scores.shape) if isinstance(scores, Tensor) else ()
    if len(shape) != 2 or not fit(*shape):
        description = shape if isinstance(scores, Tensor) else type(scores).__name__
        remedy = f" Transpose them: {name}.T." if len(shape) == 2 and fit(*shape[::-1]) else ""
        columns = f"{samples} or more" if or_more else samples
        raise ValueError(
            f"{name} must have shape (queries, training samples) = ({queries}, {columns}); found {description}.{remedy}"
        )
    if not scores.isfinite().all():
        raise ValueError(f"{name} must be finite; found NaN or infinity.")


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation (q,) of the rows of two matrices (q, s); 0 for a row without any difference."""
    a, b = (ranks - ranks.mean(1, keepdim=True) for ranks in (_ranks(a), _ranks(b)))
    sizes = a.norm(dim=1) * b.norm(dim=1)
    return (a * b).sum(1) / sizes.where(sizes > 0, 1)


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value in its row, (q, s) in float64; equal values get the mean of their ranks."""
    values = values.contiguous()
    ordered = values.sort(1).values
    first = torch.searchsorted(ordered, values)
    last = torch.searchsorted(ordered, values, right=True) - 1
    return (first + last).double() / 2


def _repeats(outcomes: Tensor) -> Tensor:
    """Outcomes (m, s, q) in float64."""
    if outcomes.dim() not in (2, 3):
        raise ValueError(
            f"outcomes must have shape (count, queries) or (repeats, count, queries); found {tuple(outcomes.shape)}."
        )
    if not outcomes.isfinite().all():
        raise ValueError("outcomes must be finite; found NaN or infinity: the training of a model has diverged.")
    return outcomes.double().cpu().view(-1, *outcomes.shape[-2:])


def _agreement(repeats: Tensor) -> float | None:
    """Mean rank correlation over queries and pairs of repetitions."""
    pairs = [
        spearman(repeats[a].T, repeats[b].T).mean() for a in range(len(repeats)) for b in range(a + 1, len(repeats))
    ]
    return float(torch.stack(pairs).mean()) if pairs else None


def _reliability_of_mean(agreement: float, count: int) -> float:
    """Squared correlation of the mean of `count` repetitions with its expectation (Spearman-Brown formula)."""
    agreement = max(agreement, 0.0)
    return count * agreement / (1 + (count - 1) * agreement)


def _draws(actual: Tensor, count: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Resampled (queries, subsets), with replacement."""
    q, s = actual.shape
    if type(count) is not int or count < 2:
        raise ValueError(f"bootstraps must be an integer, 2 or more; found {count!r}.")
    if s < 3:
        raise ValueError(f"a rank correlation needs at least 3 subsets; found {s}.")
    return [
        (torch.randint(q, (q,), generator=generator), torch.randint(s, (s,), generator=generator)) for _ in range(count)
    ]


def by_query(columns: Mapping[str, Tensor]) -> pandas.DataFrame:
    """DataFrame of pandas with a row for each query and a named column for each vector (queries,)."""
    table = import_package("pandas", "to_pandas").DataFrame({name: column.tolist() for name, column in columns.items()})
    return table.rename_axis(index="query")
