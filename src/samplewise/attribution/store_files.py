"""Files of a store of projected gradients: settings, and the rows of each model with crash-safe appends.

    store.json        format, dim, seed, dtype, blocks, projection, rows of a shard
    store.lock        names the process that is writing, see `core.directory_lock`
    model-0000/       rows of the first model
      rows-00000.f16  (rows of a shard, dim) float16, .f32 float32 or .i8 int8: each row divided by its scale
      rows-00001.f16  the next rows; a shard that is full does not change any more
      scales.f32      (count,) float32: the largest absolute entry of each row, for int8 divided by 127; avoids overflow
                      and underflow
      norms.f32       (count,) float32: norm of each row as it is stored, after the division by its scale
      weights.f32     (count,) float32: weights of the samples, if the rows are gradients of an output function
      gram.f64        X^T X of the first rows, see `scoring`
      model.json      count, checksum of the model, settings
    model-0001/       rows of the second model; ...

Rows are written first; then model.json, which holds their count, is replaced atomically. Rows beyond the count, left by
a crash, are not part of the store, and the next append overwrites them. Format 2, of samplewise 0.3, has one file of
rows without a number, and no norms; it is read and extended as it is.

`npy_matrix` writes matrices computed from them in NumPy's format, without NumPy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import absolute, atomic_write, read_json, sync_file, tensor_bytes, write_json
from samplewise.core.text import plural
from samplewise.errors import StoreError

FORMAT = 3  # of store.json
ONE_FILE = 2  # the format before shards and norms
SETTINGS = {"dim": int, "seed": int, "dtype": str, "blocks": str}
SHARD_BYTES = 2**30
PARTIAL_INDEX = ".model.json.partial"  # left by a process that was killed while it created the directory
Dtype = Literal["float16", "float32", "int8"]
NPY_HEADER = 128  # bytes; a multiple of 64, as the format asks
DTYPES = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8}
SUFFIXES = {"float16": "f16", "float32": "f32", "int8": "i8"}


@dataclass(frozen=True)
class Layout:
    """Format of the rows of all models. shard_rows: rows of a shard; None in format 2."""

    dim: int
    dtype: Dtype
    shard_rows: int | None

    def columns(self, weighted: bool) -> dict[str, Column]:
        """What is stored of each row."""
        suffix = SUFFIXES[self.dtype]
        name = f"rows.{suffix}" if self.shard_rows is None else f"rows-{{:05d}}.{suffix}"
        columns = {
            "rows": Column(name, self.dim, DTYPES[self.dtype], self.shard_rows or sys.maxsize),
            "scales": Column("scales.f32"),
        }
        if self.shard_rows is not None:
            columns["norms"] = Column("norms.f32")
        if weighted:
            columns["weights"] = Column("weights.f32")
        return columns


class Column(NamedTuple):
    """Numbers of one kind, (count, width), in files of `shard_rows` rows. name: of a file, with {} for its number"""

    name: str
    width: int = 1
    dtype: torch.dtype = torch.float32
    shard_rows: int = sys.maxsize

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, slice]]:
        """Files that have the rows start..stop, and which of their rows these are."""
        for number in range(start // self.shard_rows, -(-stop // self.shard_rows)):
            first = number * self.shard_rows
            yield self.name.format(number), slice(max(start - first, 0), min(stop - first, self.shard_rows))


def create_store(directory: Path, settings: Mapping[str, Any], lock: DirectoryLock) -> None:
    """Write store.json unless it exists."""
    index = directory / "store.json"
    if index.exists():
        return
    with lock:
        if index.exists():  # created by another process in the meantime
            return
        if any(directory.glob("model-*")):
            raise StoreError(
                f"the store in {directory} must have a store.json; found rows of models without it. Restore it from a "
                "backup, or choose another directory."
            )
        bytes_per_row = settings["dim"] * DTYPES[settings["dtype"]].itemsize
        shard_rows = max(SHARD_BYTES // bytes_per_row, 1)
        write_json(index, {"format": FORMAT, **settings, "shard_rows": shard_rows})


def open_store(directory: Path, settings: Mapping[str, Any]) -> tuple[Layout, list[RowsFile]]:
    """Layout, and rows of each model. Raises StoreError if store.json has other settings, or a model is missing."""
    path = directory / "store.json"
    version = read_index(path, {"format": int})["format"]
    if version not in (ONE_FILE, FORMAT):
        raise StoreError(
            f"{path} must have format {FORMAT}; found {version}. Use the version of samplewise that wrote it, or fill "
            "a new store at another path."
        )
    index = read_index(path, SETTINGS if version == ONE_FILE else {**SETTINGS, "shard_rows": int})
    index.setdefault("projection", "dense")  # not written before 0.4
    shard_rows = None if version == ONE_FILE else index["shard_rows"]
    if shard_rows is not None and shard_rows < 1:
        raise invalid(path)
    for name, expected in settings.items():
        if index[name] != expected:
            requested, saved = (None if value == "" else value for value in (expected, index[name]))  # blocks
            raise StoreError(
                f"the store in {directory} must have {name}={requested!r}, as requested; found {name}={saved!r}. Open "
                f"it with {name}={saved!r}, or choose another directory."
            )
    models = sorted(directory.glob("model-*"), key=lambda model: (len(model.name), model.name))
    if models and models[-1].is_dir() and {file.name for file in models[-1].iterdir()} <= {PARTIAL_INDEX}:
        models.pop()  # its process was killed before it had rows
    for number, model in enumerate(models):
        name = f"model-{number:04d}"
        if model.name != name or not model.is_dir():
            entry = model.name + ("" if model.is_dir() else ", which is no directory")
            raise StoreError(
                f"the store in {directory} must have the rows of model {number} in the directory {name}; found "
                f"{entry}. Restore it from a backup, or fill a new store in another directory."
            )
    layout = Layout(settings["dim"], settings["dtype"], shard_rows)
    return layout, [RowsFile(model, layout) for model in models]


@dataclass(frozen=True)
class ModelIndex:
    """Content of model.json.

    count: number of complete rows
    model: checksum of parameters and buffers; empty if rows were added without a model
    weighted: the rows are gradients of an output function, and have weights
    scaling: checksum of the scales of the parameters; empty if there are none
    layers: width of the block of each layer; empty if there are no blocks
    """

    count: int = 0
    model: str = ""
    weighted: bool = False
    scaling: str = ""
    layers: tuple[tuple[str, int], ...] = ()


class RowsFile:
    """Directory with the projected rows of one model. Opens it, or creates it with `index`."""

    def __init__(self, directory: Path, layout: Layout, index: ModelIndex | None = None):
        self.directory = directory
        self.dim = layout.dim
        self.dtype = layout.dtype
        if index is None:
            self.index = _read(directory / "model.json", self.dim)
        else:
            self.index = index
            directory.mkdir(parents=True, exist_ok=True)
            self._write_index(index)
        self._columns = layout.columns(self.index.weighted)
        self._check_sizes()

    def __len__(self) -> int:
        return self.index.count

    def append(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Append rows (B, dim) float32, and their weights (B,) if the file has weights."""
        dtype = self._columns["rows"].dtype
        largest = torch.maximum(rows.amax(1), -rows.amin(1))  # ten times as fast as a norm or abs
        integers = dtype == torch.int8
        # Subnormal scales have few digits, so that entries would exceed 127; a row of zeros needs a scale as well.
        scales = (largest / 127 if integers else largest).clamp_min(torch.finfo(torch.float32).tiny)
        units = rows / scales[:, None]
        values = (units.round_() if integers else units).to(dtype)
        parts = {"rows": values, "scales": scales, "norms": row_norms(values.float()), "weights": weights}
        for kind, column in self._columns.items():
            part = parts[kind]
            assert part is not None  # the caller passes weights if the file has them
            self._write(column, part.to(column.dtype))
        index = replace(self.index, count=len(self) + len(rows))
        self._write_index(index)
        self.index = index

    def _write(self, column: Column, values: Tensor) -> None:
        offset = 0
        for name, piece in column.pieces(len(self), len(self) + len(values)):
            size = piece.stop - piece.start
            (self.directory / name).touch()
            with open(self.directory / name, "r+b") as file:  # not "ab": rows after the count, of a crash, are replaced
                file.seek(piece.start * column.width * column.dtype.itemsize)
                file.write(tensor_bytes(values[offset : offset + size]))
                file.truncate()
                sync_file(file)
            offset += size

    def reload(self) -> None:
        """Read the number of rows again, after another process has appended."""
        self.index = _read(self.directory / "model.json", self.dim)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, dim) in float32, read through a memory map."""
        return self.units(start, stop) * self.scales(start, stop)[:, None]

    def units(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, dim) in float32, each divided by its scale."""
        return self._read_column("rows", start, stop).float()

    def scales(self, start: int, stop: int) -> Tensor:
        """Scales (stop - start,) of rows."""
        return self._read_column("scales", start, stop)[:, 0]

    def norms(self, start: int, stop: int) -> Tensor:
        """Norms (stop - start,) of `units`."""
        if "norms" not in self._columns:
            return row_norms(self.units(start, stop)).float()
        return self._read_column("norms", start, stop)[:, 0]

    def weights(self, start: int, stop: int) -> Tensor:
        """Weights (stop - start,) of samples; ones if the file has no weights."""
        if not self.index.weighted:
            return torch.ones(max(stop - start, 0))
        return self._read_column("weights", start, stop)[:, 0].clone()

    def _read_column(self, kind: str, start: int, stop: int) -> Tensor:
        """Numbers (stop - start, width) of a column: a memory map, or a copy where two files meet."""
        column = self._columns[kind]
        parts = [torch.zeros(0, column.width, dtype=column.dtype)]
        for name, piece in column.pieces(start, max(stop, start)):
            size = piece.stop * column.width
            content = torch.from_file(str(self.directory / name), shared=False, size=size, dtype=column.dtype)
            parts.append(content.view(piece.stop, column.width)[piece])
        return parts[-1] if len(parts) <= 2 else torch.cat(parts)

    def _write_index(self, index: ModelIndex) -> None:
        write_json(self.directory / "model.json", asdict(index))

    def _check_sizes(self) -> None:
        for column in self._columns.values():
            for name, piece in column.pieces(0, len(self)):
                expected = piece.stop * column.width * column.dtype.itemsize
                path = self.directory / name
                size = path.stat().st_size if path.is_file() else 0
                if size < expected or path.is_dir():
                    raise StoreError(
                        f"{path} must have {expected} bytes for {plural(piece.stop, 'sample')}; found "
                        f"{'a directory' if path.is_dir() else size}. "
                        f"Remove {self.directory} and fill the store again."
                    )


def row_norms(rows: Tensor) -> Tensor:
    """Norms (B,) of rows (B, dim), in float64."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def read_index(path: Path, types: dict[str, type]) -> dict[str, Any]:
    """Read a JSON object whose values have the given types."""
    try:
        content = read_json(path, ValueError, "")
        valid = isinstance(content, dict) and all(type(content[name]) is type_ for name, type_ in types.items())
    except (OSError, ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise invalid(path)
    return dict(content)


def invalid(path: Path) -> StoreError:
    return StoreError(f"{path} must be a valid index of a store; found other content. Choose another directory.")


def _read(path: Path, dim: int) -> ModelIndex:
    types = {"count": int, "model": str, "weighted": bool, "scaling": str, "layers": list}
    content = read_index(path, types)
    try:
        layers = tuple((name, width) for name, width in content["layers"])
    except (TypeError, ValueError):
        raise invalid(path) from None
    valid = all(type(name) is str and type(width) is int and width > 0 for name, width in layers)
    if not valid or len(dict(layers)) != len(layers) or (layers and sum(width for _, width in layers) != dim):
        raise invalid(path)
    if content["count"] < 0:
        raise invalid(path)
    return ModelIndex(**{name: content[name] for name in types if name != "layers"}, layers=layers)


# --- matrices as .npy files -------------------------------------------------------------------------------------------


@contextmanager
def npy_matrix(path: str | os.PathLike[str], rows: int, columns: int) -> Iterator[Tensor]:
    """Yield a float32 matrix (rows, columns) of zeros to fill; after the block, it is the file at `path`.

    The matrix is in a temporary file, which is renamed after the block, or removed on an error.
    """
    with atomic_write(absolute(path)) as file:
        file.write(_header(rows, columns))
        file.truncate(NPY_HEADER + 4 * rows * columns)
        file.flush()
        yield mapped(Path(file.name), rows, columns, shared=True)


def mapped(path: Path, rows: int, columns: int, *, shared: bool = False) -> Tensor:
    """Matrix (rows, columns) of a file that `npy_matrix` wrote, as a memory map. shared: changes go to the file."""
    size = NPY_HEADER // 4 + rows * columns
    content = torch.from_file(str(path), shared=shared, size=size, dtype=torch.float32)
    return content[NPY_HEADER // 4 :].view(rows, columns)


def _header(rows: int, columns: int) -> bytes:
    magic = b"\x93NUMPY\x01\x00"
    description = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    length = NPY_HEADER - len(magic) - 2
    return magic + length.to_bytes(2, "little") + description.ljust(length - 1).encode() + b"\n"
