"""Inner products of projected rows: plain, cosine, or preconditioned with (X^T X + lambda I)^-1.

gram.f64 in the directory of a model holds X^T X (dim, dim) of its first rows in float64, after their number. It is
brought up to date when it is needed, and replaced atomically, so that it is consistent with the rows after a crash.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplewise.attribution.rows_file import RowsFile
from samplewise.core.atomic_io import atomic_write
from samplewise.core.tensor_bytes import tensor_bytes
from samplewise.core.text import plural
from samplewise.errors import StoreError

CHUNK = 8192  # rows in memory at a time


class Kernel:
    """Inner product q^T K r of queries and rows, with K = 1 or (X^T X + lambda I)^-1, or the cosine of its angle.

    `of_queries(q) @ of_rows(r).T` are the scores.
    damping: lambda divided by the mean of the eigenvalues of X^T X; None for K = 1
    columns: indices of the columns to use; None for all
    """

    def __init__(self, file: RowsFile, damping: float | None, cosine: bool, columns: Tensor | None = None):
        self.cosine = cosine
        self.columns = columns
        self._factor: Tensor | None = None  # lower triangular L with L L^T = X^T X + lambda I
        if damping is not None and len(file):
            gram = updated_gram(file)
            self._factor = _cholesky(gram if columns is None else gram[columns][:, columns], damping, file)

    def of_queries(self, queries: Tensor) -> Tensor:
        """K q of each query, divided by sqrt(q^T K q) for the cosine, (Q, width) float32."""
        queries = self._chosen(queries)
        if self._factor is not None:
            wide = torch.cholesky_solve(queries.double().T, self._factor).T
            return _divided(wide, (wide * queries).sum(1).clamp_min(0).sqrt(), self.cosine).float()
        return _divided(queries, _norms(queries), self.cosine)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Rows, divided by sqrt(r^T K r) for the cosine, (B, width) float32."""
        rows = self._chosen(rows)
        if not self.cosine:
            return rows
        white = rows
        if self._factor is not None:
            white = torch.linalg.solve_triangular(self._factor, rows.double().T, upper=False).T
        return _divided(rows, _norms(white), True)

    def _chosen(self, rows: Tensor) -> Tensor:
        return rows if self.columns is None else rows[:, self.columns]


def check_damping(damping: float | None) -> None:
    if damping is not None and not (isinstance(damping, (int, float)) and 0 <= damping < math.inf):
        raise ValueError(
            f"damping must be a number, 0 or more, or None for no preconditioning; found {damping!r}. It is relative "
            "to the mean eigenvalue of X^T X."
        )


def updated_gram(file: RowsFile) -> Tensor:
    """X^T X (dim, dim) of all rows, in float64. Rows that were added since the last call are read."""
    done, gram = _read_gram(file)
    if done == len(file):
        return gram
    for start in range(done, len(file), CHUNK):
        rows = file.rows(start, min(start + CHUNK, len(file))).double()
        gram.addmm_(rows.T, rows)
    path = file.path / "gram.f64"
    with atomic_write(path, path.with_suffix(".f64.partial")) as written:
        written.write(tensor_bytes(torch.tensor([float(len(file))], dtype=torch.float64)))
        written.write(tensor_bytes(gram))
    return gram


def _read_gram(file: RowsFile) -> tuple[int, Tensor]:
    """Number of rows and X^T X of gram.f64; zeros if there is no valid file."""
    size = file.dim**2 + 1
    path = file.path / "gram.f64"
    if path.exists() and path.stat().st_size == size * 8:
        saved = torch.from_file(str(path), shared=False, size=size, dtype=torch.float64)
        count = saved[0].item()
        if 0 <= count <= len(file):
            return int(count), saved[1:].view(file.dim, file.dim).clone()
    return 0, torch.zeros(file.dim, file.dim, dtype=torch.float64)


def _cholesky(gram: Tensor, damping: float, file: RowsFile) -> Tensor:
    mean = gram.diagonal().mean()
    added = damping * mean * torch.eye(len(gram), dtype=torch.float64)
    factor, failed = torch.linalg.cholesky_ex(gram + added)
    pivots = factor.diagonal()
    if failed or pivots.min() ** 2 < torch.finfo(torch.float64).eps * len(gram) * pivots.max() ** 2:
        raise StoreError(
            f"X^T X + lambda must be invertible; found a singular matrix with {plural(len(file), 'sample')}, "
            f"{len(gram)} numbers each, and damping={damping}. Use a larger damping, such as 0.1."
        )
    return factor


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _divided(rows: Tensor, norms: Tensor, cosine: bool) -> Tensor:
    return (rows / norms.where(norms > 0, 1)[:, None]).to(rows.dtype) if cosine else rows
