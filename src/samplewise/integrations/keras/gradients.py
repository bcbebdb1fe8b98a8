"""`gradients` and `input_gradients` of a Keras model, with the torch, TensorFlow and JAX backends."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops, tree

from samplewise.core.microbatch import Microbatch, as_microbatch
from samplewise.core.text import listed
from samplewise.engine.gradients import Gradients
from samplewise.engine.gradients import gradients as torch_gradients
from samplewise.engine.inputs import input_gradients as torch_input_gradients
from samplewise.errors import BatchError, ParameterError
from samplewise.integrations.keras.losses import compiled_loss, sample_losses
from samplewise.integrations.keras.row_gradients import RowGradients, SampleRows


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
