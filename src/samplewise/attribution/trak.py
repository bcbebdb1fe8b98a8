"""On top of a store: `sw.trak`, scores from an ensemble of models, and `select`, the samples that help most."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from samplewise.attribution.curvature import checked_damping
from samplewise.attribution.projected_features import OutputFn
from samplewise.attribution.scoring import top
from samplewise.attribution.store import ProjectedStore, Queries
from samplewise.attribution.store_files import Dtype
from samplewise.attribution.units import Unit, check_units
from samplewise.core.microbatch import Microbatch
from samplewise.core.validate import refuse_keras
from samplewise.dataset_pass import check_train_and_queries
from samplewise.engine.projection import Method
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_rank_zero


def trak(
    models: nn.Module | Iterable[nn.Module],
    output_fn: OutputFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    dim: int,
    *,
    seed: int = 0,
    damping: float | None = None,
    directory: str | os.PathLike[str] | None = None,
    dtype: Dtype = "float32",
    projection: Method = "factored",
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> Tensor:
    """TRAK scores (queries, training samples): effect of a training sample on the output of a query.

    Positive for a training sample that raises the query's output. With the projected gradients phi of the outputs of
    one model, and Phi those of all training samples, the score is the mean over models of
    phi(query)^T (Phi^T Phi + lambda I)^-1 phi(sample), times the mean over models of the weight of the sample: minus
    the derivative of its loss with respect to its output, which is 1 - probability for `margin`.

    models: a model, or a list of models, or a generator that yields one at a time to save memory; for good scores
        train them on different random subsets of the training samples
    output_fn: (model, batch) -> outputs (B,), or (outputs, weights); `sw.attribution.margin` for classification
    train, queries: loaders or lists of batches; columns and rows of the result are in their order
    dim: numbers per sample and model; a quarter of the number of training samples is a good start
    damping: lambda as a multiple of the mean eigenvalue of Phi^T Phi, see `Curvature`; default 0.1. Values from 0.1 to
        0.3 were best in measurements
    directory: of a `ProjectedStore`, to continue an interrupted call, or to add models later; default: a temporary
        directory
    dtype: of the stored rows, "float32" (default), "float16" for half the disk space and errors of about 0.25 % of the
        largest score, or "int8" for a quarter, see `ProjectedStore`
    projection: "factored" (default) or "dense", the method of `g.project`
    unit, query_unit: as in `sw.influence`, if `output_fn` returns an output per token, (B, T); default None
    microbatch: number of samples computed at a time, "auto" (default) for the largest that fits into memory, or
        `sw.auto(memory)`
    """
    check_train_and_queries(train, queries)
    unit, query_unit = check_units(unit, query_unit)
    if isinstance(models, (nn.Module, str, os.PathLike)) and not isinstance(models, nn.ModuleList):
        models = [models]
    with _store_directory(directory) as place:
        store = ProjectedStore(place, dim, seed, dtype=dtype, projection=projection)
        projected: dict[int, Tensor] = {}
        for model in models:
            refuse_keras(model)
            if not isinstance(model, nn.Module):
                raise TypeError(
                    "models must be a model, or models in a list or generator, each with its own parameters; found "
                    f"{type(model).__name__}. For the checkpoints of a run, load each into a copy of the model, or "
                    "call sw.attribution.attribute(..., method='trak')."
                )
            number = store.fill(model, output_fn, train, returns="outputs", unit=unit, microbatch=microbatch)
            if number in projected:
                raise ValueError(
                    "models must differ; found one with the parameters of an earlier one. Pass each model once; a "
                    "generator that loads checkpoints into one model must load another one for each."
                )
            projected[number] = store.project(model, output_fn, queries, unit=query_unit, microbatch=microbatch)
        if not projected:
            raise ValueError("models must be a model, or at least one model in a list; found none.")
        return store.scores(projected, damping=checked_damping(damping))


@contextmanager
def _store_directory(directory: str | os.PathLike[str] | None) -> Iterator[str | os.PathLike[str]]:
    """The directory, or a temporary one that is removed at the end."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="samplewise-trak-") as temporary:
        yield on_rank_zero(lambda: temporary)
        collectives.barrier()  # before rank 0 removes it


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

    def chunks() -> Iterator[tuple[slice, Tensor]]:
        for part, scores in store.score_chunks(queries, cosine=cosine, damping=damping):
            if not len(scores):
                raise ValueError("queries must be at least one sample; found none.")
            yield part, scores.mean(0, keepdim=True) if reduce == "mean" else scores.amax(0, keepdim=True)

    return top(chunks(), k)[1][0]
