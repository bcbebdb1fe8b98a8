"""`select`: choose the training samples that help most on a target set."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from samplewise.attribution.scoring import largest
from samplewise.attribution.store import ProjectedStore, Queries


def select(
    store: ProjectedStore,
    queries: Queries,
    k: int,
    *,
    reduce: Literal["max", "mean"] = "max",
    cosine: bool = True,
    damping: float | None = None,
) -> Tensor:
    """Indices (k,) of the k samples of a store with the largest scores for a target set, in descending order.

    The score of a sample is its largest cosine with a query: a cosine, so that samples with large gradients, such as
    wrong labels, do not win by their size alone; the largest, so that samples like any part of the target set are
    chosen. No sample is chosen twice; of equal scores, the earlier sample comes first. Fill the store with
    `second_moments=optimizer` to compare queries with the steps that Adam would make, as LESS does.

    queries: the target set: Gradients, a tensor (Q, dim) as from `store.project`, or several, as in `store.search`
    reduce: "max" over the queries (default), or "mean" for samples that help all queries together, which may favor one
        class
    cosine, damping: as in `store.search`, but cosine is True by default
    """
    if reduce not in ("mean", "max"):
        raise ValueError(f"reduce must be 'mean' or 'max'; found {reduce!r}.")
    if type(k) is not int or not 1 <= k <= len(store):
        raise ValueError(f"k must be an integer in 1..{len(store)}, the number of samples of the store; found {k!r}.")
    parts = []
    for _, scores in store.score_chunks(queries, cosine=cosine, damping=damping):
        if not len(scores):
            raise ValueError("queries must be at least one sample; found none.")
        parts.append(scores.mean(0) if reduce == "mean" else scores.amax(0))
    total = torch.cat(parts)[None]
    return largest(total, torch.arange(total.shape[1])[None], k)[1][0]
