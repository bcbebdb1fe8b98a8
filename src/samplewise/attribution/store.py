"""Random projections of per-sample gradients on disk, of one or several models, for repeated searches.

`store_files` has the files, `projected_features` computes rows, `scoring` the inner products of a search.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.attribution.curvature import checked_damping
from samplewise.attribution.projected_features import (
    Features,
    OutputFn,
    Writer,
    adam_scale,
    block_slices,
    checked_rows,
    checked_weights,
    checksum_of_model,
    checksum_of_scale,
    features_of,
    layer_of,
    layer_widths,
    skip_samples,
)
from samplewise.attribution.scoring import CHUNK, Kernels, top
from samplewise.attribution.store_files import (
    DTYPES,
    Dtype,
    ModelIndex,
    RowsFile,
    create_store,
    mapped,
    npy_matrix,
    open_store,
)
from samplewise.attribution.units import Unit, by_unit
from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import absolute
from samplewise.core.losses import LossFn, with_constants
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.core.text import plural, progress
from samplewise.core.validate import check_module
from samplewise.dataset_pass import check_has_all_samples, check_order, map_over_ranks
from samplewise.engine.gradients import Gradients, project
from samplewise.engine.projection import Method, Projection, check_method
from samplewise.errors import StoreError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank, on_rank_zero

SAME = 0.1  # relative difference of two computations of a row, in any dtype; other samples differ by about 1

Queries = Gradients | Tensor | Sequence[Gradients | Tensor] | Mapping[int, Gradients | Tensor]


class ProjectedStore:
    """Directory of random projections of per-sample gradients, of one or several models, searchable by score.

    Opens the store in `directory`, or creates one. Sample k is the k-th that was added. One process writes at a time:
    `add` and `fill` hold a lock, and raise StoreError with the name of the process that holds it. With several ranks,
    every rank opens the store, in a directory that all ranks see.

    dim: numbers per sample and model; a quarter of the number of samples is a good start, see docs/attribution.md
    seed: of the projection of the first model, as in `g.project`; model k has seed + k; default 0
    dtype: of the rows on disk, "float16" (default), "float32" or "int8"; each row has a float32 scale. With "int8" an
        entry is wrong by at most 1/254 of the largest entry of its row
    blocks: "layer" divides `dim` among the layers, so that scores can be restricted to some of them; default None: all
        parameters are projected together
    projection: "factored" (default) or "dense", the method of `g.project`; rows of the two cannot be compared
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        dim: int,
        seed: int = 0,
        *,
        dtype: Dtype = "float16",
        blocks: Literal["layer"] | None = None,
        projection: Method = "factored",
    ):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be an integer, 1 or more; found {dim!r}.")
        if type(seed) is not int:
            raise ValueError(f"seed must be an integer; found {seed!r}.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; found {dtype!r}.")
        if blocks not in (None, "layer"):
            raise ValueError(f"blocks must be 'layer' or None; found {blocks!r}.")
        self.directory = absolute(directory)
        self.dim = dim
        self.seed = seed
        self.dtype = dtype
        self.blocks = blocks
        check_method(projection, "projection")
        self.projection = projection
        self._lock = DirectoryLock(
            self.directory, "store.lock", place="store", user="writer", remedy="open the store again", error=StoreError
        )
        on_rank_zero(lambda: create_store(self.directory, self._settings, self._lock))
        self._files = on_every_rank(self._open)  # before any rank goes on to write

    @property
    def _settings(self) -> dict[str, int | str]:
        """Settings in store.json."""
        return {
            "dim": self.dim,
            "seed": self.seed,
            "dtype": self.dtype,
            "blocks": self.blocks or "",
            "projection": self.projection,
        }

    @property
    def models(self) -> int:
        """Number of models that have rows in the store."""
        return len(self._files)

    @property
    def layers(self) -> list[str]:
        """Layers whose blocks the rows of the first model have; empty without blocks="layer"."""
        return [layer for layer, _ in self._files[0].index.layers] if self.models else []

    def __len__(self) -> int:
        """Number of samples that have rows of every model."""
        return min((len(file) for file in self._files), default=0)

    def __repr__(self) -> str:
        size = f"{plural(len(self), 'sample')}, {plural(self.models, 'model')}, dim={self.dim}"
        settings = f"seed={self.seed}, dtype={self.dtype!r}" + (f", blocks={self.blocks!r}" if self.blocks else "")
        return f"ProjectedStore({str(self.directory)!r}, {size}, {settings})"

    # --- writing ---------------------------------------------------------------------------------------------------

    def add(self, g: Gradients | Tensor, weights: Tensor | None = None, *, model_number: int = 0) -> None:
        """Append the projections of a batch of gradients, or rows (B, dim) that are projected already.

        With several ranks, call it on one of them.

        weights: (B,), if the gradients are those of an output function, as in `sw.trak`; default: none
        model_number: as returned by `fill`; the next number starts the rows of another model
        """
        if model_number not in range(self.models + 1):
            raise ValueError(f"model_number must be in 0..{self.models}; found {model_number!r}.")
        rows = self._project(g, model_number, "rows")
        features = Features(rows, None if weights is None else checked_weights(weights, len(rows)))
        if model_number < self.models and self._files[model_number].index.weighted != (weights is not None):
            condition = "with weights" if weights is None else "without weights"
            raise StoreError(
                f"rows of model {model_number} must be added {condition}, as the first ones were; found the other."
            )
        with self._lock:
            files = self._open()
            # If another writer has changed the rows, those of this one would not be the next samples.
            if [file.index for file in files] != [file.index for file in self._files]:
                raise StoreError(
                    f"samples must be added to the store in {self.directory} by one writer; found that another one has "
                    f"changed it since it was opened here: it has {sum(map(len, files))} rows in place of "
                    f"{sum(map(len, self._files))}. Nothing was added. Open the store again, and add what it lacks."
                )
            if model_number == self.models:
                layers = layer_widths(g.names, self.dim) if isinstance(g, Gradients) and self.blocks else ()
                index = ModelIndex(weighted=weights is not None, layers=layers)
                self._files.append(RowsFile(self._next_directory(), self._layout, index))
            self._lock.verify()
            self._files[model_number].append(*features)

    def fill(
        self,
        model: nn.Module,
        fn: LossFn | OutputFn,
        loader: Iterable[Any],
        *,
        returns: Literal["losses", "outputs"] = "losses",
        second_moments: torch.optim.Optimizer | None = None,
        unit: Unit | None = None,
        microbatch: Microbatch = "auto",
    ) -> int:
        """Add the samples of a loader for a model, and return the model's number.

        A model is identified by the checksum of its parameters and buffers; another model starts new rows. Samples that
        the store has of this model are skipped, so an interrupted fill can be continued with the same arguments; the
        first sample is computed again and compared. Rows are written every 5 seconds, and at the end; another process
        cannot write in the meantime. The model is in evaluation mode. With several ranks, each computes its share of
        the batches, and rank 0 writes.

        fn: loss function or criterion, as in `sw.scan`, or an output function such as `sw.attribution.margin`
        returns: "losses" (default), or "outputs" if `fn` is an output function, whose weights are stored with the rows
        second_moments: optimizer of the Adam family; gradients are multiplied by the scale of its steps,
            1 / (sqrt(v) + eps), before they are projected, at the cost of rows of all parameters; default None
        unit: as in `sw.influence`, if `fn` returns a value per token, (B, T); default None
        microbatch: number of samples computed at a time, "auto" (default) for the largest that fits into memory, or
            `sw.auto(memory)`
        """
        if returns not in ("losses", "outputs"):
            raise ValueError(f"returns must be 'losses' or 'outputs'; found {returns!r}.")
        check_module(model)
        weighted = returns == "outputs"
        check_order(loader, "Use shuffle=False: samples are identified by their position.")
        check_has_all_samples(loader)
        scale = None if second_moments is None else adam_scale(model, second_moments)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        layers = layer_widths(trained, self.dim) if self.blocks else ()
        index = ModelIndex(0, checksum_of_model(model), weighted, checksum_of_scale(scale), layers)
        with self._locked():
            number = self._number(index)
            file = self._files[number]
            unit_fn, units = by_unit(model, fn, loader, unit, weighted=weighted)
            compute = features_of(model, unit_fn, self._projection(number, trained, scale), weighted, microbatch)
            batches = with_constants(units, unit_fn)
            missing = skip_samples(batches, len(file), lambda first: self._compare(compute(first), file))
            writer = Writer(file, self._lock)
            with eval_mode(model), _progress(loader, f"gradients of model {number}") as advance:
                for features in map_over_ranks(compute, missing):
                    writer.add(features)
                    advance(1)
            writer.finish()
            return number

    def project(
        self,
        model: nn.Module,
        fn: LossFn | OutputFn,
        loader: Iterable[Any],
        *,
        unit: Unit | None = None,
        microbatch: Microbatch = "auto",
    ) -> Tensor:
        """Projections (Q, dim) of the samples of a loader, to search with; they are not stored.

        The model must be one that the store was filled with, and `fn` a function of the same kind. The `unit` may be
        another. With several ranks, each computes its share.
        """
        check_order(loader, "Use shuffle=False: rows are in the order of the loader.")
        number = self._find(checksum_of_model(model))
        index = self._files[number].index
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        unit_fn, units = by_unit(model, fn, loader, unit, weighted=index.weighted)
        compute = features_of(model, unit_fn, self._projection(number, trained), index.weighted, microbatch)
        with eval_mode(model), _progress(loader, "gradients of queries") as advance:
            parts = []
            for features in map_over_ranks(compute, units):
                parts.append(features.rows)
                advance(1)
        return torch.cat([torch.zeros(0, self.dim), *parts])

    # --- reading ---------------------------------------------------------------------------------------------------

    def rows(self, start: int = 0, stop: int | None = None, *, model_number: int = 0) -> Tensor:
        """Stored rows (stop - start, dim) of a model in float32. Default: all rows of the first model."""
        if not self.models:
            return torch.zeros(0, self.dim)
        start, stop, _ = slice(start, stop).indices(len(self._files[model_number]))
        return self._files[model_number].rows(start, stop)

    def weights(self, *, model_number: int = 0) -> Tensor:
        """Weights (n,) of the samples; ones if the rows were added without weights."""
        if not self.models:
            return torch.ones(0)
        file = self._files[model_number]
        return file.weights(0, len(file))

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
        chunk_size: int = CHUNK,
    ) -> tuple[Tensor, Tensor]:
        """The k largest scores (Q, k) of each query, in descending order, and their samples (Q, k). Exact: every row is
        compared; of equal scores, the earlier sample comes first.

        The score is the mean over models of the inner product of the projections of query and sample, times the mean
        over models of the sample's weight, if the rows have weights. Rows of losses: positive for a sample that lowers
        the query's loss. Rows of outputs: positive for a sample that raises the query's output.

        queries: Gradients or a tensor (Q, dim); for several models a list with one for each model, in their order, or
            a dict {number of the model: queries} to use some of the models
        cosine: divide the inner products by the norms of both rows, and leave out the weights; default False
        damping: precondition with (X^T X + lambda I)^-1, where X are the rows of the model and lambda is `damping`
            times the mean eigenvalue of X^T X, see `Curvature`; default None: no matrix is inverted
        layers: use the blocks of these layers only, in a store with blocks="layer"; default None: all
        chunk_size: rows in memory at a time; default 4096
        """
        _check_positive("k", k)
        return top(self.score_chunks(queries, cosine=cosine, damping=damping, layers=layers, chunk_size=chunk_size), k)

    def scores(
        self,
        queries: Queries,
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Tensor:
        """Scores (Q, n) of all samples for each query; see `search` for the arguments.

        path: of a .npy file for the scores; the result is then a memory map of it. Default None: in memory
        """
        projected = self._queries(queries)
        chunks = self.score_chunks(projected, cosine=cosine, damping=damping, layers=layers)
        if path is None:
            return torch.cat([scores for _, scores in chunks], 1)
        size = len(next(iter(projected.values()))), self._common_count(projected)
        with npy_matrix(path, *size) as matrix:
            for part, scores in chunks:
                matrix[:, part] = scores
        return mapped(absolute(path), *size)

    def score_chunks(
        self,
        queries: Queries,
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
        chunk_size: int = CHUNK,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over (slice of samples, scores (Q, samples of the slice)); see `search` for the arguments."""
        _check_positive("chunk_size", chunk_size)
        projected = self._queries(queries)
        count = self._common_count(projected)
        kernels = self._kernels(projected, cosine, damping, layers)
        vectors = kernels.of_queries(projected)
        slices = (slice(start, min(start + chunk_size, count)) for start in range(0, max(count, 1), chunk_size))
        return ((part, kernels.scores(vectors, part)) for part in slices)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
    ) -> Path:
        """Write an array (n, models x dim) in float32 as a .npy file, for an index of inner products such as FAISS.

        Its inner products with `query_vectors(queries)`, for the same arguments, are the scores; see `search`.
        """
        numbers = range(self.models)
        count = self._common_count(numbers)
        kernels = self._kernels(numbers, cosine, damping, layers)
        with npy_matrix(path, count, kernels.width) as matrix:
            for start in range(0, count, CHUNK):
                part = slice(start, min(start + CHUNK, count))
                matrix[part] = kernels.of_rows(part)
        return absolute(path)

    def query_vectors(
        self,
        queries: Queries,
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
    ) -> Tensor:
        """Vectors (Q, models x dim) in float32, whose inner products with the rows of `export` are the scores."""
        projected = self._queries(queries)
        if len(projected) != self.models:
            raise ValueError(f"queries must be given for all {self.models} models; found {len(projected)}.")
        vectors = self._kernels(projected, cosine, damping, layers).of_queries(projected)
        return torch.cat([vectors[number] for number in range(self.models)], 1)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _open(self) -> list[RowsFile]:
        self._layout, files = open_store(self.directory, self._settings)
        return files

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock on rank 0, and read what other processes have written before. Collective."""
        on_every_rank(self._lock.acquire if collectives.rank() == 0 else lambda: None)
        try:
            self._files = on_every_rank(self._open)
            yield
        finally:
            self._lock.release()

    def _next_directory(self) -> Path:
        return self.directory / f"model-{self.models:04d}"

    def _number(self, index: ModelIndex) -> int:
        """Number of the model with this checksum; starts its rows if there are none. Collective."""
        numbers = [number for number, file in enumerate(self._files) if file.index.model == index.model]
        if not numbers:
            directory = self._next_directory()
            on_rank_zero(lambda: RowsFile(directory, self._layout, index) and None)
            self._files.append(RowsFile(directory, self._layout))
            return self.models - 1
        stored = self._files[numbers[0]].index
        if (stored.weighted, stored.scaling) != (index.weighted, index.scaling):
            kind = "an output function" if stored.weighted else "the loss"
            kind += ", scaled by Adam's second moments" if stored.scaling else ""
            raise StoreError(
                "the rows of a model must be gradients of one function, with one scale; found that the store in "
                f"{self.directory} has rows of {kind} for this model. Pass the same returns and second_moments, or "
                "choose another directory."
            )
        return numbers[0]

    def _find(self, checksum: str) -> int:
        """Number of the model with this checksum."""
        for number, file in enumerate(self._files):
            if file.index.model == checksum:
                return number
        raise StoreError(
            "queries must be projected with a model whose samples are in the store; found parameters of none of its "
            f"{plural(self.models, 'model')}. Load the parameters that the store was filled with."
        )

    def _compare(self, first: Features, file: RowsFile) -> None:
        """Raise if the first sample of the loader is not that of the store."""
        stored = file.rows(0, 1)
        if (first.rows[:1] - stored).norm() > SAME * stored.norm():
            raise StoreError(
                f"continuing to fill the store in {self.directory} needs the same samples, in the same order, and the "
                "same function; found a first sample with another gradient than the stored one. Pass the same "
                "arguments, or choose another directory."
            )

    def _projection(self, number: int, names: Iterable[str], scale: Mapping[str, Tensor] | None = None) -> Projection:
        blocks = None
        if self.blocks:
            slices = block_slices(layer_widths(names, self.dim))
            blocks = {name: slices[layer_of(name)] for name in names}
        return Projection(self.dim, self.seed + number, self.projection, blocks=blocks, scale=scale)

    def _project(self, g: Gradients | Tensor, number: int, name: str) -> Tensor:
        """Rows (B, dim) of gradients or of a tensor, float32, on the CPU."""
        rows = project(g, self._projection(number, g.names)) if isinstance(g, Gradients) else g
        return checked_rows(rows, self.dim, name)

    def _queries(self, queries: Queries) -> dict[int, Tensor]:
        """Projected queries by the number of the model."""
        by_model = [queries] if isinstance(queries, (Gradients, Tensor)) else queries
        if not isinstance(by_model, Mapping):
            if len(by_model) != max(self.models, 1):
                raise ValueError(
                    f"queries must be given for each of the {plural(self.models, 'model')} of the store; found "
                    f"{len(by_model)}. Pass a list with one for each model, or a dict {{number of the model: queries}}."
                )
            by_model = dict(enumerate(by_model))
        if not by_model or not all(number in range(max(self.models, 1)) for number in by_model):
            raise ValueError(f"queries must have keys in 0..{self.models - 1}, at least one; found {list(by_model)}.")
        projected = {number: self._project(g, number, "queries") for number, g in by_model.items()}
        sizes = {len(rows) for rows in projected.values()}
        if len(sizes) > 1:
            raise ValueError(f"queries must be the same samples for each model; found {sorted(sizes)} samples.")
        return projected

    def _kernels(
        self, numbers: Iterable[int], cosine: bool, damping: float | None, layers: Sequence[str] | None
    ) -> Kernels:
        multiple = None if damping is None else checked_damping(damping)
        files = {number: self._files[number] for number in numbers} if self.models else {}
        return Kernels(files, multiple, cosine, layers)

    def _common_count(self, numbers: Iterable[int]) -> int:
        counts = {len(self._files[number]) for number in numbers} if self.models else {0}
        if len(counts) > 1:
            raise StoreError(
                f"the models of the store in {self.directory} must have the same number of samples; found "
                f"{sorted(counts)}. Continue to fill the store, or pass queries for some of the models as a dict."
            )
        return counts.pop()


def _progress(loader: Iterable[Any], description: str) -> AbstractContextManager[Callable[[int], None]]:
    """Progress in batches, on rank 0; nothing for a loader without a length."""
    if not isinstance(loader, Sized) or collectives.rank() != 0:
        return nullcontext(lambda parts: None)
    return progress(len(loader), description)


def _check_positive(name: str, number: int) -> None:
    if type(number) is not int or number < 1:
        raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")
