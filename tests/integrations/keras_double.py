"""Keras in float64: functions of keras.ops compute in float32 with the torch backend, so these use torch's own."""

import os
from contextlib import contextmanager

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch


@contextmanager
def double():
    """Context manager: variables, losses and data are float64, and random numbers start with seed 0."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


class Linear(keras.layers.Layer):
    """x @ kernel + bias, then an activation."""

    def __init__(self, units, activation=None, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.activation = activation or (lambda x: x)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), name="bias")

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)

    def call(self, x):
        if not isinstance(x, torch.Tensor):  # a symbolic tensor
            return keras.KerasTensor(self.compute_output_shape(x.shape), dtype=x.dtype)
        return self.activation(x @ self.kernel.value + self.bias.value)


class Squared(keras.losses.Loss):
    """Squared errors, summed over the last dimension."""

    def call(self, true, predicted):
        return (predicted - true).square().sum(-1)
