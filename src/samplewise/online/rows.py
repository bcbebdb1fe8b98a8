"""Rows of samples in memory, and the running updates that read them.

`Step.over` makes updates from the rows of a batch, one by one, at the cost of the update alone. Here the batch is a
ring: `RowUpdates` keeps one iterator of `Step.over` running, and a row is written just before the update that reads it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from struct import Struct, error
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import BatchError
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.step.window import BatchCursor

FORMATS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}  # dtype -> format character of `struct`


class RowBuffer:
    """Rows of one shape. Numbers are written to the memory directly: a tensor operation takes a microsecond, and making
    a tensor from a list several.
    """

    def __init__(self, rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.tensor = torch.zeros(rows, *shape, dtype=dtype, device=device)
        self.shape = torch.Size(shape)
        self.size = prod(shape)
        self._rows = self.tensor.unbind()
        self._numpy: Any = sys.modules.get("numpy")  # torch has imported NumPy if it is installed
        self._arrays: Any = None
        self._format: Struct | None = None
        if device.type == "cpu" and dtype in FORMATS:
            self._format = Struct(f"{self.size}{FORMATS[dtype]}")
            self._memory = (ctypes.c_char * self.tensor.nbytes).from_address(self.tensor.data_ptr())
            with suppress(RuntimeError):  # a torch that was built without NumPy
                self._arrays = None if self._numpy is None else self.tensor.numpy()

    def write(self, row: int, values: Any) -> None:
        """Write a tensor, an array or a sequence of numbers to a row."""
        if isinstance(values, Tensor):
            if values.shape != self.shape:
                raise wrong_shape(self.shape, values.shape)
            self._rows[row].copy_(values.detach() if values.requires_grad else values)
        elif self._arrays is not None and isinstance(values, self._numpy.ndarray):
            if values.shape != self.shape:
                raise wrong_shape(self.shape, values.shape)
            if values.dtype.kind not in "fiub":
                raise BatchError(f"{NUMBERS} found an array of {values.dtype}. {ENCODE}")
            self._arrays[row] = values
        elif isinstance(values, (list, tuple)) and len(self.shape) == 1:
            if len(values) != self.size:
                raise wrong_shape(self.shape, (len(values),))
            self.write_numbers(row, values)
        else:
            self.write(row, as_row(values))

    def write_numbers(self, row: int, numbers: Sequence[Any], names: Sequence[Any] = ()) -> None:
        """Write as many numbers as a row has. `names`: of the numbers, for error messages."""
        try:
            if self._format is None:
                self._rows[row].copy_(torch.tensor(numbers).reshape(self.shape))
            else:
                self._format.pack_into(self._memory, row * self._format.size, *numbers)
        except (error, TypeError, ValueError, OverflowError, RuntimeError) as why:
            wrong = next((k for k, value in enumerate(numbers) if not _is_number(value)), None)
            problem = str(why) if wrong is None else repr(numbers[wrong])
            if wrong is not None and wrong < len(names):
                problem += f" as {names[wrong]!r}"
            raise BatchError(f"{NUMBERS} found {problem}. {ENCODE}") from why

    def fill(self, row: int) -> None:
        """Copy a row to all others."""
        self.tensor.copy_(self._rows[row].clone())


NUMBERS = "features, and targets of a regression, must be numbers;"
ENCODE = "Encode text and categories as numbers, for example one feature for each category."


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str)


def as_row(values: Any) -> Tensor:
    """Tensor of a row that is neither a tensor nor a flat list, such as nested lists."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise BatchError(
            "x must be a dict of features, or a row of numbers: a list, a tuple, an array or a tensor without batch "
            f"dimension; found {type(values).__name__}: {why}. {ENCODE}"
        ) from why


def wrong_shape(expected: Sequence[int], shape: Sequence[int]) -> BatchError:
    return BatchError(
        f"each row must have the shape {tuple(expected)}; found {tuple(shape)}. Pass one sample without batch "
        "dimension, with as many columns as the model has inputs."
    )


# --- updates ---------------------------------------------------------------------------------------------------------


class RowUpdates:
    """Updates of a step, each from one row of `x` and `y`. `row`: the next row that is read.

    Between two updates the step has no batch: other calls of the step find no unused rows.
    """

    ROWS = 256  # the step needs some microseconds at the beginning of each batch

    def __init__(self, step: Step, x: RowBuffer, y: RowBuffer, row: int = 0):
        self.x = x
        self.y = y
        self.row = row
        self._rows = len(x.tensor)
        self._step = step
        self._builder = step._windows
        self._cursor: BatchCursor | None = None  # of the batch that is partly used; None: at its beginning
        # A method, not the iterator: tools that measure the memory of objects iterate over their attributes.
        self._next: Callable[[], Update] | None = None

    def next(self) -> Update:
        """Make the update of row `row`. If it raises, nothing has changed."""
        builder = self._builder
        if builder.config.samples != 1:  # a larger window would read rows that are not written yet
            raise ValueError(
                f"the step of Online must keep samples=1; found samples={builder.config.samples}. Set step.samples = 1."
            )
        other = builder.cursor  # the rest of a batch of another call of step.over
        builder.cursor = self._cursor
        if self._next is None:
            # The first slice of a batch is compared with the whole batch, so that all rows must be valid.
            self.x.fill(self.row)
            self.y.fill(self.row)
            self._next = self._step.over(self._batches()).__next__
        try:
            update = self._next()
        except BaseException:  # the iterator has ended; the step has discarded the window
            self.restart()
            raise
        finally:
            builder.cursor = other
        self.row += 1
        if self.row == self._rows:
            self.row = 0
            self._cursor = None
        return update

    def restart(self) -> None:
        """Begin another iterator with the next update, after an error or a change of the step."""
        self._next = None
        self._cursor = None

    def _batches(self) -> Iterator[BatchCursor]:
        while True:
            self._cursor = BatchCursor((self.x.tensor, self.y.tensor), consumed=self.row)
            yield self._cursor
