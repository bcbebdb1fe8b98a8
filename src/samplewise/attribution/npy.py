"""Float32 matrices in NumPy's .npy format, written through a memory map, without NumPy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from samplewise.core.files import absolute, atomic_write

HEADER = 128  # bytes; a multiple of 64, as the format asks


@contextmanager
def npy_matrix(path: str | os.PathLike[str], rows: int, columns: int) -> Iterator[Tensor]:
    """Yield a matrix (rows, columns) of zeros to fill; after the block, it is the file at `path`.

    The matrix is in a temporary file, which is renamed after the block, or removed on an error.
    """
    with atomic_write(absolute(path)) as file:
        file.write(_header(rows, columns))
        file.truncate(HEADER + 4 * rows * columns)
        file.flush()
        yield mapped(Path(file.name), rows, columns, shared=True)


def mapped(path: Path, rows: int, columns: int, *, shared: bool = False) -> Tensor:
    """Matrix (rows, columns) of a file that `npy_matrix` wrote, as a memory map. shared: changes go to the file."""
    size = HEADER // 4 + rows * columns
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.float32)[HEADER // 4 :].view(rows, columns)


def _header(rows: int, columns: int) -> bytes:
    magic = b"\x93NUMPY\x01\x00"
    description = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    length = HEADER - len(magic) - 2
    return magic + length.to_bytes(2, "little") + description.ljust(length - 1).encode() + b"\n"
