"""Inner products of projected rows: plain, cosine, or preconditioned with (X^T X + lambda I)^-1.

gram.f64 in the directory of a model holds X^T X (dim, dim) of its first rows in float64, after their number. It is
brought up to date when it is needed, and replaced atomically, so that it is consistent with the rows after a crash.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from samplewise.attribution.projected_features import block_slices
from samplewise.attribution.store_files import RowsFile, row_norms
from samplewise.core.files import atomic_write, tensor_bytes
from samplewise.core.text import listed, plural
from samplewise.errors import StoreError
from samplewise.parallel import collectives

CHUNK = 4096  # rows in memory at a time; in float32 they should fit into the cache


class Kernel:
    """Inner product q^T K r of queries and rows, with K = 1 or (X^T X + lambda I)^-1, or the cosine of its angle.

    Scores are `of_queries(q) @ units.T * factors`: the rows are multiplied as they are stored, without scales, and
    the products by the scale of the row, or for the cosine by one over its norm.

    damping: lambda divided by the mean of the eigenvalues of X^T X; None for K = 1
    layers: layers whose blocks of columns are used; None for all
    """

    def __init__(self, file: RowsFile, damping: float | None, cosine: bool, layers: Sequence[str] | None):
        self.cosine = cosine
        self.columns = None if layers is None else _columns(file, layers)
        self.width = file.dim if self.columns is None else len(self.columns)
        self._file = file
        self._factor: Tensor | None = None  # lower triangular L with L L^T = X^T X + lambda I
        if damping is not None and len(file):
            gram = updated_gram(file)
            if self.columns is not None:
                gram = gram[self.columns][:, self.columns]
            self._factor = _cholesky(gram, damping, file)

    def of_queries(self, queries: Tensor) -> Tensor:
        """K q of each query, divided by sqrt(q^T K q) for the cosine, (Q, width) float32."""
        queries = self._select(queries)
        if self._factor is not None:
            wide = torch.cholesky_solve(queries.double().T, self._factor).T
            return _divide(wide, (wide * queries).sum(1).clamp_min(0).sqrt(), self.cosine).float()
        return _divide(queries, row_norms(queries), self.cosine)

    def of_rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Rows in units of their scales (B, width), and their factors (B,), float32."""
        units = self._select(self._file.units(part.start, part.stop))
        if not self.cosine:
            return units, self._file.scales(part.start, part.stop)
        norms = self._norms(units, part)
        return units, norms.where(norms > 0, torch.inf).reciprocal().float()

    def _norms(self, units: Tensor, part: slice) -> Tensor:
        """sqrt(r^T K r) of each row."""
        if self._factor is not None:  # the norm of L^-1 r
            return row_norms(torch.linalg.solve_triangular(self._factor, units.double().T, upper=False).T)
        return row_norms(units) if self.columns is not None else self._file.norms(part.start, part.stop)

    def _select(self, rows: Tensor) -> Tensor:
        return rows if self.columns is None else rows[:, self.columns]


class Kernels:
    """Scores of several models: mean of the inner products of `Kernel`, times the mean weight of the samples.

    The weights are left out for the cosine. files: rows of each model, by number; other arguments: as in `Kernel`
    """

    def __init__(
        self, files: Mapping[int, RowsFile], damping: float | None, cosine: bool, layers: Sequence[str] | None
    ):
        self._files = files
        self._cosine = cosine
        self._kernels = {number: Kernel(file, damping, cosine, layers) for number, file in files.items()}

    @property
    def width(self) -> int:
        """Number of columns of `of_rows`."""
        return sum(kernel.width for kernel in self._kernels.values())

    def of_queries(self, queries: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Vectors (Q, width) of the queries for each model. Without models, the queries are returned."""
        return {n: self._kernels[n].of_queries(q) if n in self._kernels else q for n, q in queries.items()}

    def scores(self, vectors: Mapping[int, Tensor], part: slice) -> Tensor:
        """Scores (Q, samples of the slice)."""
        queries = len(next(iter(vectors.values())))
        scores = torch.zeros(queries, part.stop - part.start)
        for number, kernel in self._kernels.items():
            units, factors = kernel.of_rows(part)
            scores.addcmul_(vectors[number] @ units.T, factors)
        scores *= self._factors(part)
        if scores.numel() and not torch.stack(scores.aminmax()).isfinite().all():  # NaN too; faster than all entries
            raise ValueError("scores must be finite in float32; found an overflow. Scale the queries down.")
        return scores

    def of_rows(self, part: slice) -> Tensor:
        """Rows (samples of the slice, width) of all models side by side, with the weights as factors."""
        rows = [units * factors[:, None] for units, factors in (k.of_rows(part) for k in self._kernels.values())]
        return torch.cat(rows, 1) * self._factors(part)[:, None]

    def _factors(self, part: slice) -> Tensor:
        """Mean weight of each sample, or one, divided by the number of models."""
        if self._cosine or not self._files:
            return torch.full((part.stop - part.start,), 1 / max(len(self._files), 1))
        weights = torch.stack([file.weights(part.start, part.stop) for file in self._files.values()])
        return weights.mean(0) / len(self._files)


def _columns(file: RowsFile, layers: Sequence[str]) -> Tensor:
    """Indices of the columns of some layers."""
    slices = block_slices(file.index.layers)
    unknown = [layer for layer in layers if layer not in slices]
    if unknown or not layers or isinstance(layers, str):
        names = listed(slices) if slices else "none, because the store has no blocks; create it with blocks='layer'"
        raise ValueError(f"layers must be a list of layers of the store; found {layers!r}. Its layers are {names}.")
    return torch.cat([torch.arange(file.dim)[slices[layer]] for layer in layers])


def top(chunks: Iterable[tuple[slice, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores (Q, k) of chunks (samples, scores), in descending order, and their samples; the earlier
    sample of equals first. One chunk is in memory at a time.
    """
    values = torch.zeros(0, 0)
    samples = torch.zeros(0, 0, dtype=torch.int64)
    for part, scores in chunks:
        indices = torch.arange(part.start, part.stop).expand(len(scores), -1)
        if part.start == 0:
            values, samples = largest(scores, indices, k)
        elif values.shape[1] < k:
            values, samples = largest(torch.cat([values, scores], 1), torch.cat([samples, indices], 1), k)
        else:  # after many chunks, few queries have a new score among the largest
            rows = (scores.amax(1) > values[:, -1]).nonzero()[:, 0]
            parts = torch.cat([values[rows], scores[rows]], 1), torch.cat([samples[rows], indices[rows]], 1)
            values[rows], samples[rows] = largest(*parts, k)
    return values, samples


def largest(scores: Tensor, samples: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row in descending order, and their samples; the earlier column of equals first."""
    if scores.shape[1] > k:
        top = scores.topk(k + 1)
        # topk chooses any of equal scores: rows in which the k-th and the next are equal are sorted as a whole.
        tied = top.values[:, k - 1] == top.values[:, k]
        columns = top.indices[:, :k].sort(dim=1).values
        if tied.any():
            columns[tied] = scores[tied].sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        scores = scores.gather(1, columns)
        samples = samples.gather(1, columns)
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values, samples.gather(1, order)


def updated_gram(file: RowsFile) -> Tensor:
    """X^T X (dim, dim) of all rows, in float64. Rows that were added since the last call are read."""
    done, gram = _read_gram(file)
    if done == len(file):
        return gram
    for start in range(done, len(file), CHUNK):
        rows = file.rows(start, min(start + CHUNK, len(file))).double()
        gram.addmm_(rows.T, rows)
    path = file.directory / "gram.f64"
    if collectives.rank() != 0:
        return gram
    # Several processes may search at a time, without a lock, and the store may be read-only: the file is a cache.
    with suppress(OSError), atomic_write(path, path.with_suffix(f".{uuid.uuid4().hex}.partial")) as cache:
        cache.write(tensor_bytes(torch.tensor([float(len(file))], dtype=torch.float64)))
        cache.write(tensor_bytes(gram))
    return gram


def _read_gram(file: RowsFile) -> tuple[int, Tensor]:
    """Number of rows and X^T X of gram.f64; zeros if there is no valid file."""
    size = file.dim**2 + 1
    path = file.directory / "gram.f64"
    if path.is_file() and path.stat().st_size == size * 8:
        saved = torch.from_file(str(path), shared=False, size=size, dtype=torch.float64)
        count = saved[0].item()
        if count in range(len(file) + 1) and saved.isfinite().all():
            return int(count), saved[1:].view(file.dim, file.dim).clone()
    return 0, torch.zeros(file.dim, file.dim, dtype=torch.float64)


def _cholesky(gram: Tensor, damping: float, file: RowsFile) -> Tensor:
    mean = gram.diagonal().mean()
    ridge = damping * mean * torch.eye(len(gram), dtype=torch.float64)
    factor, failed = torch.linalg.cholesky_ex(gram + ridge)
    pivots = factor.diagonal()  # cholesky_ex accepts a matrix that is singular up to rounding
    if failed or pivots.min() ** 2 < torch.finfo(torch.float64).eps * len(gram) * pivots.max() ** 2:
        raise StoreError(
            f"X^T X + lambda must be invertible; found a singular matrix with {plural(len(file), 'sample')}, "
            f"{len(gram)} numbers each, and damping={damping}. Use a larger damping, such as 0.1."
        )
    return factor


def _divide(rows: Tensor, norms: Tensor, cosine: bool) -> Tensor:
    return (rows / norms.where(norms > 0, 1)[:, None]).to(rows.dtype) if cosine else rows
