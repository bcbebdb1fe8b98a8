"""Random projections of per-sample gradients on disk, of one or several models, for repeated searches.

store.json          format, dim, seed, dtype
model-0000/         rows of the first model, see `rows_file`
model-0001/         rows of the second model; ...
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.attribution.kernel import CHUNK, Kernel, check_damping
from samplewise.attribution.outputs import OutputFn, outputs_and_weights
from samplewise.attribution.rows_file import DTYPES, ModelIndex, RowsFile, read_json
from samplewise.core.atomic_io import absolute, atomic_write
from samplewise.core.batches import cut, length
from samplewise.core.losses import LossFn
from samplewise.core.snapshot import eval_mode
from samplewise.core.tensor_bytes import tensor_bytes
from samplewise.core.text import plural
from samplewise.distributed.group import current_group, errors_on_all_ranks, on_rank_zero
from samplewise.engine.gradients import Gradients, project
from samplewise.engine.projection import Projection
from samplewise.errors import StoreError
from samplewise.eval_pass import check_order, map_over_ranks
from samplewise.scan import scan

FORMAT = 2
# `fill` writes rows when they have this many elements, or when this time has passed since the last write.
ELEMENTS_PER_WRITE = 2**24
SECONDS_PER_WRITE = 5.0

Rows = Gradients | Tensor
Queries = Rows | Sequence[Rows] | Mapping[int, Rows]


class ProjectedStore:
    """Directory of random projections of per-sample gradients, of one or several models, searchable by score.

    Opens the store at `path`, or creates one. Sample k is the k-th that was added. Only one writer at a time. With
    several ranks, every rank opens the store, at a path that all ranks see.

    dim: numbers per sample and model; the error of a dot product is about |a||b|/sqrt(dim)
    seed: of the projection of the first model, as in `g.project`; model k has seed + k; default 0
    dtype: of the rows on disk, "float16" (default) or "float32"; each row has a float32 scale
    """

    def __init__(self, path: str | os.PathLike[str], dim: int, seed: int = 0, *, dtype: str = "float16"):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be an integer, 1 or more; found {dim!r}.")
        if type(seed) is not int:
            raise ValueError(f"seed must be an integer; found {seed!r}.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; found {dtype!r}.")
        self.path = absolute(path)
        self.dim = dim
        self.seed = seed
        self.dtype = dtype
        on_rank_zero(self._create)
        self._check_settings()
        self._models = [RowsFile(folder, dim, dtype) for folder in self._folders()]

    @property
    def models(self) -> int:
        """Number of models that have rows in the store."""
        return len(self._models)

    def __len__(self) -> int:
        """Number of samples that have rows of every model."""
        return min((len(file) for file in self._models), default=0)

    def __repr__(self) -> str:
        size = f"{plural(len(self), 'sample')}, {plural(self.models, 'model')}, dim={self.dim}"
        return f"ProjectedStore({str(self.path)!r}, {size}, seed={self.seed})"

    # --- writing ---------------------------------------------------------------------------------------------------

    def add(self, g: Rows, weights: Tensor | None = None, *, model: int = 0) -> None:
        """Append the projections of a batch of gradients, or rows (B, dim) that are projected already.

        weights: (B,), if the gradients are those of an output function, as in `sw.trak`; default: none
        model: number of the model; the next number starts the rows of another model
        """
        if not 0 <= model <= self.models:
            raise ValueError(f"model must be in 0..{self.models}; found {model!r}.")
        rows = self._projected(g, model, "rows")
        if model == self.models:
            self._start(ModelIndex(weighted=weights is not None))
        file = self._models[model]
        if file.index.weighted != (weights is not None):
            wanted = "with weights" if file.index.weighted else "without weights"
            raise StoreError(f"rows of model {model} must be added {wanted}, as the first ones were; found the other.")
        file.append(rows, None if weights is None else _checked_weights(weights, len(rows)))

    def fill(
        self,
        model: nn.Module,
        fn: LossFn | OutputFn,
        loader: Iterable[Any],
        microbatch: int | str | None = "auto",
        *,
        output: bool = False,
    ) -> int:
        """Add the samples of a loader for a model and return the model's number.

        A model is identified by the checksum of its parameters and buffers. Samples that the store has of this model
        are skipped, so an interrupted fill can be continued with the same arguments; the first sample is computed again
        and compared. Another model starts new rows. Rows are written every 5 seconds. The model is in
        evaluation mode. With several ranks, each computes its share of the batches, and rank 0 writes.

        fn: loss function or criterion, as in `sw.scan`; with output=True an output function such as `sw.margin`, whose
            weights are stored with the rows
        """
        check_order(loader, "Use shuffle=False: samples are identified by their position.")
        number = self._number(ModelIndex(model=_checksum(model), weighted=output))
        file = self._models[number]
        compute = self._features(model, fn, number, microbatch)
        missing = _skip_samples(loader, len(file), lambda first: self._compare(compute(first), file))
        writer = _Writer(file)
        with eval_mode(model):
            for rows, weights in map_over_ranks(compute, missing):
                writer.add(rows, weights)
        writer.finish()
        return number

    def project(
        self, model: nn.Module, fn: LossFn | OutputFn, loader: Iterable[Any], microbatch: int | str | None = "auto"
    ) -> Tensor:
        """Projections (Q, dim) of the samples of a loader, to search with; they are not stored.

        The model must be one that the store was filled with. With several ranks, each computes its share.
        """
        number = self._known(_checksum(model))
        compute = self._features(model, fn, number, microbatch)
        with eval_mode(model):
            parts = [rows for rows, _ in map_over_ranks(compute, loader)]
        return torch.cat([torch.zeros(0, self.dim), *parts])

    # --- reading ---------------------------------------------------------------------------------------------------

    def rows(self, start: int = 0, stop: int | None = None, *, model: int = 0) -> Tensor:
        """Stored rows (stop - start, dim) of a model in float32. Default: all rows of the first model."""
        if not self.models:
            return torch.zeros(0, self.dim)
        file = self._models[model]
        start, stop, _ = slice(start, stop).indices(len(file))
        return file.rows(start, stop)

    def weights(self, *, model: int = 0) -> Tensor:
        """Weights (n,) of the samples; ones if the rows were added without weights."""
        return self._models[model].weights(0, len(self._models[model])) if self.models else torch.ones(0)

    def scores(self, queries: Queries, *, cosine: bool = False, damping: float | None = None) -> Tensor:
        """Scores (Q, n) of all samples for each query; see `search`. `score_chunks` yields them in parts."""
        chunks = [scores for _, scores in self.score_chunks(queries, cosine=cosine, damping=damping)]
        return torch.cat(chunks, 1)

    def score_chunks(
        self, queries: Queries, *, cosine: bool = False, damping: float | None = None, chunk: int = CHUNK
    ) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over (slice of samples, scores (Q, samples of the slice)); see `search`.

        chunk: rows in memory at a time; default 8192
        """
        _check_positive("chunk", chunk)
        check_damping(damping)
        projected = self._queries(queries)
        count = self._common_count(projected)
        kernels = {number: Kernel(self._models[number], damping, cosine) for number in projected if self.models}
        directions = {number: kernel.of_queries(projected[number]) for number, kernel in kernels.items()}
        return self._score_chunks(kernels, directions, count, chunk, len(next(iter(projected.values()))))

    def _score_chunks(
        self, kernels: dict[int, Kernel], directions: dict[int, Tensor], count: int, chunk: int, queries: int
    ) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, max(count, 1), chunk):
            part = slice(start, min(start + chunk, count))
            scores = torch.zeros(queries, part.stop - start)
            weights = torch.zeros(part.stop - start)
            for number, kernel in kernels.items():
                file = self._models[number]
                scores.addmm_(directions[number], kernel.of_rows(file.rows(start, part.stop)).T)
                weights += file.weights(start, part.stop) / len(kernels)
            scores /= max(len(kernels), 1)
            if not (kernels and next(iter(kernels.values())).cosine):
                scores *= weights
            if not scores.isfinite().all():
                raise ValueError("scores must be finite in float32; found an overflow. Scale the queries down.")
            yield part, scores

    def search(
        self,
        queries: Queries,
        k: int = 10,
        chunk: int = CHUNK,
        *,
        cosine: bool = False,
        damping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k largest scores (Q, k) of each query, in descending order, and their samples (Q, k). Exact: every row is
        compared; of equal scores, the earlier sample comes first.

        The score is the mean over models of the inner product of the projections of query and sample, times the mean
        of the sample's weights, if the rows have weights.

        queries: Gradients or a tensor (Q, dim); for several models a list with one for each model, in their order, or
            a dict {number of the model: queries} to use some of the models
        cosine: divide the inner products by the norms of both rows, and leave out the weights; default False
        damping: precondition with (X^T X + lambda I)^-1, where X are the rows of the model and lambda is `damping`
            times the mean eigenvalue of X^T X; default None: no preconditioning
        chunk: rows in memory at a time; default 8192
        """
        _check_positive("k", k)
        best: tuple[Tensor, Tensor] | None = None
        for part, scores in self.score_chunks(queries, cosine=cosine, damping=damping, chunk=chunk):
            samples = torch.arange(part.start, part.stop).expand(len(scores), -1)
            if best is not None:
                scores = torch.cat([best[0], scores], 1)
                samples = torch.cat([best[1], samples], 1)
            best = largest(scores, samples, k)
        assert best is not None  # an empty store has one empty chunk
        return best

    # --- inside ----------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        index = self.path / "store.json"
        if index.exists():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "dim": self.dim, "seed": self.seed, "dtype": self.dtype}
        with atomic_write(index, index.with_suffix(".json.partial")) as file:
            file.write(json.dumps(content, indent=1).encode())

    def _check_settings(self) -> None:
        path = self.path / "store.json"
        index = read_json(path, {"format": int, "dim": int, "seed": int, "dtype": str})
        if index["format"] != FORMAT:
            raise StoreError(
                f"{path} must have format {FORMAT}; found {index['format']}. Use the version of samplewise that wrote "
                "it, or fill a new store at another path."
            )
        for name in ("dim", "seed", "dtype"):
            expected = getattr(self, name)
            if index[name] != expected:
                raise StoreError(
                    f"the store at {self.path} must have {name}={expected}, as requested; found {name}={index[name]}. "
                    f"Open it with {name}={index[name]!r}, or choose another path."
                )

    def _folders(self) -> list[Any]:
        return sorted(index.parent for index in self.path.glob("model-*/model.json"))

    def _start(self, index: ModelIndex) -> None:
        """Start the rows of another model."""
        folder = self.path / f"model-{self.models:04d}"
        on_rank_zero(lambda: RowsFile(folder, self.dim, self.dtype, index) and None)
        self._models.append(RowsFile(folder, self.dim, self.dtype))

    def _number(self, wanted: ModelIndex) -> int:
        """Number of the model with this checksum; starts its rows if there are none."""
        for number, file in enumerate(self._models):
            if file.index.model == wanted.model:
                if file.index.weighted != wanted.weighted:
                    kinds = {True: "an output function", False: "the loss"}
                    raise StoreError(
                        f"the rows of a model must be gradients of one function; found rows of "
                        f"{kinds[file.index.weighted]} of this model in the store at {self.path}. Pass "
                        f"output={file.index.weighted}, or choose another path."
                    )
                return number
        self._start(wanted)
        return self.models - 1

    def _known(self, checksum: str) -> int:
        for number, file in enumerate(self._models):
            if file.index.model == checksum:
                return number
        raise StoreError(
            f"queries must be projected with a model whose samples are in the store; found other parameters than those "
            f"of its {plural(self.models, 'model')}. Load the parameters that the store was filled with."
        )

    def _features(
        self, model: nn.Module, fn: LossFn | OutputFn, number: int, microbatch: int | str | None
    ) -> Callable[[Any], tuple[Tensor, Tensor | None]]:
        """Function of a batch that returns projected rows (B, dim), and weights (B,) or None."""
        weighted = self._models[number].index.weighted
        projection = Projection(self.dim, self.seed + number)

        def of_batch(batch: Any) -> tuple[Tensor, Tensor | None]:
            weights: list[Tensor] = []

            def outputs(model: nn.Module, piece: Any) -> Tensor:
                found, own = outputs_and_weights(fn(model, piece))
                weights.append(own)
                return found

            function = outputs if weighted else fn
            rows = []
            kept = []
            for _, g in scan(model, function, [batch], microbatch):
                rows.append(self._checked(project(g, projection), "rows"))
                kept.append(_checked_weights(weights.pop(), len(g)) if weighted else torch.ones(0))
            return torch.cat(rows), torch.cat(kept) if weighted else None

        return of_batch

    def _compare(self, first: tuple[Tensor, Tensor | None], file: RowsFile) -> None:
        """Raise if the first sample of the loader is not that of the store."""
        rows = first[0][:1]
        stored = file.rows(0, 1)
        if (rows - stored).abs().max() > 0.01 * stored.abs().max():
            raise StoreError(
                f"continuing to fill the store at {self.path} needs the same samples, in the same order, and the same "
                "function; found a first sample with another gradient than the stored one. Pass the same arguments, "
                "or choose another path."
            )

    def _queries(self, queries: Queries) -> dict[int, Tensor]:
        """Projected queries by the number of the model."""
        if isinstance(queries, (Gradients, Tensor)):
            queries = [queries]
        if isinstance(queries, Mapping):
            given = dict(queries)
        else:
            if len(queries) != max(self.models, 1):
                raise ValueError(
                    f"queries must be given for each of the {plural(self.models, 'model')} of the store; found "
                    f"{len(queries)}. Pass a list with one for each model, or a dict {{number of the model: queries}}."
                )
            given = dict(enumerate(queries))
        if not given or not all(number in range(max(self.models, 1)) for number in given):
            raise ValueError(f"queries must have keys in 0..{self.models - 1}, at least one; found {list(given)}.")
        projected = {number: self._projected(own, number, "queries") for number, own in given.items()}
        sizes = {len(rows) for rows in projected.values()}
        if len(sizes) > 1:
            raise ValueError(f"queries must be the same samples for each model; found {sorted(sizes)} samples.")
        return projected

    def _common_count(self, numbers: Iterable[int]) -> int:
        counts = {len(self._models[number]) for number in numbers} if self.models else {0}
        if len(counts) > 1:
            raise StoreError(
                f"the models of the store at {self.path} must have the same number of samples; found {sorted(counts)}. "
                "Continue to fill the store, or pass queries for some of the models as a dict."
            )
        return counts.pop()

    def _projected(self, gradients: Rows, model: int, name: str) -> Tensor:
        """Rows (B, dim) of gradients or of a tensor, float32, on the CPU."""
        rows = gradients.project(self.dim, self.seed + model) if isinstance(gradients, Gradients) else gradients
        return self._checked(rows, name)

    def _checked(self, rows: Tensor, name: str) -> Tensor:
        if not isinstance(rows, Tensor) or rows.is_complex():
            description = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{name} must be Gradients or a real tensor (B, {self.dim}); found {description}.")
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"{name} must have the store's shape (B, {self.dim}); found {tuple(rows.shape)}.")
        rows = rows.detach().float().cpu()
        if not rows.isfinite().all():
            raise ValueError(f"{name} must be finite in float32; found NaN or infinity.")
        return rows


class _Writer:
    """Collects rows and appends them to a file on rank 0, every ELEMENTS_PER_WRITE elements or
    SECONDS_PER_WRITE seconds."""

    def __init__(self, file: RowsFile):
        self._file = file
        self._parts: list[tuple[Tensor, Tensor | None]] = []
        self._elements = 0
        self._written = time.monotonic()

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        self._parts.append((rows, weights))
        self._elements += rows.numel()
        if self._elements >= ELEMENTS_PER_WRITE or time.monotonic() - self._written > SECONDS_PER_WRITE:
            self._write()

    def finish(self) -> None:
        """Write the remaining rows. Collective."""
        self._write()
        current_group().barrier()
        self._file.reload()

    def _write(self) -> None:
        if self._parts and current_group().rank == 0:
            rows, weights = zip(*self._parts, strict=True)
            with errors_on_all_ranks():
                self._file.append(torch.cat(rows), None if weights[0] is None else torch.cat(weights))
        self._parts.clear()
        self._elements = 0
        self._written = time.monotonic()


def largest(scores: Tensor, samples: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row in descending order, and their samples; the earlier column of equals first."""
    if scores.shape[1] > k:
        top = scores.topk(k + 1)
        tied = top.values[:, k - 1] == top.values[:, k]
        columns = top.indices[:, :k].sort(dim=1).values
        if tied.any():
            columns[tied] = scores[tied].sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        scores = scores.gather(1, columns)
        samples = samples.gather(1, columns)
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values, samples.gather(1, order)


def _check_positive(name: str, number: int) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")


def _checked_weights(weights: Tensor, count: int) -> Tensor:
    if weights.shape != (count,):
        raise ValueError(f"weights must have shape ({count},), one per sample; found {tuple(weights.shape)}.")
    weights = weights.detach().float().cpu()
    if not weights.isfinite().all():
        raise ValueError("weights must be finite in float32; found NaN or infinity.")
    return weights


def _checksum(model: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and values of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _skip_samples(loader: Iterable[Any], samples: int, check: Callable[[Any], None]) -> Iterator[Any]:
    """Batches of a loader without its first `samples` samples. `check` is called with the first sample that is skipped,
    as a batch.
    """
    unchecked = samples > 0
    for batch in loader:
        size = length(batch) if samples else 0
        if size is None:
            raise StoreError(
                "continuing to fill a store needs batches that can be sliced, to skip the samples it has; found a "
                f"batch of type {type(batch).__name__}. Start a new store, or call add for the missing samples."
            )
        if unchecked:
            check(cut(batch, 0, 1))
            unchecked = False
        if not samples:
            yield batch
        elif samples < size:
            yield cut(batch, samples, size)
        samples = max(samples - size, 0)
