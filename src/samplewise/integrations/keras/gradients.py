"""`gradients` and `input_gradients` of a Keras model, with the torch, TensorFlow and JAX backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import torch
from keras import ops, tree

from samplewise.core.microbatch import Auto, Microbatch, as_microbatch
from samplewise.core.text import listed
from samplewise.engine.deferred_checks import finite_losses
from samplewise.engine.gradients import Gradients
from samplewise.engine.gradients import gradients as torch_gradients
from samplewise.engine.inputs import input_gradients as torch_input_gradients
from samplewise.errors import BatchError, ParameterError, SamplesInteractError
from samplewise.integrations.keras.losses import compiled_loss, sample_losses


def gradients(
    model: Any, x: Any, y: Any, loss: Any = None, *, microbatch: Microbatch = "auto"
) -> Gradients | RowGradients:
    """Per-sample gradients of a Keras model's loss with respect to its trainable variables, named by their paths.

    With the torch backend, an `sw.Gradients`. With the TensorFlow and JAX backends, a `RowGradients` with the methods
    norms, dot, gram, sum, mean and full; memory and time are those of `tf.vectorized_map` and `jax.vmap`. Results are
    tensors of the backend.

    The model is called with training=False: no dropout, and BatchNorm with its moving statistics. Regularizers and
    `add_loss` are not included.

    x, y: arrays or tensors with one row per sample; x may be a list or dict of them
    loss: a Keras loss (object, class, name or function) of a single output; default: that of `model.compile`. The loss
        of a sample is the value for a batch of it alone: a mean over further dimensions, or their sum with
        reduction="sum"
    microbatch: number of samples whose rows are computed at a time, TensorFlow and JAX only. "auto" (default): as many
        as have rows of 1 GiB; `sw.auto(memory)`: of `memory` bytes; None: all
    """
    x, y = _tensors(x, y)
    loss = compiled_loss(model) if loss is None else loss
    if keras.backend.backend() == "torch":
        losses = sample_losses(loss, y, model(x, training=False))
        return torch_gradients(losses, {name: v.value for name, v in named_variables(model).items()})
    rows = SampleRows(model, x, y, loss, inputs=False, microbatch=as_microbatch(microbatch))
    return RowGradients(list(named_variables(model)), rows)


def input_gradients(model: Any, x: Any, y: Any, loss: Any = None, *, microbatch: Microbatch = "auto") -> Any:
    """Gradient of each sample's loss with respect to its own input, d loss_i / d x_i, in the structure of x.

    Arguments as in `gradients`; x must be floating-point. Results are tensors of the backend.
    """
    x, y = _tensors(x, y)
    loss = compiled_loss(model) if loss is None else loss
    for v in tree.flatten(x):
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype)):
            raise ParameterError(
                f"x must be floating-point to have a gradient; found {keras.backend.standardize_dtype(v.dtype)}. "
                "Differentiate with respect to the output of the embedding: make it the input of a model."
            )
    if keras.backend.backend() == "torch":
        x = tree.map_structure(lambda v: v.detach().requires_grad_(), x)
        losses = sample_losses(loss, y, model(x, training=False))
        return tree.map_structure(lambda v: torch_input_gradients(losses, v), x)
    rows = SampleRows(model, x, y, loss, inputs=True, microbatch=as_microbatch(microbatch))
    chunks = [gradients_of_chunk for _, gradients_of_chunk in rows.chunks()]
    return tree.pack_sequence_as(x, [ops.concatenate(parts) for parts in zip(*chunks, strict=True)])


def named_variables(model: Any) -> dict[str, Any]:
    """Trainable variables of a built model by their paths."""
    variables = {v.path: v for v in model.trainable_variables}
    if len(variables) < len(model.trainable_variables):
        paths = [v.path for v in model.trainable_variables]
        repeated = sorted({path for path in paths if paths.count(path) > 1})
        raise ParameterError(
            f"trainable variables must have different paths; found {listed(repeated)} more than once. Give the layers "
            "different names."
        )
    if not variables:
        raise ParameterError("the model must have trainable variables; found none. Set layer.trainable = True.")
    return variables


def _tensors(x: Any, y: Any) -> tuple[Any, Any]:
    """x and y as tensors of the backend; floating-point arrays get the dtype keras.config.floatx(), as in `fit`."""
    if x is None or y is None:
        raise BatchError(f"x and y must be arrays with one row per sample; found {'x' if x is None else 'y'}=None.")
    x, y = tree.map_structure(_tensor, (x, y))
    rows = sorted({int(v.shape[0]) if len(v.shape) else 0 for v in tree.flatten((x, y))})
    if len(rows) != 1 or rows[0] == 0:
        raise BatchError(f"x and y must have the same number of rows, at least 1; found {listed(map(str, rows))}.")
    return x, y


def _tensor(values: Any) -> Any:
    tensor = ops.convert_to_tensor(values)
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
    return ops.cast(tensor, keras.config.floatx()) if is_float else tensor


# --- rows with TensorFlow and JAX -------------------------------------------------------------------------------------


MEMORY = 2**30  # bytes of rows that are computed at a time
HALF = ("float16", "bfloat16")  # rows of these dtypes are cast to float32

Rows = list[Any]  # one tensor (n, *shape) for each variable
RowsFunction = Callable[[Any, Any], tuple[Any, Rows]]


class SampleRows:
    """Rows of all samples of a batch, `microbatch` samples at a time. A single chunk is computed once and kept."""

    def __init__(self, model: Any, x: Any, y: Any, loss: Any, inputs: bool, microbatch: int | Auto | None):
        self._x = x
        self._y = y
        self._rows: RowsFunction = rows_function(model, loss, inputs)
        self.losses = sample_losses(loss, y, model(x, training=False))
        finite_losses(torch.tensor(ops.convert_to_numpy(self.losses)))
        self.samples = int(self.losses.shape[0])
        variables = tree.flatten(x) if inputs else model.trainable_variables
        self.shapes = [tuple(v.shape)[1:] if inputs else tuple(v.shape) for v in variables]
        if isinstance(microbatch, Auto):
            row = sum(map(_bytes, variables)) // (self.samples if inputs else 1)
            microbatch = max(1, (microbatch.memory or MEMORY) // max(1, row))
        self._chunk = microbatch or self.samples
        self._precision = keras.dtype_policies.get(model.dtype_policy).compute_dtype
        self._single_chunk: Rows | None = None  # rows of all samples, once they are computed

    def chunks(self) -> Iterator[tuple[slice, Rows]]:
        """Yield the samples of each chunk and their rows."""
        for start in range(0, self.samples, self._chunk):
            samples = slice(start, min(start + self._chunk, self.samples))
            if self._single_chunk is not None:
                yield samples, self._single_chunk
                return
            x, y = tree.map_structure(lambda v, samples=samples: v[samples], (self._x, self._y))
            losses, rows = self._rows(x, y)
            # Compare the losses of samples computed one by one with those of the batch.
            single, batched = (torch.tensor(ops.convert_to_numpy(v)).double() for v in (losses, self.losses[samples]))
            difference = (single - batched).abs().max()
            tolerance = torch.finfo(getattr(torch, self._precision)).eps ** 0.5
            if difference > tolerance * batched.abs().max().clamp(min=1):
                raise SamplesInteractError(
                    "the loss of a sample must not depend on the other samples of the batch, and variables must not "
                    f"change before the gradients are computed; found losses that differ by {difference:.3g} if "
                    "each sample is alone in a batch. Remove layers and losses that combine samples."
                )
            rows = [ops.cast(r, "float32") if r.dtype in HALF else r for r in rows]
            if self._chunk >= self.samples:
                self._single_chunk = rows
            yield samples, rows


def _bytes(v: Any) -> int:
    size = 4 if v.dtype in HALF else keras.backend.standardize_dtype(v.dtype).endswith("64") * 4 + 4
    return int(size * torch.Size(v.shape).numel())


class RowGradients:
    """Per-sample gradients of a batch. Returned by `gradients` with the TensorFlow and JAX backends.

    Methods have the names and shapes of `sw.Gradients`, and return tensors of the backend. Each method computes rows,
    the gradients of all samples in full, in chunks that fit into the memory budget, by the means of the backend: memory
    and time are those of the rows. If all rows fit into the budget they are computed once and kept.

    names     paths of the trainable variables
    losses    (B,) losses of the samples
    """

    def __init__(self, names: list[str], rows: SampleRows):
        self.names = names
        self.losses = rows.losses
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.samples

    def __repr__(self) -> str:
        return f"RowGradients({len(self)} samples, {len(self.names)} variables)"

    def norms(self) -> Any:
        """L2 norm of each sample's gradient, (B,)."""
        squares = self._per_sample(lambda rows: sum(ops.sum(ops.square(_flat(r)), axis=1) for r in rows))
        return ops.sqrt(squares)

    def dot(self, direction: Mapping[str, Any]) -> Any:
        """Inner product of each sample's gradient with a direction (name -> tensor of the variable's shape), (B,)."""
        directions = self._checked_direction(direction)
        return self._per_sample(
            lambda rows: sum(
                ops.matmul(_flat(r), ops.cast(ops.reshape(d, (-1,)), r.dtype))
                for r, d in zip(rows, directions, strict=True)
            )
        )

    def gram(self, other: RowGradients | None = None) -> Any:
        """Inner products of the gradients of all pairs of samples, (B, B); with another RowGradients, (B, B2).

        If the rows do not fit into the memory budget, those of `other` are computed again for each chunk.
        """
        if not (other is None or (isinstance(other, RowGradients) and other.names == self.names)):
            raise ParameterError(
                "gram needs other gradients of the same variables; found "
                f"{'other variables' if isinstance(other, RowGradients) else type(other).__name__}. Pass the same "
                "model to both calls of gradients."
            )
        columns = self._rows if other is None else other._rows

        def block(rows: Rows) -> Any:
            blocks = [
                sum(ops.matmul(_flat(r), ops.transpose(_flat(t))) for r, t in zip(rows, column_rows, strict=True))
                for _, column_rows in columns.chunks()
            ]
            return ops.concatenate(blocks, axis=1)

        return self._per_sample(block)

    def sum(self, weights: Any = None) -> dict[str, Any]:
        """Weighted sum of per-sample gradients, name -> sum_i w_i g_i. weights: (B,) or a number; default ones."""
        w = ops.ones_like(self.losses) if weights is None else ops.convert_to_tensor(weights)
        if tuple(w.shape) not in ((), (len(self),)):
            raise ParameterError(
                f"weights must be a number or have one number per sample, ({len(self)},); found shape {tuple(w.shape)}."
            )
        w = ops.broadcast_to(ops.cast(w, self.losses.dtype), (len(self),))
        totals: Rows = []
        for samples, rows in self._rows.chunks():
            parts = [ops.tensordot(ops.cast(w[samples], r.dtype), r, 1) for r in rows]
            totals = [t + p for t, p in zip(totals, parts, strict=True)] if totals else parts
        return dict(zip(self.names, totals, strict=True))

    def mean(self) -> dict[str, Any]:
        """Mean of per-sample gradients, name -> sum_i g_i / B."""
        return {name: total / len(self) for name, total in self.sum().items()}

    def full(self) -> dict[str, Any]:
        """Gradients of all samples, name -> (B, *shape). All rows are in memory at once."""
        chunks = [rows for _, rows in self._rows.chunks()]
        return {name: ops.concatenate(rows) for name, *rows in zip(self.names, *chunks, strict=True)}

    def _per_sample(self, quantity: Callable[[Rows], Any]) -> Any:
        return ops.concatenate([quantity(rows) for _, rows in self._rows.chunks()])

    def _checked_direction(self, direction: Mapping[str, Any]) -> list[Any]:
        shapes = dict(zip(self.names, self._rows.shapes, strict=True))
        if not isinstance(direction, Mapping) or direction.keys() != shapes.keys():
            raise ParameterError(
                "direction must be a dict with a tensor for each name in g.names, like g.sum(); found "
                f"{sorted(direction) if isinstance(direction, Mapping) else type(direction).__name__}."
            )
        for name, shape in shapes.items():
            if tuple(direction[name].shape) != shape:
                raise ParameterError(
                    f"direction[{name!r}] must have the variable's shape {shape}; found {tuple(direction[name].shape)}."
                )
        return [direction[name] for name in self.names]


def _flat(rows: Any) -> Any:
    return ops.reshape(rows, (rows.shape[0], -1))


# --- losses and gradients of single samples, vectorized by the means of the backends ---------------------------------


_TRACED: WeakKeyDictionary[Any, dict[bool, tuple[Any, RowsFunction]]] = WeakKeyDictionary()


def rows_function(model: Any, loss: Any, inputs: bool) -> RowsFunction:
    """Function (x, y) -> (losses, gradients) of the active backend: losses (n,), and a list with one tensor
    (n, *shape) for each trainable variable, or, if `inputs` is true, for each tensor of x.

    The last one of each model is kept, so that the next batch is not traced again.
    """
    functions = {"tensorflow": _tensorflow, "jax": _jax}
    name = keras.backend.backend()
    if name not in functions:
        raise NotImplementedError(
            f"the Keras backend must be torch, tensorflow or jax; found {name}. Set the environment variable "
            "KERAS_BACKEND before keras is imported."
        )
    traced = _TRACED.setdefault(model, {})
    key = loss, [id(v) for v in model.trainable_variables]
    if inputs not in traced or traced[inputs][0] != key:
        traced[inputs] = key, functions[name](ref(model), loss, inputs)
    return traced[inputs][1]


def _tensorflow(model: Callable[[], Any], loss: Any, inputs: bool) -> RowsFunction:
    tf = import_module("tensorflow")

    def one(sample: tuple[Any, Any]) -> tuple[Any, Rows]:
        x, y = tree.map_structure(lambda v: ops.expand_dims(v, 0), sample)
        tensors = tree.flatten(x) if inputs else [v.value for v in model().trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tensors)
            value = sample_losses(loss, y, model()(x, training=False))[0]
        gradients = tape.gradient(value, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        value = ops.cast(value, keras.config.floatx())
        # Gradients of embeddings are IndexedSlices.
        return value, [tf.convert_to_tensor(g)[0] if inputs else tf.convert_to_tensor(g) for g in gradients]

    def one_by_one(x: Any, y: Any) -> Any:
        tensors = tree.flatten(x) if inputs else model().trainable_variables
        return tf.map_fn(one, (x, y), fn_output_signature=(keras.config.floatx(), [v.dtype for v in tensors]))

    def vectorized(x: Any, y: Any) -> Any:
        return tf.vectorized_map(one, (x, y))

    functions = [tf.function(f, reduce_retracing=True) for f in (vectorized, one_by_one)]
    if any(isinstance(layer, keras.layers.RNN) for layer in model()._flatten_layers()):
        functions.pop(0)  # TensorFlow does not vectorize the loops of recurrent layers

    def rows(x: Any, y: Any) -> tuple[Any, Rows]:
        if len(functions) == 2:
            try:
                return functions[0](x, y)
            except (tf.errors.OpError, TypeError, ValueError, NotImplementedError):
                functions.pop(0)  # raises the same error if it is one of the model or the loss
        return functions[0](x, y)

    return rows


def _jax(model: Callable[[], Any], loss: Any, inputs: bool) -> RowsFunction:
    jax = import_module("jax")

    def one(values: list[Any], leaves: list[Any], y: Any, structure: Any) -> Any:
        x, y = tree.map_structure(lambda v: v[None], (tree.pack_sequence_as(structure, leaves), y))
        variables = [*model().trainable_variables, *model().non_trainable_variables]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return sample_losses(loss, y, model()(x, training=False))[0]

    def value_and_grad(trainable: list[Any], frozen: list[Any], leaves: list[Any], y: Any, structure: Any) -> Any:
        if inputs:
            return jax.value_and_grad(lambda at: one(trainable + frozen, at, y, structure))(leaves)
        return jax.value_and_grad(lambda at: one(at + frozen, leaves, y, structure))(trainable)

    def rows(trainable: list[Any], frozen: list[Any], x: Any, y: Any) -> tuple[Any, Rows]:
        return jax.vmap(lambda leaves, y: value_and_grad(trainable, frozen, leaves, y, x))(tree.flatten(x), y)

    compiled = jax.jit(rows)

    def with_values(x: Any, y: Any) -> tuple[Any, Rows]:
        trainable = [v.value for v in model().trainable_variables]
        frozen = [v.value for v in model().non_trainable_variables]
        return compiled(trainable, frozen, x, y)

    return with_values
