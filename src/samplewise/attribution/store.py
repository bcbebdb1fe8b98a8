"""Random projections of per-sample gradients on disk, for repeated searches.

    rows.f16     (count, dim) float16: each row divided by its largest absolute entry, to avoid overflow and underflow
    scales.f32   (count,) float32: the divisor of each row
    store.json   format, dim, seed, count, dtype, checksum of the model

Rows are written first; then store.json, which holds their count, is replaced atomically. Rows beyond the count, left by
a crash, are not part of the store, and the next append overwrites them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from samplewise.core.atomic_io import absolute, atomic_write
from samplewise.core.batches import cut, length
from samplewise.core.losses import LossFn
from samplewise.core.snapshot import eval_mode
from samplewise.core.tensor_bytes import tensor_bytes
from samplewise.core.text import plural
from samplewise.engine.gradients import Gradients
from samplewise.errors import StoreError
from samplewise.eval_pass import check_order
from samplewise.scan import scan

FORMAT = 1
FILES = {"rows.f16": torch.float16, "scales.f32": torch.float32}


class ProjectedStore:
    """Directory of random projections of per-sample gradients, searchable by dot product.

    Opens the store at `path`, or creates one. Sample k is the k-th that was added. Only one writer at a time.

    dim: numbers per sample; the error of a dot product is about |a||b|/sqrt(dim)
    seed: of the projection, as in `g.project`; default 0
    """

    def __init__(self, path: str | os.PathLike[str], dim: int, seed: int = 0):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be an integer, 1 or more; found {dim!r}.")
        if type(seed) is not int:
            raise ValueError(f"seed must be an integer; found {seed!r}.")
        self.path = absolute(path)
        self.dim = dim
        self.seed = seed
        self.count = 0
        self.model = ""  # checksum
        if self._index.exists():
            self._open()
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_index()

    def __len__(self) -> int:
        return self.count

    def add(self, g: Gradients | Tensor) -> None:
        """Append the projections of a batch of gradients, or rows (B, dim) that are projected already."""
        rows = self._projected(g, "rows")
        scales = rows.abs().amax(1)
        parts = (rows / scales.where(scales > 0, 1)[:, None]).half(), scales
        for (name, dtype), part in zip(FILES.items(), parts, strict=True):
            with _open_for_writing(self.path / name) as file:
                file.seek(self.count * self._width(name) * dtype.itemsize)
                file.write(tensor_bytes(part))
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        self.count += len(rows)
        self._write_index()

    def fill(
        self, model: nn.Module, loss_fn: LossFn, loader: Iterable[Any], microbatch: int | str | None = "auto"
    ) -> None:
        """Add the samples of a loader, without the first `len(store)`, which are in the store already.

        An interrupted fill can be continued with the same model and the same order of samples.
        """
        check_order(loader, "Use shuffle=False: samples are identified by their position.")
        self._check_model(model)
        with eval_mode(model):
            for _, g in scan(model, loss_fn, _skip_samples(loader, self.count), microbatch):
                self.add(g)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Stored rows (stop - start, dim) in float32, read through a memory map. Default: all rows."""
        start, stop, _ = slice(start, stop).indices(self.count)
        if stop <= start:
            return torch.zeros(0, self.dim)
        rows, scales = (self._memory_map(name)[start:stop] for name in FILES)
        return rows.float() * scales

    def search(self, queries: Gradients | Tensor, k: int = 10, chunk: int = 8192) -> tuple[Tensor, Tensor]:
        """The k largest dot products (Q, k) of each query with stored rows, in descending order, and their samples
        (Q, k). Exact: every row is compared.

        chunk: rows in memory at a time; default 8192
        """
        for name, number in (("k", k), ("chunk", chunk)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")
        queries = self._projected(queries, "queries")
        values = torch.zeros(len(queries), 0)
        samples = torch.zeros(len(queries), 0, dtype=torch.int64)
        for start in range(0, self.count, chunk):
            products = queries @ self.rows(start, start + chunk).T
            if not products.isfinite().all():
                raise ValueError("dot products must be finite in float32; found an overflow. Scale the queries down.")
            chunk_samples = torch.arange(start, start + products.shape[1]).expand(len(queries), -1)
            values = torch.cat([values, products], 1)
            samples = torch.cat([samples, chunk_samples], 1)
            values, order = values.sort(dim=1, descending=True, stable=True)  # stable: the earlier of equals first
            values = values[:, :k]
            samples = samples.gather(1, order)[:, :k]
        return values, samples

    # --- files -----------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> Path:
        return self.path / "store.json"

    def _width(self, name: str) -> int:
        return self.dim if name == "rows.f16" else 1

    def _memory_map(self, name: str) -> Tensor:
        width = self._width(name)
        path = str(self.path / name)
        return torch.from_file(path, shared=False, size=self.count * width, dtype=FILES[name]).view(self.count, width)

    def _projected(self, gradients: Gradients | Tensor, name: str) -> Tensor:
        """Projected rows (B, dim), float32, on the CPU."""
        rows = gradients.project(self.dim, self.seed) if isinstance(gradients, Gradients) else gradients
        if not isinstance(rows, Tensor) or rows.is_complex():
            description = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{name} must be Gradients or a real tensor (B, {self.dim}); found {description}.")
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"{name} must have the store's shape (B, {self.dim}); found {tuple(rows.shape)}.")
        rows = rows.detach().float().cpu()
        if not rows.isfinite().all():
            raise ValueError(f"{name} must be finite in float32; found NaN or infinity.")
        return rows

    def _open(self) -> None:
        index = _read(self._index)
        for name, expected in (("dim", self.dim), ("seed", self.seed)):
            if index[name] != expected:
                raise StoreError(
                    f"the store at {self.path} must have {name}={expected}, as requested; found {name}={index[name]}. "
                    f"Open it with {name}={index[name]}, or choose another path."
                )
        self.count = index["count"]
        self.model = index["model"]
        for name, dtype in FILES.items():
            expected = self.count * self._width(name) * dtype.itemsize
            path = self.path / name
            size = path.stat().st_size if path.exists() else 0
            if size < expected:
                raise StoreError(
                    f"{path} must have {expected} bytes for {plural(self.count, 'sample')}; found {size}. "
                    "Remove the directory and fill the store again."
                )

    def _write_index(self) -> None:
        index = {"format": FORMAT, "dim": self.dim, "seed": self.seed, "count": self.count, "dtype": "float16"}
        with atomic_write(self._index, self._index.with_suffix(".json.partial")) as file:
            file.write(json.dumps({**index, "model": self.model}, indent=1).encode())

    def _check_model(self, model: nn.Module) -> None:
        checksum = _checksum(model)
        if self.count and self.model != checksum:
            raise StoreError(
                f"the store at {self.path} must hold gradients of one model; found {plural(self.count, 'sample')} of "
                "other parameters in it. Load the parameters that the store was started with, or choose another path."
            )
        self.model = checksum


def _open_for_writing(path: Path) -> BinaryIO:
    """Open a file for writing without truncating it; it is created if needed."""
    path.touch()
    return open(path, "r+b")


def _checksum(model: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and values of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    types = {"format": int, "dim": int, "seed": int, "count": int, "model": str}
    try:
        index = json.loads(path.read_text())
        valid = all(type(index[name]) is type_ for name, type_ in types.items()) and index["count"] >= 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise StoreError(f"{path} must be a valid index of a store; found other content. Choose another path.")
    if index["format"] != FORMAT:
        raise StoreError(
            f"{path} must have format {FORMAT}; found {index['format']}. Use the version of samplewise that wrote it."
        )
    return index


def _skip_samples(loader: Iterable[Any], samples: int) -> Iterable[Any]:
    """Batches of a loader without its first `samples` samples."""
    for batch in loader:
        size = length(batch) if samples else 0
        if size is None:
            raise StoreError(
                "continuing to fill a store needs batches that can be sliced, to skip the samples it has; found a "
                f"batch of type {type(batch).__name__}. Start a new store, or call add for the missing samples."
            )
        if not samples:
            yield batch
        elif samples < size:
            yield cut(batch, samples, size)
        samples = max(samples - size, 0)
