"""`PerSample`: mixin for Keras models with the torch backend; `fit` with per-sample transforms and a ledger.

The ledger needs ids of the samples, which are removed before the model is called:

arrays                          the row number; `fit` adds it, and Keras shuffles it with the rows
a dict x with the key of ids    x[key]; the model does not get it, unless it is one of its inputs
a DataLoader of `sw.Indexed`    the index of the dataset, last element of each batch
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import torch
from keras import tree
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

from samplewise.errors import DistributedError
from samplewise.integrations.adapter import check_comes_first, refuse_privacy
from samplewise.integrations.keras.backward import MovingStatistics, Settings, next_update, run_backward
from samplewise.ledger.ledger import Ledger
from samplewise.ledger.sample_ids import IndexedItem, split_entries
from samplewise.parallel import collectives

ROWS = "samplewise rows"
ARRAYS = "samplewise arrays"

if TYPE_CHECKING:
    Base = Any  # a keras.Model; known only in the class that uses the mixin
else:
    Base = object


class PerSample(Base):
    """Mixin for `keras.Model` with the torch backend: transforms of per-sample gradients, and a ledger, in `fit`.

        class Net(PerSample, keras.Model): ...         # or PerSample.of(model) for an existing model

        model.compile("adam", "mse", transforms=[sw.clip(1.0)], ledger=sw.Ledger("runs/first"))
        model.fit(x, y, epochs=10)

    The gradient of the compiled loss, through the outputs of the model, is transformed. The gradients of regularizers
    and of `add_loss` are added unchanged. Norms, and bounds such as that of `sw.clip`, refer to the gradient of the
    sample's own loss: B times its part of a mean over the batch, its part itself with reduction="sum", and Σw times its
    part with reduction="mean_with_sample_weight". sample_weight and class_weight are factors of the loss. Without
    transforms, training is bit-identical to that of `keras.Model`.

    Rows of the ledger: `update` is the number of updates that the optimizer has applied before, so that with
    gradient_accumulation_steps=k the samples of k batches have the same one. Keras divides the sum of k batches by k,
    whatever their sizes. The loss is that of the compiled loss without sample weights.

    The position in the ledger is saved and loaded with the weights (BackupAndRestore, ModelCheckpoint, save_weights):
    rows that are newer than loaded weights are removed when training continues.
    """

    _per_sample: Settings | None = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        check_comes_first(cls, PerSample, keras.Model)

    @staticmethod
    def of(model: Any) -> Any:
        """Add the mixin to the class of an existing model, for functional and Sequential models. Returns the model, to
        be compiled again. Saved files are those of the original class.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(f"PerSample.of needs a keras.Model; found {type(model).__name__}.")
        if not isinstance(model, PerSample):
            cls = type(model)
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            model.__class__ = type(cls.__name__, (PerSample, cls), names)
            model.compiled = False
        return model

    def compile(self, *args: Any, transforms: Iterable[Any] = (), ledger: Ledger | None = None, **kwargs: Any) -> None:
        """As `keras.Model.compile`, with transforms as in `sw.Step` and a ledger that has a directory."""
        _check_class(type(self))
        refuse_privacy(kwargs.pop("privacy", None), "Keras' fit")
        settings = Settings(transforms, ledger)
        super().compile(*args, **kwargs)
        _refuse_jit(self)
        self._per_sample = settings

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        settings = self._checked_settings()
        ranks = collectives.size()
        if ranks > 1:
            raise DistributedError(
                "fit must run in a single process, because Keras does not average gradients over ranks with the torch "
                f"backend; found {ranks} ranks. Use DistributedDataParallel(model) and sw.backward in your own loop, "
                "or sw.Step."
            )
        arguments = inspect.signature(super().fit).bind(*args, **kwargs).arguments
        arguments["callbacks"] = settings.with_epochs(arguments.get("callbacks"))
        if settings.ledger is not None:
            arguments["x"] = with_row_numbers(arguments.get("x"), settings.adapter.id_key)
        with settings.adapter.training():
            return super().fit(**arguments)

    def train_step(self, data: Any) -> Any:
        """The steps of Keras's own `train_step` for the torch backend, with another backward pass."""
        settings = self._checked_settings()
        adapter = settings.adapter
        adapter.take_passes()  # of an update that was not made because of an error
        model: Any = self
        data, ids, columns = self._splitter().split(data)
        settings.check_ids(ids)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        statistics = MovingStatistics(model)
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        if adapter.per_sample:
            statistics.refuse_updates(adapter)
        model.zero_grad()
        with settings.separate_losses() as additional:
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        samples = next(v for v in tree.flatten(x) if v is not None).shape[0]
        model._loss_tracker.update_state(loss, sample_weight=samples)
        if model.trainable_weights:
            batch = {"x": x, "y": y, "sample_weight": sample_weight, **columns, adapter.id_key: ids}
            run_backward(adapter, model, loss, additional, y, y_pred, sample_weight, batch, settings.epoch)
            variables = model.trainable_weights[:]
            gradients = [v.value.grad for v in variables]
            update = next_update(model.optimizer, gradients)
            with torch.no_grad():
                model.optimizer.apply(gradients, variables)
            adapter.record(adapter.take_passes(), update.index, skipped=update.skipped)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def test_step(self, data: Any) -> Any:
        return super().test_step(self._splitter().split(data).data)

    def predict_step(self, data: Any) -> Any:
        return super().predict_step(self._splitter().split(data).data)

    def _splitter(self) -> BatchSplitter:
        return BatchSplitter(self, None if self._per_sample is None else self._per_sample.ledger)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Called by Keras with the first batch, to build the model and the compiled loss."""
        if iterator is not None:
            iterator = self._splitter().epoch(iterator)
        if data_batch is not None:
            data_batch = self._splitter().split(data_batch).data
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        """Called by Keras with each loss of `add_loss` and of regularizers."""
        total = super()._aggregate_additional_loss(loss)
        settings = self._per_sample
        return total if settings is None or settings.additional is None else settings.additional.replace(total)

    def _checked_settings(self) -> Settings:
        if self._per_sample is None:
            raise RuntimeError(
                "the model must be compiled as PerSample before it is trained; found no transforms and ledger, which "
                "are not saved with a model. Call model.compile(optimizer, loss, transforms=..., ledger=...)."
            )
        _refuse_jit(self)
        return self._per_sample


def _check_class(cls: type) -> None:
    if keras.backend.backend() != "torch":
        raise RuntimeError(
            f"PerSample needs the torch backend of Keras; found {keras.backend.backend()}. Set KERAS_BACKEND=torch "
            "before keras is imported, or use samplewise.integrations.keras.gradients."
        )
    if cls.train_step is not PerSample.train_step:  # type: ignore[attr-defined]
        raise TypeError(
            f"PerSample must define train_step; found that {cls.__name__} overrides it. Override compute_loss instead, "
            "or call sw.backward in your train_step, without PerSample."
        )


def _refuse_jit(model: Any) -> None:
    if model.jit_compile:
        raise ValueError(
            "jit_compile must be False, because per-sample gradients are read from the autograd graph, which compiled "
            "code does not have; found True. Leave it out."
        )


# --- ids in the batches -----------------------------------------------------------------------------------------------


def with_row_numbers(x: Any, key: Hashable) -> Any:
    """x with the row numbers of arrays; anything else, and a dict that has ids, is returned unchanged."""
    has_ids = isinstance(x, dict) and key in x
    if x is None or has_ids or not can_convert_arrays(x):
        return x
    return {ARRAYS: x, ROWS: np.arange(len(tree.flatten(x)[0]))}


class SplitBatch(NamedTuple):
    """Batch of a training step."""

    data: Any  # (x, y, sample_weight) as Keras expects it
    ids: Any  # of its samples; None if there are none
    columns: dict[Hashable, Any]  # entries of a dict x, including those that the model does not get


class BatchSplitter:
    """Separates ids, and other columns of the ledger, from the inputs of a model."""

    def __init__(self, model: Any, ledger: Ledger | None):
        self._id = None if ledger is None else ledger._keys["id"]
        recorded = set() if ledger is None else set(ledger._keys.values())
        structure = getattr(model, "input", None)  # of a functional model
        inputs = {tensor.name for tensor in getattr(model, "inputs", None) or ()}
        inputs |= set(structure) if isinstance(structure, dict) else set()
        # If the inputs of the model are not known, all but the ids are inputs.
        self._hidden = recorded - inputs if inputs else recorded & {self._id}

    def split(self, data: Any) -> SplitBatch:
        if isinstance(data, IndexedItem):
            return SplitBatch(data.without_id(), data.id, {})
        x, *targets = data if isinstance(data, (tuple, list)) else (data,)  # y and sample_weight
        ids = None
        if isinstance(x, dict) and ROWS in x:
            ids = x[ROWS]
            x = x[ARRAYS]
        columns = dict(x) if isinstance(x, dict) else {}
        x, _ = split_entries(x, self._hidden)
        return SplitBatch((x, *targets), columns.get(self._id) if ids is None else ids, columns)

    def epoch(self, batches: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield the elements of a Keras epoch iterator without ids."""
        for begin, end, data in batches:
            yield begin, end, [self.split(batch).data for batch in data]
