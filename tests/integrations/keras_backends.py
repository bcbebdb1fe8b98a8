"""Quantities of several models under the backend of KERAS_BACKEND, written to the .npz file of the first argument."""

import sys

import keras
import numpy as np
from keras import layers

import samplewise as sw
from samplewise.integrations.keras import PerSample, gradients, input_gradients

BACKEND = keras.backend.backend()


class Product(keras.Model):
    """Two inputs in a dict, and no argument `training`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x["a"]) * x["b"]


def cases():
    """Yield (name, model, x, y, loss)."""
    rng = np.random.default_rng(0)
    images, classes = rng.normal(size=(6, 8, 8, 1)), rng.integers(0, 3, 6)
    cnn = [layers.Conv2D(4, 3), layers.LayerNormalization(), layers.BatchNormalization(), layers.ReLU()]
    head = [layers.Flatten(), layers.Dropout(0.5), layers.Dense(3)]
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    yield "cnn", keras.Sequential([keras.Input((8, 8, 1)), *cnn, *head]), images, classes, logits
    tokens = rng.integers(1, 9, (5, 7))
    tokens[0, 4:] = tokens[1, 2:] = 0
    recurrent = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(5, return_sequences=True)]
    tagger = keras.Sequential([*recurrent, layers.Dense(3, activation="softmax")])
    yield "lstm", tagger, tokens, rng.integers(0, 3, (5, 7)), "sparse_categorical_crossentropy"
    pair = {"a": rng.normal(size=(6, 3)), "b": rng.normal(size=(6, 1))}
    yield "product", Product(), pair, rng.normal(size=(6, 2)), keras.losses.MeanSquaredError(reduction="sum")


def refused(error, function):
    try:
        function()
    except error as found:
        return str(found)
    raise AssertionError(f"{error.__name__} must be raised")


def check_refusals(model, x, y, loss):
    """Errors of the backends without an autograd graph."""
    g = gradients(model, x, y, loss)
    assert "must be a dict with a tensor for each name" in refused(sw.ParameterError, lambda: g.dot([1.0]))
    wrong = {**g.sum(), g.names[0]: keras.ops.ones((2, 2))}
    assert "must have the variable's shape" in refused(sw.ParameterError, lambda: g.dot(wrong))
    assert "one number per sample, (6,); found shape (5,)" in refused(sw.ParameterError, lambda: g.sum(np.ones(5)))
    assert "found int" in refused(sw.ParameterError, lambda: g.gram(3))
    assert "microbatch must be a positive" in refused(ValueError, lambda: gradients(model, x, y, loss, microbatch=0))
    small = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    labels = np.array([0, 1, 0, 1])
    mixed = gradients(small, np.eye(4, 3), labels, keras.losses.Circle())
    assert "must not depend on the other samples" in refused(sw.SamplesInteractError, mixed.norms)
    infinite = np.full((4, 3), np.inf)
    assert "found" in refused(sw.NonFiniteLossError, lambda: gradients(small, infinite, np.ones((4, 2)), "mse"))
    message = refused(RuntimeError, lambda: PerSample.of(small).compile("sgd", "mse"))
    assert message.startswith(f"PerSample needs the torch backend of Keras; found {BACKEND}.")
    for function in (lambda: sw.gradients(g.losses, model), lambda: sw.Step(model, sw.sgd(0.1), "mse")):
        assert "found a Keras model (Sequential) of another backend" in refused(TypeError, function)


def main(path):
    numbers = keras.ops.convert_to_numpy
    results = {}
    for name, model, x, y, loss in cases():
        model(keras.tree.map_structure(lambda v: v[:1], x))
        rng = np.random.default_rng(1)
        for v in model.trainable_variables:
            v.assign(0.3 * rng.normal(size=v.shape))
        for chunk, microbatch in {"all": "auto", "some": sw.auto(4500), "two": 2}.items():
            g = gradients(model, x, y, loss, microbatch=microbatch)
            weights = keras.ops.linspace(0.0, 1.0, len(g))
            kept = {"losses": g.losses, "norms": g.norms(), "gram": g.gram(), "dot": g.dot(g.mean())}
            for what, rows in (("full", g.full()), ("sum", g.sum(weights)), ("number", g.sum(2.0))):
                kept |= {f"{what}{k}": v for k, v in enumerate(rows.values())}
            results |= {f"{name}/{chunk}/{what}": numbers(v) for what, v in kept.items()}
        if name != "lstm":
            found = keras.tree.flatten(input_gradients(model, x, y, loss, microbatch=sw.auto(600)))
            results |= {f"{name}/x{k}": numbers(v) for k, v in enumerate(found)}
        model.compile("sgd", loss)
        results[f"{name}/compiled"] = numbers(gradients(model, x, y).losses) - results[f"{name}/all/losses"]
        if name == "cnn" and BACKEND != "torch":
            check_refusals(model, x, y, loss)
    np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1])
