"""Features and targets of a stream: columns of dicts, in order of appearance; from y to the target of the loss, and
from the model's output to a prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from math import exp
from typing import Any, Literal

import torch

from samplewise.core.text import listed, plural
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

    def saved(self) -> Undo:
        """Function that restores the present columns."""
        state = self.state_dict()
        return lambda: self.load_state_dict(state)

    def add(self, names: Sequence[Hashable]) -> None:
        """Give features the next columns."""
        assert self.names is not None
        for name in names:
            self._columns[name] = len(self.names)
            self.names.append(name)

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


# --- targets ----------------------------------------------------------------------------------------------------------


Label = Hashable


class Target(ABC):
    """Encoding of the targets of a stream. `numbers` raises BatchError for an invalid y and changes nothing."""

    integers = False  # the target is a class index

    def is_new(self, y: Any) -> bool:
        """True if y is a label without an index, or has the first target names."""
        return False

    def is_full(self, y: Any) -> bool:
        """True if the model has no output for this new label. Raises BatchError if no further class is allowed."""
        return False

    def add(self, y: Any) -> Undo:
        """Add the label, or the target names. Returns a function that undoes it."""
        raise NotImplementedError  # nothing is new in other targets

    @abstractmethod
    def numbers(self, y: Any) -> tuple[Any, ...]:
        """Numbers of a row of the target buffer."""

    @abstractmethod
    def check_outputs(self, outputs: tuple[int, ...]) -> None:
        """Raise BatchError if a model with outputs of this shape, without the batch dimension, does not fit."""

    @abstractmethod
    def prediction(self, outputs: Any) -> Any:
        """Prediction from the output of the model for one row, as a number or a list of numbers."""

    @abstractmethod
    def error(self, prediction: Any, y: Any) -> float:
        """Error of a prediction: 1 for a wrong label, otherwise the mean of absolute differences."""

    @abstractmethod
    def state_dict(self) -> Any: ...

    @abstractmethod
    def load_state_dict(self, state: Any) -> None: ...


class Labels(Target):
    """Labels of classes, numbered in order of appearance. `probabilities`: a single output is one, not a logit."""

    def __init__(self, classes: Sequence[Label] | None, probabilities: bool):
        self.classes: list[Label] = []
        self._index: dict[Label, int] = {}
        self._are_fixed = classes is not None
        self._are_probabilities = probabilities
        self.places = 0  # classes that the model's outputs can represent
        self.binary = False  # one output, the logit or probability of class 1
        if classes is not None:
            self.load_state_dict(list(classes))
            if not classes or len(self._index) < len(self.classes):
                raise ValueError(f"classes must be at least one label, each of them once; found {list(classes)!r}.")

    @property
    def integers(self) -> bool:  # type: ignore[override]
        return not self.binary

    def label(self, y: Any) -> Label:
        """The label itself; a Python value for one of NumPy, or for a tensor of one element."""
        label = y.item() if isinstance(y, torch.Tensor) or type(y).__module__ == "numpy" else y
        try:
            hash(label)
        except TypeError:
            raise BatchError(
                f"a label must be hashable, such as a text, a number or a bool; found {type(y).__name__}. Convert it "
                "to a text or a tuple."
            ) from None
        return label

    def is_new(self, y: Any) -> bool:
        try:
            return y not in self._index and self.label(y) not in self._index
        except TypeError:  # not hashable
            return self.label(y) not in self._index

    def is_full(self, y: Any) -> bool:
        if self._are_fixed:
            raise BatchError(
                f"a label must be one of classes={self.classes!r}; found {self.label(y)!r}. Create Online with all "
                "classes, or without classes=."
            )
        if self.binary and len(self.classes) == 2:
            raise BatchError(
                f"a model with one output has two classes, {self.classes[0]!r} and {self.classes[1]!r}; found "
                f"the further label {self.label(y)!r}. Use nn.CrossEntropyLoss() and one output for each class."
            )
        return len(self.classes) == self.places

    def add(self, y: Any) -> Undo:
        label = self.label(y)
        self._index[label] = len(self.classes)
        self.classes.append(label)

        def undo() -> None:
            del self._index[self.classes.pop()]

        return undo

    def add_place(self) -> Undo:
        """Count a further output of the model. Returns a function that undoes it."""
        before = self.places
        self.places += 1
        return lambda: setattr(self, "places", before)

    def numbers(self, y: Any) -> tuple[int]:
        try:
            return (self._index[y],)
        except (KeyError, TypeError):  # a number of NumPy, a tensor
            return (self._index[self.label(y)],)

    def check_outputs(self, outputs: tuple[int, ...]) -> None:
        if len(outputs) > 1 or (self._are_probabilities and outputs not in ((), (1,))):
            raise BatchError(
                "a classifier needs a model with one output for each class, or one for two classes; found outputs of "
                f"shape {outputs} for one row. Use another model, or task= for another task."
            )
        self.binary = outputs in ((), (1,))
        self.places = 2 if self.binary else outputs[0]
        if self.binary and len(self.classes) > 2:
            raise BatchError(
                f"a model with one output has two classes; found {plural(len(self.classes), 'class', 'classes')}. Use "
                "nn.CrossEntropyLoss() and a model with one output for each class."
            )

    def scores(self, outputs: Any) -> list[float]:
        """Logarithms of unnormalized probabilities of the classes that have an index."""
        if not self.binary:
            return list(outputs[: len(self.classes)])
        value = outputs if isinstance(outputs, float) else outputs[0]
        if self._are_probabilities:
            return [1 - value, value][: len(self.classes)]
        return [0.0, value][: len(self.classes)]

    def probabilities(self, outputs: Any) -> dict[Label, float]:
        """Probabilities of the classes that have an index, with sum 1."""
        scores = self.scores(outputs)
        if not scores:
            return {}
        if not (self.binary and self._are_probabilities):
            largest = max(scores)
            scores = [exp(score - largest) for score in scores]
        total = sum(scores) or 1.0
        return {label: score / total for label, score in zip(self.classes, scores, strict=True)}

    def prediction(self, outputs: Any) -> Label | None:
        scores = self.scores(outputs)
        return self.classes[scores.index(max(scores))] if scores else None

    def error(self, prediction: Label | None, y: Any) -> float:
        return float(prediction != self.label(y))

    def state_dict(self) -> list[Label]:
        return list(self.classes)

    def load_state_dict(self, state: Sequence[Label]) -> None:
        self.classes = list(state)
        self._index = {label: k for k, label in enumerate(state)}


class Number(Target):
    """One number per sample."""

    def numbers(self, y: Any) -> tuple[Any]:
        return (y,)

    def check_outputs(self, outputs: tuple[int, ...]) -> None:
        if outputs not in ((), (1,)):
            raise BatchError(
                f"a regressor needs a model with one output; found outputs of shape {outputs} for one row. Use "
                "task='multi-target regression' for several numbers, or another model."
            )

    def prediction(self, outputs: Any) -> float:
        return outputs if isinstance(outputs, float) else outputs[0]

    def error(self, prediction: float, y: Any) -> float:
        return abs(prediction - float(y))

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: None) -> None:
        """There is no state."""


class NamedNumbers(Target):
    """Numbers under the names of the first y, in its order: one for each output of the model."""

    def __init__(self) -> None:
        self.names: list[Hashable] | None = None  # known from the first y on
        self._outputs = 0

    def is_new(self, y: Any) -> bool:
        return self.names is None

    def add(self, y: Any) -> Undo:
        self.numbers(y)
        self.names = list(y)
        return lambda: setattr(self, "names", None)

    def numbers(self, y: Any) -> tuple[Any, ...]:
        if not isinstance(y, Mapping):
            raise BatchError(
                f"y must be a dict of target name to number; found {type(y).__name__}. For one number, use a model "
                "with one output."
            )
        names = list(y) if self.names is None else self.names
        if len(names) != self._outputs:
            raise BatchError(
                f"y must have as many targets as the model has outputs, {self._outputs}; found {listed(map(str, y))}. "
                "Give all targets in each sample, or use another model."
            )
        if y.keys() != dict.fromkeys(names).keys():
            raise BatchError(
                f"y must have the targets of the first sample, {listed(map(str, names))}; found {listed(map(str, y))}. "
                "Give all targets in each sample."
            )
        return tuple(y[name] for name in names)

    def check_outputs(self, outputs: tuple[int, ...]) -> None:
        if len(outputs) != 1:
            raise BatchError(
                "a multi-target regressor needs a model with one output for each target; found outputs of shape "
                f"{outputs} for one row. Use another model, or task='regression' for one number."
            )
        self._outputs = outputs[0]

    def prediction(self, outputs: Sequence[float]) -> dict[Hashable, float]:
        return {} if self.names is None else dict(zip(self.names, outputs, strict=True))

    def error(self, prediction: Mapping[Hashable, float], y: Mapping[Hashable, Any]) -> float:
        return sum(abs(prediction.get(name, 0.0) - float(value)) for name, value in y.items()) / len(y)

    def state_dict(self) -> list[Hashable] | None:
        return self.names

    def load_state_dict(self, state: list[Hashable] | None) -> None:
        self.names = state
