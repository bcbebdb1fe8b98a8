"""Per-sample gradients of Keras models: torch backend in this process, all backends in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from keras_double import Linear, Squared, double, keras

import samplewise as sw
from samplewise.integrations.keras import gradients, input_gradients

layers = keras.layers

SCRIPT = Path(__file__).parent / "keras_backends.py"


@pytest.fixture(autouse=True)
def _double():
    with double():
        yield


def _model():
    return keras.Sequential([keras.Input((4, 3)), Linear(5, torch.tanh), Linear(2)])


def squared(true, predicted):
    return Squared().call(true, predicted)


def _data(samples=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 4, 3)), rng.normal(size=(samples, 4, 2))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_gradients_are_those_of_batches_of_one_sample(reduction):
    model, (x, y) = _model(), _data()
    loss = Squared(reduction=reduction)
    g = gradients(model, x, y, loss)
    assert isinstance(g, sw.Gradients)
    assert g.names == [v.path for v in model.trainable_variables]
    for i in range(len(x)):
        alone = loss(y[i : i + 1], model(x[i : i + 1], training=False))
        rows = torch.autograd.grad(alone, [v.value for v in model.trainable_variables])
        assert g.losses[i].item() == pytest.approx(alone.item(), rel=1e-6)  # Keras returns its mean in float32
        torch.testing.assert_close(list(g[i].values()), list(rows), rtol=1e-12, atol=1e-12)


def test_a_loss_without_reduction_is_averaged_over_further_dimensions():
    model, (x, y) = _model(), _data()
    g = gradients(model, x, y, Squared(reduction=None))
    expected = squared(torch.tensor(y), model(x, training=False)).mean(1)
    torch.testing.assert_close(g.losses, expected.detach(), rtol=1e-12, atol=1e-12)


def test_targets_without_the_last_dimension_are_not_broadcast():
    model = keras.Sequential([keras.Input((3,)), Linear(1)])
    x, y = np.random.default_rng(0).normal(size=(4, 3)), np.arange(4.0)
    g = gradients(model, x, y, squared)
    expected = (model(x)[:, 0] - torch.arange(4.0, dtype=torch.float64)).square().detach()
    torch.testing.assert_close(g.losses, expected, rtol=1e-12, atol=1e-12)


def test_masked_steps_are_left_out_of_the_mean_of_each_sample():
    tokens = np.array([[1, 2, 3, 4], [1, 2, 0, 0]])
    y = np.array([[0, 1, 2, 0], [1, 1, 0, 0]])
    model = keras.Sequential([layers.Embedding(5, 3, mask_zero=True), layers.Dense(3, activation="softmax")])
    g = gradients(model, tokens, y, "sparse_categorical_crossentropy")
    alone = [keras.losses.SparseCategoricalCrossentropy()(y[i : i + 1], model(tokens[i : i + 1])) for i in (0, 1)]
    assert g.losses.tolist() == pytest.approx([value.item() for value in alone], rel=1e-6)


def test_input_gradients_have_the_structure_of_x():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, Linear(1)(layers.Concatenate()([a, b])))
    rng = np.random.default_rng(0)
    x, y = {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=(4, 3))}, rng.normal(size=(4, 1))
    found = input_gradients(model, x, y, squared)
    leaves = {name: torch.tensor(v, requires_grad=True) for name, v in x.items()}
    (model(leaves) - torch.tensor(y)).square().sum().backward()
    assert sorted(found) == ["a", "b"]
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.grad, rtol=1e-12, atol=1e-12)


def test_a_loss_without_one_value_per_sample_is_refused():
    model, (x, y) = _model(), _data()
    with pytest.raises(sw.LossesError, match=r"one value per sample before its reduction, shape \(5, \.\.\.\).* \(\)"):
        gradients(model, x, y, lambda true, predicted: keras.ops.mean((true - predicted) ** 2))


def test_a_loss_that_combines_samples_is_refused():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    x = np.random.default_rng(0).normal(size=(4, 3))
    with pytest.raises(sw.SamplesInteractError, match="must not depend on other samples"):
        gradients(model, x, np.array([0, 1, 0, 1]), keras.losses.Circle()).norms()


def test_a_model_with_several_outputs_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
    with pytest.raises(sw.LossesError, match=r"must return one tensor .* found list"):
        gradients(model, np.ones((2, 3)), np.ones((2, 1)), "mse")


@pytest.mark.parametrize("loss", [squared, Squared(reduction="sum"), [Squared()]], ids=["function", "object", "list"])
def test_the_compiled_loss_is_the_default(loss):
    model, (x, y) = _model(), _data()
    model.compile("sgd", loss)
    given = loss[0] if isinstance(loss, list) else loss
    assert torch.equal(gradients(model, x, y).losses, gradients(model, x, y, given).losses)
    assert torch.equal(gradients(model, x, y).norms(), gradients(model, x, y, given).norms())
    assert torch.equal(input_gradients(model, x, y), input_gradients(model, x, y, given))
    doubled = gradients(model, x, y, lambda true, predicted: 2 * squared(true, predicted))  # not the compiled loss
    assert not torch.equal(doubled.losses, gradients(model, x, y).losses)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def test_a_compiled_loss_that_is_not_one_loss_is_refused():
    model, (x, y) = _model(), _data()
    for function in (gradients, input_gradients):
        with pytest.raises(sw.LossesError, match=r"need one Keras loss; found no loss, neither .* Pass a loss"):
            function(model, x, y)
    model.compile("sgd", ["mse", "mae"])
    with pytest.raises(sw.LossesError, match=r"need one Keras loss; found 2 losses in model.compile"):
        gradients(model, x, y)
    model.compile("sgd", "mse", loss_weights=0.5)
    with pytest.raises(sw.LossesError, match=r"need one Keras loss; found loss_weights in model.compile"):
        gradients(model, x, y)
    model = OwnLoss([keras.Input((4, 3)), Linear(2)])
    model.compile("sgd", "mse")
    with pytest.raises(sw.LossesError, match="need one Keras loss; found that OwnLoss overrides compute_loss"):
        gradients(model, x, y)


def test_inputs_and_targets_are_checked():
    model, (x, y) = _model(), _data()
    with pytest.raises(sw.BatchError, match="same number of rows, at least 1; found 4, 5"):
        gradients(model, x, y[:4], "mse")
    with pytest.raises(sw.BatchError, match="found y=None"):
        gradients(model, x, None, "mse")
    embedding = keras.Sequential([layers.Embedding(5, 3), layers.Dense(1)])
    with pytest.raises(sw.ParameterError, match="x must be floating-point to have a gradient; found int64"):
        input_gradients(embedding, np.ones((2, 4), "int64"), np.ones((2, 4, 1)), "mse")


def test_variables_must_have_different_paths():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = layers.Dense(2, name="same")
            self.two = layers.Dense(2, name="same")

        def call(self, x):
            return self.one(x) + self.two(x)

    with pytest.raises(sw.ParameterError, match=r"different paths; found .*same/bias, .*same/kernel more than once"):
        gradients(Twice(), np.ones((2, 2)), np.ones((2, 2)), "mse")
    frozen = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    frozen.trainable = False
    with pytest.raises(sw.ParameterError, match="must have trainable variables; found none"):
        gradients(frozen, np.ones((2, 2)), np.ones((2, 2)), "mse")


def test_a_missing_keras_gives_one_line():
    script = "import sys; sys.modules['keras'] = None; import samplewise.integrations.keras"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.stderr.splitlines()[-1] == (
        "ImportError: samplewise.integrations.keras needs keras: pip install 'samplewise[keras]'"
    )


@pytest.mark.slow
def test_the_three_backends_agree(tmp_path):
    for package in ("tensorflow", "jax"):  # in the environment of `make test-integrations`
        pytest.importorskip(package, exc_type=ImportError)
    results = {}
    for backend in ("torch", "tensorflow", "jax"):
        path = tmp_path / f"{backend}.npz"
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
        run = subprocess.run(
            [sys.executable, str(SCRIPT), str(path)], env=environment, capture_output=True, text=True, timeout=600
        )
        assert run.returncode == 0, run.stderr
        results[backend] = dict(np.load(path))
    expected = results.pop("torch")
    for backend, found in results.items():
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert np.abs(found[name] - values).max() <= 1e-6 * max(1, np.abs(values).max()), (backend, name)
