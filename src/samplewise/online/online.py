"""`sw.Online`: learning from a stream, one sample per update."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from samplewise.core.files import absolute
from samplewise.core.quantiles import RunningQuantiles, bucket_of
from samplewise.core.state import RandomState, snapshot
from samplewise.errors import BatchError
from samplewise.loop.checkpoint import io
from samplewise.online.drift import DriftTest
from samplewise.online.features import Features, Labels, NamedNumbers, NewFeatures, Number, Target
from samplewise.online.growth import CompileDelay, GrowingLayers, Undo
from samplewise.online.rows import RowBuffer, RowUpdates
from samplewise.online.settings import Task, check_step, has_probabilities, register, task_of
from samplewise.online.state import load_state, read_state, state_of
from samplewise.online.stream import StreamTotals, run
from samplewise.step.step import Step
from samplewise.step.update import Update

LEVELS = (0.5, 0.9, 0.99)  # of the quantiles that are reported


class OnlineUpdate(NamedTuple):
    """Results of one update.

    loss    loss of the sample before the update
    norm    norm of its gradient, before any transform
    weight  coefficient of its gradient, such as that of sw.clip; the smallest one if parameters have different ones;
            0 if the update was skipped
    drift   True if this loss raised a drift alarm
    """

    loss: float
    norm: float
    weight: float
    drift: bool


class Online:
    """Online learning from a stream with a step of one sample: predict, learn, save and resume.

        step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, compile=True, transforms=[sw.clip(1.0)])
        online = sw.Online(step)
        for x, y in stream:
            y_hat = online.predict_one(x)
            online.learn_one(x, y)

    The object is an `OnlineClassifier`, `OnlineRegressor` or `OnlineMultiTargetRegressor`. It has the interface of
    river's estimators, and works in river.evaluate.progressive_val_score and in pipelines: StandardScaler() | online.

    step: a `Step` with samples=1 and one process.
    task: "classification", "regression" or "multi-target regression". None (default): derived from the step's criterion
    and the outputs of the last layer. Required for loss functions, which get batches (x, y): x (1, ...); y (1,) int64
    for classes, otherwise of the shape of the model's outputs.
    classes: labels in the order of the model's outputs; other labels are then refused. None (default): labels are
    numbered in order of appearance.
    new_features: what is done with features of a dict that have no column yet, after the first sample. "grow"
    (default): they get the next free input of the first layer, which grows if there is none. "ignore" them, or "raise".
    drift: detector with `update(loss)` and `drift_detected`, such as river.drift.ADWIN(). None (default): `DriftTest`,
    which has at most one false alarm in 1,000,000 independent, stationary losses on average.

    Samples. x is a dict of feature name to number, or a row: list, tuple, array or tensor without batch dimension.
    Columns of a dict are assigned in order of appearance; missing features are 0. y is a hashable label; a number; or a
    dict of target name to number.

    Growth. A model with K outputs has K free places for classes. If a further class appears, the last layer, an
    nn.Linear, grows by one output whose weights and bias are zero: the logit of the new class is 0 before its first
    update. If a feature finds no free input, the first layer, an nn.Linear, grows by half of its inputs, at least 8,
    whose weights are zero: predictions stay the same. Tensors of the optimizer's state grow by zeros, and step counters
    stay. The Parameter objects remain, so that other references to them stay valid. Updates are then uncompiled until
    the layers have not grown for 1,000 updates (2,000 the next time, and so on).

    Predictions use the model in eval mode and change nothing. A classifier predicts only classes that have appeared, or
    are in classes=; None if there are none.

    If `learn_one` raises, for example because a value is no number or the loss is not finite, nothing has changed:
    columns, classes, model, optimizer and statistics are as before.
    """

    _task: ClassVar[Task]
    _river_base: ClassVar[str]
    _supervised = True  # read by river
    _is_stochastic = False

    def __new__(cls, step: Any = None, *, task: Task | None = None, **settings: Any) -> Online:
        if cls is not Online:
            return super().__new__(cls)
        kinds = (OnlineClassifier, OnlineRegressor, OnlineMultiTargetRegressor)
        task = task_of(check_step(step), task)
        return super().__new__(next(kind for kind in kinds if kind._task == task))

    def __init__(
        self,
        step: Step,
        *,
        task: Task | None = None,
        classes: Sequence[Hashable] | None = None,
        new_features: NewFeatures = "grow",
        drift: Any = None,
    ):
        self.step = check_step(step)
        self.task = task_of(step, task)
        if self.task != self._task:
            raise ValueError(f"{type(self).__name__} is for {self._task}; found a step for {self.task}. Use sw.Online.")
        if new_features not in ("grow", "ignore", "raise"):
            raise ValueError(f"new_features must be 'grow', 'ignore' or 'raise'; found {new_features!r}.")
        register(type(self), self._river_base)
        self.drift_detector = DriftTest() if drift is None else drift
        self._settings = {"task": task, "classes": classes, "new_features": new_features, "drift": copy.deepcopy(drift)}
        try:
            self._untrained: Step | None = copy.deepcopy(step)  # for `clone`
        except Exception:  # a model that is compiled, or holds open files
            self._untrained = None
        self._target = self._make_target(classes)
        self._features = Features(new_features)
        self._layers = GrowingLayers(step.model, step._applier.optimizer)
        self._delay = CompileDelay(step)
        self._updates: RowUpdates | None = None  # known from the first sample on
        self._row: RowBuffer | None = None  # for predictions
        self._changes: list[Undo] = []  # of columns, classes and layers by the current sample
        self._draws: bool | None = None  # the model draws random numbers; None: not known yet
        self._losses = RunningQuantiles()
        self._norms = RunningQuantiles()
        self.drift = False
        self.samples = 0

    @abstractmethod
    def _make_target(self, classes: Sequence[Hashable] | None) -> Target: ...

    # --- learning --------------------------------------------------------------------------------------------------

    def learn_one(self, x: Any, y: Any) -> OnlineUpdate:
        """Make one update with a sample, and return its results."""
        updates = self._updates
        try:
            if updates is None or self._features.has_new(x) or self._target.is_new(y):
                updates = self._extend(x, y)
            row = updates.row
            self._features.write(updates.x, row, x)
            updates.y.write_numbers(row, self._target.numbers(y))
            update = updates.next() if self._draws is not None else self._first_update(updates)
        except BaseException:
            self._revert()
            raise
        self._changes = []
        if self._delay.updates and self._delay.count():
            updates.restart()
        return self._record(update)

    def _first_update(self, updates: RowUpdates) -> Update:
        """Make an update, and note whether the model draws random numbers: their state is then saved."""
        before = RandomState()
        update = updates.next()
        after = RandomState()
        self._draws = not torch.equal(before._torch, after._torch) or before._python != after._python
        return update

    def _record(self, update: Update) -> OnlineUpdate:
        """Add the results of an update to the statistics."""
        self.samples += 1
        if update.skipped:
            self.drift = False
            return OnlineUpdate(nan, nan, 0.0, False)
        part = update._parts[0]
        count = 1.0 if part.counts is None else part.counts.item()
        loss = part.losses.item() / count if count else nan
        coefficients = part.coefficients
        weight = 1.0
        if isinstance(coefficients, Tensor):
            weight = coefficients.item()
        elif coefficients is not None:
            weight = min(value.item() for value in coefficients.values())
        norms = part.unscaled_norms
        if norms is not None:
            norm = norms.item() / count if count else nan
        else:
            norm = update.grad_norm / weight if weight else nan
        if isfinite(loss):
            self._losses.add(bucket_of(loss))
        if isfinite(norm):
            self._norms.add(bucket_of(norm))
        detector = self.drift_detector
        detector.update(loss)
        self.drift = drift = bool(detector.drift_detected)
        return OnlineUpdate(loss, norm, weight, drift)

    # --- new features and classes ----------------------------------------------------------------------------------

    def _extend(self, x: Any, y: Any) -> RowUpdates:
        """Allocate memory at the first sample; give new features columns and a new label a class. `_changes` gets a
        function for each change that undoes it.
        """
        features, target = self._features, self._target
        updates = self._updates or self._begin(x)
        names = features.new_names(x)
        if names and features.names:
            features.refuse(names)
            names = [] if features.new_features == "ignore" else names
        if names:
            self._add_columns(names)
        if target.is_new(y):
            if target.is_full(y):
                self._add_output()
            self._changes.append(target.add(y))
        return self._updates or updates

    def _add_columns(self, names: list[Hashable]) -> None:
        features, first = self._features, self._layers.first
        assert features.names is not None and features.shape is not None and first is not None
        self._changes.append(features.saved())
        needed = len(features.names) + len(names)
        if needed > features.shape[0]:
            if features.new_features != "grow":
                raise BatchError(
                    "the first sample must have at most as many features as the first layer has inputs, "
                    f"{features.shape[0]}, with new_features={features.new_features!r}; found {needed}. Use 'grow', or "
                    "a larger layer."
                )
            # By half of the inputs, so that a stream with many late features grows a few times only.
            columns = max(needed, first.in_features + max(8, first.in_features // 2))
            self._changes += [self._layers.resize_inputs(columns), self._delay.begin()]
            features.shape = (columns,)
            self._allocate()
        features.add(names)

    def _add_output(self) -> None:
        target, last = self._target, self._layers.last
        assert isinstance(target, Labels)
        if last is None or last.out_features != target.places:
            raise BatchError(
                f"a further class needs a model whose last layer is an nn.Linear with one output for each class; found "
                f"{target.places} classes and another last layer. Use a model with more outputs."
            )
        self._changes += [self._layers.resize_outputs(target.places + 1), self._delay.begin(), target.add_place()]
        if self._updates is not None:
            self._updates.restart()  # with the runner that makes uncompiled updates

    def _revert(self) -> None:
        """Undo the changes that the current sample has made."""
        for undo in reversed(self._changes):
            undo()
        self._changes = []

    # --- memory for samples ----------------------------------------------------------------------------------------

    def _begin(self, x: Any) -> RowUpdates:
        """Derive the shapes of samples and outputs from the first sample, and allocate memory."""
        features, first = self._features, self._layers.first
        self._changes.append(features.saved())
        features.begin(x, None if first is None else first.in_features)
        return self._allocate()

    def _allocate(self, row: int = 0) -> RowUpdates:
        """Allocate memory for rows of the present shapes. Outputs of the model are computed once, for their shape."""
        before = self._updates, self._row

        def restore() -> None:
            self._updates, self._row = before

        self._changes.append(restore)
        model, shape = self.step.model, self._features.shape
        assert shape is not None
        p = next(p for p in model.parameters() if p.is_floating_point())
        dtype = torch.int64 if self._layers.takes_indices else p.dtype
        self._row = RowBuffer(1, shape, dtype, p.device)
        undo = snapshot(model)
        try:
            outputs = self._outputs(self._row)
        except Exception as error:
            raise BatchError(
                f"the model must accept one tensor of shape {(1, *shape)}, a batch of one row; found "
                f"{type(error).__name__}: {error} Pass rows of the model's input shape; a model with several inputs "
                "cannot be used with Online."
            ) from error
        finally:
            undo()
        self._target.check_outputs(tuple(outputs.shape[1:]))
        kind = torch.int64 if self._target.integers else outputs.dtype
        y_shape = () if self._target.integers else outputs.shape[1:]
        x = RowBuffer(RowUpdates.ROWS, shape, dtype, p.device)
        y = RowBuffer(RowUpdates.ROWS, y_shape, kind, p.device)
        self._updates = RowUpdates(self.step, x, y, row)
        return self._updates

    def _load_rows(self, row: int) -> None:
        """Allocate memory for rows of the loaded shapes. `row`: the next one that is written."""
        self._updates = self._row = None
        if self._features.shape is not None:
            self._allocate(row)
            self._changes = []

    # --- predictions -----------------------------------------------------------------------------------------------

    def predict_one(self, x: Any) -> Any:
        """Predict the label, the number, or a dict of target name to number, of a sample. Before the first sample is
        learned, a label is None, and the dict is empty. Changes nothing.
        """
        return self._target.prediction(self._predict(x))

    def _predict(self, x: Any) -> Any:
        """Output of the model for a sample, as a number or a list."""
        features = self._features
        if self._row is None:
            try:
                self._begin(x)
            except BaseException:
                self._revert()
                raise
            self._changes = []
        if features.new_features == "raise" and features.names and features.has_new(x):
            features.refuse(features.new_names(x))
        assert self._row is not None
        features.write(self._row, 0, x)
        return self._outputs(self._row)[0].tolist()

    def _outputs(self, row: RowBuffer) -> Tensor:
        """Output of the model in eval mode."""
        precision = self.step._precision
        modules: list[Any] = [self.step.model]
        for module in modules:  # as model.modules(), in a fifth of the time; repeated modules do no harm
            modules += filter(None, module._modules.values())
        training = [vars(module) for module in modules if module.training]
        for attributes in training:  # not `module.training = False`: assignments to modules take half a microsecond
            attributes["training"] = False
        try:
            with torch.inference_mode(), precision.autocast(row.tensor.device):
                return self.step.model(row.tensor)
        finally:
            for attributes in training:
                attributes["training"] = True

    # --- statistics ------------------------------------------------------------------------------------------------

    def quantiles(self) -> dict[str, dict[float, float]]:
        """Quantiles 0.5, 0.9 and 0.99 of "loss" and "norm" of the last 10,000 to 20,000 samples, with a relative error
        of at most 1 %. NaN before the first update. The memory is constant.
        """
        running = {"loss": self._losses, "norm": self._norms}
        return {name: {level: values.quantile(level) for level in LEVELS} for name, values in running.items()}

    def run(self, stream: Iterable[tuple[Any, Any]], total: int | None = None, progress: bool = True) -> StreamTotals:
        """Predict and then learn each (x, y) of a stream; return the totals of these samples.

        total: number of samples, for the progress bar; by default len(stream), if it has a length
        progress: False for no progress display
        """
        return run(self, stream, total, progress)

    # --- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copy of the state: model, optimizer, scheduler, step, columns, classes, statistics, drift detector, and the
        random state if the model draws random numbers. Numbers, texts and tensors only.
        """
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has returned. Continuing gives bit-identical results. If it raises, nothing has
        changed.
        """
        load_state(self, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a directory, atomically: JSON and safetensors, without pickle. An existing checkpoint is
        replaced when the new one is complete.
        """
        io.write(absolute(path), state_of(self))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore what `save` has written. Raises CheckpointError for a damaged file, and for one that does not fit;
        nothing has changed then. No file can run code.
        """
        read_state(self, absolute(path))

    # --- copies ----------------------------------------------------------------------------------------------------

    def clone(self, new_params: Mapping[str, Any] | None = None, include_attributes: bool = False) -> Online:
        """Copy as it was when Online was created, with model and optimizer; `include_attributes`: as it is now.
        `new_params`: other arguments of Online.
        """
        if include_attributes:
            return copy.deepcopy(self)
        if self._untrained is None:
            raise TypeError(
                "clone needs a step that copy.deepcopy can copy; found one that it cannot. Create another Online."
            )
        settings = {"step": self._untrained, **self._settings} | dict(new_params or {})
        return type(self)(**copy.deepcopy(settings))

    def __deepcopy__(self, memo: dict[int, Any]) -> Online:
        new = type(self)(copy.deepcopy(self.step, memo), **copy.deepcopy(self._settings, memo))
        new._untrained = copy.deepcopy(self._untrained, memo)
        new.load_state_dict(self.state_dict())
        return new

    def _get_params(self) -> dict[str, Any]:
        """Arguments of the constructor, for river."""
        return {"step": self.step, **self._settings}

    @property
    def _raw_memory_usage(self) -> int:
        """Bytes of parameters, buffers and optimizer state, for river."""
        model = self.step.model
        states = getattr(self.step.optimizer, "state", {}).values()
        tensors = [*model.parameters(), *model.buffers(), *(t for s in states for t in s.values())]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.step!r})"


class OnlineClassifier(Online):
    """`Online` for labels. See there."""

    _task = "classification"
    _river_base = "Classifier"
    _multiclass = True

    def _make_target(self, classes: Sequence[Hashable] | None) -> Labels:
        return Labels(classes, probabilities=has_probabilities(self.step))

    @property
    def classes(self) -> list[Hashable]:
        """Labels that have appeared, or classes=, in the order of the model's outputs."""
        return list(self._target.state_dict())

    def predict_proba_one(self, x: Any) -> dict[Hashable, float]:
        """Probability of each class that has appeared, or is in classes=; their sum is 1. Empty before the first one.
        Changes nothing.
        """
        labels: Any = self._target
        return labels.probabilities(self._predict(x))


class OnlineRegressor(Online):
    """`Online` for numbers. See there."""

    _task = "regression"
    _river_base = "Regressor"

    def _make_target(self, classes: Sequence[Hashable] | None) -> Number:
        return Number()


class OnlineMultiTargetRegressor(Online):
    """`Online` for dicts of numbers, one for each output of the model. See there."""

    _task = "multi-target regression"
    _river_base = "MultiTargetRegressor"

    def _make_target(self, classes: Sequence[Hashable] | None) -> NamedNumbers:
        return NamedNumbers()
