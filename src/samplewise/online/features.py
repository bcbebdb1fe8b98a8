"""Features: columns of dicts, in order of appearance, and checks of rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from samplewise.core.text import listed
from samplewise.errors import BatchError
from samplewise.online.growth import Undo
from samplewise.online.rows import RowBuffer, as_row

NewFeatures = Literal["grow", "ignore", "raise"]
DICT_NEEDS_LINEAR = (
    "features in a dict need a model whose first layer is an nn.Linear, because its inputs are their columns; found "
    "another first layer. Pass rows: lists, arrays or tensors without batch dimension."
)


class Features:
    """Columns of the features of a stream. `names`: names of the columns that are in use; None for rows, and before the
    first sample.
    """

    def __init__(self, new_features: NewFeatures):
        self.new_features = new_features
        self.names: list[Hashable] | None = None
        self.shape: tuple[int, ...] | None = None  # of a row; None before the first sample
        self._columns: dict[Hashable, int] = {}

    def begin(self, x: Any, inputs: int | None) -> None:
        """Derive the shape of all rows from the first sample. `inputs`: of the first layer, if it is an nn.Linear."""
        if isinstance(x, Mapping):
            if inputs is None:
                raise BatchError(DICT_NEEDS_LINEAR)
            self.shape = (inputs,)
            self.names = []
            return
        shape = tuple(x.shape if hasattr(x, "shape") else as_row(x).shape)
        if inputs is not None and len(shape) == 1 and shape[0] != inputs:
            raise BatchError(
                f"a row must have as many columns as the first layer of the model has inputs, {inputs}; found "
                f"{shape[0]}. Use a model of another size, or dicts of features, with which the layer can grow."
            )
        self.shape = shape

    def has_new(self, x: Any) -> bool:
        """True if the sample has features without a column, or is a dict after rows."""
        if self.names is None:
            return isinstance(x, Mapping)
        return [*x] != self.names and (not isinstance(x, Mapping) or any(name not in self._columns for name in x))

    def new_names(self, x: Any) -> list[Hashable]:
        """Names of features without a column; empty for a row."""
        if not isinstance(x, Mapping):
            if self.names is not None:
                raise BatchError(
                    "all samples of a stream must be dicts, or all must be rows; found "
                    f"{type(x).__name__} after dicts. Convert them to one of both."
                )
            return []
        if self.names is None:
            raise BatchError(
                "all samples of a stream must be dicts, or all must be rows; found a dict after rows. Convert them to "
                "one of both."
            )
        return [name for name in x if name not in self._columns]

    def refuse(self, names: Sequence[Hashable]) -> None:
        """Raise BatchError for new features with new_features="raise"."""
        if self.new_features == "raise" and names:
            raise BatchError(
                f"features must be among those of the first sample with new_features='raise'; found "
                f"{listed(map(repr, names))}. Use new_features='ignore' or 'grow'."
            )

    def add(self, names: Sequence[Hashable]) -> Undo:
        """Give features the next columns. Returns a function that undoes it."""
        before = self.state_dict()
        assert self.names is not None
        for name in names:
            self._columns[name] = len(self.names)
            self.names.append(name)
        return lambda: self.load_state_dict(before)

    def resize(self, columns: int) -> Undo:
        """Set the number of columns of a row. Returns a function that undoes it."""
        before = self.state_dict()
        self.shape = (columns,)
        return lambda: self.load_state_dict(before)

    def write(self, buffer: RowBuffer, row: int, x: Any) -> None:
        """Write a sample to a row of the buffer; features without a column are left out, missing ones are 0."""
        names = self.names
        if names is None:
            buffer.write(row, x)
            return
        free = buffer.size - len(names)
        if [*x] == names:  # most streams have all features in one order
            values = [*x.values()]
        else:
            values = [x.get(name, 0.0) for name in names]
        buffer.write_numbers(row, values + [0.0] * free if free else values, names)

    def state_dict(self) -> dict[str, Any]:
        return {"names": None if self.names is None else list(self.names), "shape": self.shape and list(self.shape)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.names = None if state["names"] is None else list(state["names"])
        self.shape = None if state["shape"] is None else tuple(state["shape"])
        self._columns = {name: k for k, name in enumerate(self.names or ())}
