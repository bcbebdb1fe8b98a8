"""Files of a store of projected gradients: settings, and the rows of each model with crash-safe appends.

    store.json        format, dim, seed, dtype, blocks, projection
    store.lock        names the process that is writing, see `core.directory_lock`
    model-0000/       rows of the first model
      rows.f16        (count, dim) float16, or rows.f32 float32: each row divided by its largest absolute entry
      scales.f32      (count,) float32: the divisor of each row; avoids overflow and underflow of float16
      weights.f32     (count,) float32: weights of the samples, if the rows are gradients of an output function
      gram.f64        X^T X of the first rows, see `scoring`
      model.json      count, checksum of the model, settings
    model-0001/       rows of the second model; ...

Rows are written first; then model.json, which holds their count, is replaced atomically. Rows beyond the count, left by
a crash, are not part of the file, and the next append overwrites them.

`npy_matrix` writes matrices computed from them in NumPy's format, without NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import absolute, atomic_write, read_json, sync_file, tensor_bytes, write_json
from samplewise.core.text import plural
from samplewise.errors import StoreError

FORMAT = 2  # of store.json
SETTINGS = {"dim": int, "seed": int, "dtype": str, "blocks": str}
PARTIAL_INDEX = ".model.json.partial"  # left by a process that was killed while it created the directory
Dtype = Literal["float16", "float32"]
NPY_HEADER = 128  # bytes; a multiple of 64, as the format asks
DTYPES = {"float16": torch.float16, "float32": torch.float32}


def create_store(directory: Path, settings: Mapping[str, int | str], lock: DirectoryLock) -> None:
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
        write_json(index, {"format": FORMAT, **settings})


def open_store(directory: Path, settings: Mapping[str, Any]) -> list[RowsFile]:
    """Rows of each model. Raises StoreError if store.json has other settings, or a model is missing."""
    path = directory / "store.json"
    version = read_index(path, {"format": int})["format"]
    if version != FORMAT:
        raise StoreError(
            f"{path} must have format {FORMAT}; found {version}. Use the version of samplewise that wrote it, or fill "
            "a new store at another path."
        )
    index = read_index(path, SETTINGS)
    index.setdefault("projection", "dense")  # not written before 0.4
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
    return [RowsFile(model, settings["dim"], settings["dtype"]) for model in models]


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

    def __init__(self, directory: Path, dim: int, dtype: Dtype, index: ModelIndex | None = None):
        self.directory = directory
        self.dim = dim
        rows = {"float16": "rows.f16", "float32": "rows.f32"}[dtype]
        self._files: dict[str, tuple[str, int, torch.dtype]] = {
            "rows": (rows, dim, DTYPES[dtype]),
            "scales": ("scales.f32", 1, torch.float32),
        }
        if index is None:
            self.index = _read(directory / "model.json", dim)
        else:
            self.index = index
            directory.mkdir(parents=True, exist_ok=True)
            self._write_index(index)
        if self.index.weighted:
            self._files["weights"] = ("weights.f32", 1, torch.float32)
        self._check_sizes()

    def __len__(self) -> int:
        return self.index.count

    def append(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Append rows (B, dim) float32, and their weights (B,) if the file has weights."""
        scales = torch.maximum(rows.amax(1), -rows.amin(1))  # ten times as fast as a norm or abs
        parts = {"rows": rows / scales.where(scales > 0, 1)[:, None], "scales": scales}
        if self.index.weighted:
            assert weights is not None
            parts["weights"] = weights
        for kind, part in parts.items():
            name, width, dtype = self._files[kind]
            (self.directory / name).touch()
            with open(self.directory / name, "r+b") as file:  # not "ab": rows after the count, of a crash, are replaced
                file.seek(len(self) * width * dtype.itemsize)
                file.write(tensor_bytes(part.to(dtype)))
                file.truncate()
                sync_file(file)
        index = replace(self.index, count=len(self) + len(rows))
        self._write_index(index)
        self.index = index

    def reload(self) -> None:
        """Read the number of rows again, after another process has appended."""
        self.index = _read(self.directory / "model.json", self.dim)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, dim) in float32, read through a memory map."""
        if stop <= start:
            return torch.zeros(0, self.dim)
        return self._memory_map("rows")[start:stop].float() * self._memory_map("scales")[start:stop]

    def weights(self, start: int, stop: int) -> Tensor:
        """Weights (stop - start,) of samples; ones if the file has no weights."""
        if stop <= start or not self.index.weighted:
            return torch.ones(max(stop - start, 0))
        return self._memory_map("weights")[start:stop, 0].clone()

    def _memory_map(self, kind: str) -> Tensor:
        name, width, dtype = self._files[kind]
        size = len(self) * width
        return torch.from_file(str(self.directory / name), shared=False, size=size, dtype=dtype).view(len(self), width)

    def _write_index(self, index: ModelIndex) -> None:
        write_json(self.directory / "model.json", asdict(index))

    def _check_sizes(self) -> None:
        for name, width, dtype in self._files.values():
            expected = len(self) * width * dtype.itemsize
            path = self.directory / name
            size = path.stat().st_size if path.is_file() else 0
            if size < expected or path.is_dir():
                raise StoreError(
                    f"{path} must have {expected} bytes for {plural(len(self), 'sample')}; found "
                    f"{'a directory' if path.is_dir() else size}. "
                    f"Remove {self.directory} and fill the store again."
                )


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
