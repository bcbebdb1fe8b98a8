"""Projections of gradients on disk: made once, searched again and again.

    rows.f16     (count, dim) float16: each row divided by its largest entry, so that no length is too small or large
    scales.f32   (count,) float32: what it was divided by
    store.json   format, dim, seed, count, the model's checksum

Rows are written first, and store.json, which counts them, is then replaced as a whole. What a crash leaves behind its
count is not part of the store, and the next append writes over it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from samplewise.batches import cut, length
from samplewise.engine.gradients import Gradients
from samplewise.errors import StoreError
from samplewise.files import absolute
from samplewise.losses import LossFn
from samplewise.measuring import check_order, evaluating
from samplewise.scan import scan

FORMAT = 1
FILES = {"rows.f16": torch.float16, "scales.f32": torch.float32}


class ProjectedStore:
    """Random projections of per-sample gradients in a directory, found again by their dot products.

    Opens the store at `path`, or makes one. Sample k is the k-th that was added. One writer at a time.

    dim: numbers per sample; dot products are off by about |a||b|/sqrt(dim)
    seed: of the projection, as in `g.project`
    """

    def __init__(self, path: str | os.PathLike[str], dim: int, seed: int = 0):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be a whole number, 1 or more; found {dim!r}.")
        if type(seed) is not int:
            raise ValueError(f"seed must be a whole number; found {seed!r}.")
        self.path = absolute(path)
        self.dim = dim
        self.seed = seed
        self.count, self.model = 0, ""
        if self._index.exists():
            self._open()
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_index()

    def __len__(self) -> int:
        return self.count

    def add(self, g: Gradients | Tensor) -> None:
        """Appends the projections of a batch of gradients, or rows (B, dim) that are projections already."""
        rows = self._projected(g, "rows")
        scales = rows.abs().amax(1)
        parts = (rows / scales.where(scales > 0, 1)[:, None]).half(), scales
        for (name, kind), part in zip(FILES.items(), parts, strict=True):
            with _opened(self.path / name) as file:
                file.seek(self.count * self._width(name) * kind.itemsize)
                file.write(_memory(part))
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        self.count += len(rows)
        self._write_index()

    def fill(
        self, model: nn.Module, loss_fn: LossFn, loader: Iterable[Any], microbatch: int | str | None = "auto"
    ) -> None:
        """Adds the samples of a loader that are not yet there: the first `len(store)` are passed over.

        So a store that was left in the middle goes on from there, with the same model and the same order.
        """
        check_order(loader, "Use shuffle=False: samples are known by their places.")
        self._same_model(model)
        with evaluating(model):
            for _, g in scan(model, loss_fn, _after(loader, self.count), microbatch):
                self.add(g)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """(stop - start, dim) in float32, read through a memory map."""
        start, stop, _ = slice(start, stop).indices(self.count)
        if stop <= start:
            return torch.zeros(0, self.dim)
        rows, scales = (self._map(name)[start:stop] for name in FILES)
        return rows.float() * scales

    def search(self, queries: Gradients | Tensor, k: int = 10, chunk: int = 8192) -> tuple[Tensor, Tensor]:
        """(Q, k) dot products and (Q, k) samples with the largest, those first; exact, for every row is looked at.

        chunk: rows in memory at a time
        """
        for name, number in (("k", k), ("chunk", chunk)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more; found {number!r}.")
        queries = self._projected(queries, "queries")
        values, places = torch.zeros(len(queries), 0), torch.zeros(len(queries), 0, dtype=torch.int64)
        for start in range(0, self.count, chunk):
            found = queries @ self.rows(start, start + chunk).T
            if not found.isfinite().all():
                raise ValueError("dot products must be finite in float32; found larger ones. Scale the queries down.")
            here = torch.arange(start, start + found.shape[1]).expand(len(queries), -1)
            values, places = torch.cat([values, found], 1), torch.cat([places, here], 1)
            values, order = values.sort(dim=1, descending=True, stable=True)  # of equals the earlier comes first
            values, places = values[:, :k], places.gather(1, order)[:, :k]
        return values, places

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> Path:
        return self.path / "store.json"

    def _width(self, name: str) -> int:
        return self.dim if name == "rows.f16" else 1

    def _map(self, name: str) -> Tensor:
        width, path = self._width(name), str(self.path / name)
        return torch.from_file(path, shared=False, size=self.count * width, dtype=FILES[name]).view(self.count, width)

    def _projected(self, given: Gradients | Tensor, what: str) -> Tensor:
        """(B, dim), float32."""
        rows = given.project(self.dim, self.seed) if isinstance(given, Gradients) else given
        if not isinstance(rows, Tensor) or rows.is_complex():
            found = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{what} must be gradients or a real tensor (B, {self.dim}); found {found}.")
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"{what} must have the store's shape (B, {self.dim}); found {tuple(rows.shape)}.")
        rows = rows.detach().float().cpu()
        if not rows.isfinite().all():
            raise ValueError(f"{what} must be finite in float32; found NaN or infinity.")
        return rows

    def _open(self) -> None:
        found = _read(self._index)
        for name, wanted in (("dim", self.dim), ("seed", self.seed)):
            if found[name] != wanted:
                raise StoreError(
                    f"the store at {self.path} must have {name}={wanted}, as asked for; found {found[name]}. "
                    f"Open it with {name}={found[name]}, or choose another path."
                )
        self.count, self.model = found["count"], found["model"]
        for name, kind in FILES.items():
            wanted, path = self.count * self._width(name) * kind.itemsize, self.path / name
            size = path.stat().st_size if path.exists() else 0
            if size < wanted:
                raise StoreError(
                    f"{path} must have {wanted} bytes for {self.count} samples; found {size}. "
                    "Make the store anew: remove the directory."
                )

    def _write_index(self) -> None:
        about = {"format": FORMAT, "dim": self.dim, "seed": self.seed, "count": self.count, "dtype": "float16"}
        aside = self._index.with_suffix(".json.partial")
        with open(aside, "w") as file:
            json.dump({**about, "model": self.model}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._index)

    def _same_model(self, model: nn.Module) -> None:
        found = _checksum(model)
        if self.count and self.model != found:
            raise StoreError(
                f"the store at {self.path} must hold gradients of one model; found others of {self.count} samples in "
                "it. Load the parameters it was begun with, or choose another path."
            )
        self.model = found


def _opened(path: Path) -> BinaryIO:
    """For writing, what is there kept."""
    path.touch()
    return open(path, "r+b")


def _memory(tensor: Tensor) -> memoryview:
    """Its bytes, without NumPy."""
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    kept = (ctypes.c_char * size).from_address(tensor.data_ptr())
    kept._owner = tensor  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(kept)


def _checksum(model: nn.Module) -> str:
    """Of names, shapes and values of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(_memory(tensor))
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    wanted = {"format": int, "dim": int, "seed": int, "count": int, "model": str}
    try:
        found = json.loads(path.read_text())
        well = all(type(found[name]) is kind for name, kind in wanted.items()) and found["count"] >= 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        well = False
    if not well:
        raise StoreError(f"{path} must be the index of a store; found something else. Choose another path.")
    if found["format"] != FORMAT:
        raise StoreError(f"{path} must be of format {FORMAT}; found {found['format']}. It needs another samplewise.")
    return found


def _after(loader: Iterable[Any], samples: int) -> Iterable[Any]:
    """The batches of a loader without their first samples."""
    for batch in loader:
        size = length(batch) if samples else 0
        if size is None:
            raise StoreError(
                "a store that is filled further needs batches that can be cut, to pass over what it has; found one of "
                f"{type(batch).__name__}. Begin anew, or call add for what is missing."
            )
        if samples < size or not samples:
            yield cut(batch, samples, size) if samples else batch
        samples = max(samples - size, 0)
