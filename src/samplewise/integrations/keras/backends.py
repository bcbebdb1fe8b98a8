"""Losses and gradients of single samples, vectorized by the means of the TensorFlow and JAX backends."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
from keras import ops, tree

from samplewise.integrations.keras.sample_losses import sample_losses

RowsFunction = Callable[[Any, Any], tuple[Any, list[Any]]]

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

    def one(sample: tuple[Any, Any]) -> tuple[Any, list[Any]]:
        x, y = tree.map_structure(lambda v: ops.expand_dims(v, 0), sample)
        wanted = tree.flatten(x) if inputs else [v.value for v in model().trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(wanted)
            value = sample_losses(loss, y, model()(x, training=False))[0]
        found = tape.gradient(value, wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        value = ops.cast(value, keras.config.floatx())
        # Gradients of embeddings are IndexedSlices.
        return value, [tf.convert_to_tensor(g)[0] if inputs else tf.convert_to_tensor(g) for g in found]

    def one_by_one(x: Any, y: Any) -> Any:
        wanted = tree.flatten(x) if inputs else model().trainable_variables
        return tf.map_fn(one, (x, y), fn_output_signature=(keras.config.floatx(), [v.dtype for v in wanted]))

    def vectorized(x: Any, y: Any) -> Any:
        return tf.vectorized_map(one, (x, y))

    functions = [tf.function(f, reduce_retracing=True) for f in (vectorized, one_by_one)]
    if any(isinstance(layer, keras.layers.RNN) for layer in model()._flatten_layers()):
        functions.pop(0)  # TensorFlow does not vectorize the loops of recurrent layers

    def rows(x: Any, y: Any) -> tuple[Any, list[Any]]:
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

    def value_and_grad(trainable: list[Any], others: list[Any], leaves: list[Any], y: Any, structure: Any) -> Any:
        if inputs:
            return jax.value_and_grad(lambda at: one(trainable + others, at, y, structure))(leaves)
        return jax.value_and_grad(lambda at: one(at + others, leaves, y, structure))(trainable)

    def rows(trainable: list[Any], others: list[Any], x: Any, y: Any) -> tuple[Any, list[Any]]:
        return jax.vmap(lambda leaves, y: value_and_grad(trainable, others, leaves, y, x))(tree.flatten(x), y)

    compiled = jax.jit(rows)

    def with_values(x: Any, y: Any) -> tuple[Any, list[Any]]:
        trainable = [v.value for v in model().trainable_variables]
        others = [v.value for v in model().non_trainable_variables]
        return compiled(trainable, others, x, y)

    return with_values
