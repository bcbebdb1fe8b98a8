"""`fit` of Keras models with PerSample: bit-identical recording, clipping against a plain loop, ids, refusals."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from keras_double import Linear, Squared, double, keras
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import LedgerError
from samplewise.integrations.keras import PerSample, gradients

layers = keras.layers
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _data(samples=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 5)).astype("float32"), rng.integers(0, 3, samples)


def _network(**options):
    """Classifier with dropout, and with a regularizer if `options` has one."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, activation="relu", **options), layers.Dropout(0.3), layers.Dense(3)]
    )


def _rows(directory):
    return sw.read_ledger(directory).to_pydict()


def _same(model, other):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


# --------------------------------------------------------------------------------------------------------- recording


@pytest.mark.parametrize("as_list", [True, False], ids=["list", "CallbackList"])
def test_norms_are_logged_once_per_epoch(tmp_path, as_list):
    read = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            read.append(logs["samplewise/norm_p95"])

    x, y = _data(22)
    model = PerSample.of(_network())
    model.compile("sgd", LOGITS, transforms=[sw.clip(1.0)], ledger=sw.Ledger(tmp_path))
    callbacks = [Reader()]
    if not as_list:
        callbacks = keras.callbacks.CallbackList([Reader(), keras.callbacks.History()], model=model)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=2, callbacks=callbacks)
    logs = model.history.history if history is None else history.history
    rows = {name: np.array(column).reshape(2, 22) for name, column in _rows(tmp_path).items() if name != "id"}
    ids = np.array(_rows(tmp_path)["id"]).reshape(2, 22)
    for epoch in range(2):
        norms = rows["norm"][epoch]
        assert logs["samplewise/norm_median"][epoch] == pytest.approx(np.median(norms), rel=1e-6)
        assert logs["samplewise/norm_p95"][epoch] == pytest.approx(np.quantile(norms, 0.95), rel=1e-6)
        assert logs["samplewise/clipped"][epoch] == pytest.approx((rows["weight"][epoch] < 1).mean())
        assert logs["samplewise/largest_id"][epoch] == ids[epoch, norms.argmax()]
    assert read == logs["samplewise/norm_p95"]


class Recurrent(keras.Model):
    """Weights that are used several times, an `add_loss`, and regularizers of weights and activations."""

    def __init__(self):
        super().__init__()
        self.lstm = layers.LSTM(4, recurrent_regularizer="l2", dropout=0.2)
        self.out = layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l1")

    def call(self, x, training=False):
        hidden = self.lstm(x[..., None], training=training)
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        return self.out(hidden)


MODELS = {
    "sequential": _network,
    "regularized": lambda: _network(kernel_regularizer="l2", activity_regularizer="l1"),
    "recurrent": lambda: (keras.utils.set_random_seed(0), Recurrent())[1],
}


@pytest.mark.parametrize("name", ["regularized", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS)])
@pytest.mark.parametrize("norms", [True, False])
def test_recording_leaves_training_bit_identical(name, norms, tmp_path):
    x, y = _data(22)
    options = dict(batch_size=4, epochs=2, verbose=0, validation_split=0.2, class_weight={0: 2.0})
    plain = MODELS[name]()
    plain.compile(keras.optimizers.Adam(0.01), LOGITS, metrics=["accuracy"])
    history = plain.fit(x, y, **options).history
    recorded = PerSample.of(MODELS[name]())
    recorded.compile(keras.optimizers.Adam(0.01), LOGITS, metrics=["accuracy"], ledger=sw.Ledger(tmp_path, norms=norms))
    logs = recorded.fit(x, y, **options).history
    assert {name: logs[name] for name in history} == history
    assert ("samplewise/norm_median" in logs) == norms
    assert _same(plain, recorded)
    rows = _rows(tmp_path)
    assert sorted(rows["id"]) == sorted([*range(17)] * 2)
    assert np.isfinite(rows["norm"]).all() == norms
    assert np.isfinite(rows["loss"]).all()


def test_rows_are_those_of_the_model_before_each_update(tmp_path):
    x, y = _data(10)
    model = PerSample.of(keras.Sequential([keras.Input((5,)), layers.Dense(3, activation="softmax")]))
    model.compile("sgd", "sparse_categorical_crossentropy", ledger=sw.Ledger(tmp_path), transforms=[sw.clip(0.5)])
    before = model(x).detach()
    model.fit(x, y[:, None], batch_size=4, epochs=3, verbose=0)
    rows = _rows(tmp_path)
    assert rows["epoch"] == [0] * 10 + [1] * 10 + [2] * 10
    assert rows["update"][:11] == [0] * 4 + [1] * 4 + [2] * 2 + [3]
    first = rows["id"][:4]
    probability = before[first, y[first]]
    assert rows["loss"][:4] == pytest.approx((-probability.log()).tolist(), rel=1e-5)
    assert rows["label"][:4] == y[first].tolist()
    assert rows["prediction"][:4] == before[first].argmax(1).tolist()
    others = before[first].scatter(1, torch.tensor(y[first])[:, None], 0).amax(1)
    assert rows["margin"][:4] == pytest.approx((probability / others).log().tolist(), rel=1e-4)
    # The gradient of softmax regression is (p - onehot) (x, 1)^T.
    error = (before[first] - torch.nn.functional.one_hot(torch.tensor(y[first]), 3)).norm(dim=1)
    norms = error * (torch.tensor(x[first]).square().sum(1) + 1).sqrt()
    assert rows["norm"][:4] == pytest.approx(norms.tolist(), rel=1e-5)
    assert rows["weight"][:4] == pytest.approx((0.5 / norms).clamp(max=1).tolist(), rel=1e-5)
    assert len(sw.suspects(sw.read_ledger(tmp_path)).top(3)) == 3


def test_labels_as_one_hot_rows_are_recorded(tmp_path):
    x, y = _data(8)
    model = PerSample.of(keras.Sequential([keras.Input((5,)), layers.Dense(3)]))
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True), ledger=sw.Ledger(tmp_path))
    model.fit(x, np.eye(3)[y], batch_size=8, verbose=0)
    rows = _rows(tmp_path)
    assert rows["label"] == y[rows["id"]].tolist()


# ---------------------------------------------------------------------------------------------------------- clipping


def _double_network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((5,)), Linear(6, torch.tanh), Linear(2)])


def _loop(model, loss, x, y, weights, batch_size, bound, rate, divide=True):
    """Clipped gradient descent, one sample at a time, in place. Returns the norms."""
    parameters = [v.value for v in model.trainable_variables]
    norms = []
    for start in range(0, len(x), batch_size):
        batch = range(start, min(start + batch_size, len(x)))
        sums = [torch.zeros_like(p) for p in parameters]
        for i in batch:
            value = loss.call(torch.tensor(y[i : i + 1]), model(x[i : i + 1])).mean() * weights[i]
            gradient = torch.autograd.grad(value, parameters)
            norms.append(torch.stack([g.norm() for g in gradient]).norm().item())
            for total, g in zip(sums, gradient, strict=True):
                total += g * min(1, bound / norms[-1])
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                p -= rate * total / (len(batch) if divide else 1)
    return norms


def _regression(samples=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 5)), rng.normal(size=(samples, 2)), rng.uniform(0.5, 2, samples)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_a_clipped_fit_equals_a_loop_over_single_samples(reduction, tmp_path):
    x, y, weights = _regression()
    with double():
        loss = Squared(reduction=reduction)
        expected = _double_network()
        norms = _loop(expected, loss, x, y, weights, 8, 8.0, 0.01, divide=reduction != "sum")  # batches of 8, 8 and 4
        model = PerSample.of(_double_network())
        model.compile(keras.optimizers.SGD(0.01), loss, transforms=[sw.clip(8.0)], ledger=sw.Ledger(tmp_path))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, sample_weight=weights)
        for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    rows = _rows(tmp_path)
    assert rows["norm"] == pytest.approx(norms, rel=1e-5)
    assert 0 < sum(w < 1 for w in rows["weight"]) < 20


def test_a_clipped_fit_in_float32_equals_a_loop_over_single_samples():
    x, y, _ = _regression()
    keras.utils.set_random_seed(0)
    build = [keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(2)]
    model = keras.Sequential(build)
    expected = keras.models.clone_model(model)
    expected.set_weights(model.get_weights())
    start = model.get_weights()
    x, y = x.astype("float32"), y.astype("float32")
    _loop(expected, keras.losses.MeanSquaredError(), x, y, np.ones(20), 8, 0.5, 0.1)
    PerSample.of(model).compile(keras.optimizers.SGD(0.1), "mse", transforms=[sw.clip(0.5)])
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    found, wanted = (np.concatenate([w.ravel() for w in m.get_weights()]) for m in (model, expected))
    moved = wanted - np.concatenate([w.ravel() for w in start])
    assert np.linalg.norm(found - wanted) <= 3e-6 * np.linalg.norm(moved)


class Additional(PerSample, keras.Model):
    """Regularizer of a weight, and losses of two activations, one of them the output."""

    def __init__(self):
        super().__init__()
        self.body = Linear(6, torch.tanh)
        self.head = Linear(2)

    def call(self, x):
        hidden = self.body(x)
        outputs = self.head(hidden)
        if isinstance(outputs, torch.Tensor):
            self.add_loss(3 * self.body.kernel.value.square().sum())
            self.add_loss(hidden.square().sum())
            self.add_loss([outputs.abs().sum()])
        return outputs


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_additional_losses_are_added_without_clipping(scale):
    x, y, _ = _regression(8)
    with double():
        model, expected = Additional(), Additional()
        model(x), expected(x)
        expected.set_weights(model.get_weights())
        parameters = [v.value for v in expected.trainable_variables]
        expected(x)
        additional = torch.autograd.grad(sum(expected.losses), parameters)
        _loop(expected, Squared(), x, y, np.ones(8), 8, 0.01, 0.1)
        wanted = [p.data - 0.1 * g for p, g in zip(parameters, additional, strict=True)]
        model.compile(keras.optimizers.SGD(0.1, loss_scale_factor=scale), Squared(), transforms=[sw.clip(0.01)])
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for v, value in zip(model.trainable_variables, wanted, strict=True):
            torch.testing.assert_close(v.value.data, value, rtol=1e-12, atol=1e-12)


def test_norms_do_not_include_additional_losses(tmp_path):
    x, y, _ = _regression(8)
    with double():
        model = Additional()
        model(x)
        model.compile(keras.optimizers.SGD(0.0), Squared(), ledger=sw.Ledger(tmp_path))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        norms = _loop(model, Squared(), x, y, np.ones(8), 8, 1.0, 0.0)
    assert _rows(tmp_path)["norm"] == pytest.approx(norms, rel=1e-6)


class Penalized(PerSample, keras.Model):
    """Model with an own loss, that reaches the weights without passing the outputs."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2) + keras.ops.mean(self.dense.kernel**2)


def test_a_loss_beside_the_outputs_is_refused_with_the_name_of_the_variable():
    model = Penalized()
    model.compile("sgd", transforms=[sw.clip(1.0)])
    with pytest.raises(sw.GraphError, match=r"depends on 'penalized/dense[_0-9]*/kernel'"):
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


class TwoHeads(PerSample, keras.Model):
    def __init__(self):
        super().__init__()
        self.body = Linear(4, torch.tanh)
        self.heads = [Linear(2), Linear(1)]

    def call(self, x):
        hidden = self.body(x)
        return {"a": self.heads[0](hidden), "b": self.heads[1](hidden)}


@pytest.mark.slow
def test_losses_of_several_outputs_are_weighted_and_added(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)), {"a": rng.normal(size=(8, 2)), "b": rng.normal(size=(8, 1))}
    with double():
        model, expected = TwoHeads(), TwoHeads()
        model(x), expected(x)
        expected.set_weights(model.get_weights())
        losses = {"a": Squared(), "b": Squared()}
        ledger = sw.Ledger(tmp_path)
        model.compile(
            keras.optimizers.SGD(0.1),
            losses,
            loss_weights={"a": 1.0, "b": 2.0},
            transforms=[sw.clip(0.5)],
            ledger=ledger,
        )
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        parameters = [v.value for v in expected.trainable_variables]
        values, sums = [], [torch.zeros_like(p) for p in parameters]
        for i in range(8):
            outputs = expected(x[i : i + 1])
            parts = {k: Squared().call(torch.tensor(y[k][i : i + 1]), outputs[k])[0] for k in y}
            value = parts["a"] + 2 * parts["b"]
            gradient = torch.autograd.grad(value, parameters)
            factor = min(1, 0.5 / torch.stack([g.norm() for g in gradient]).norm().item())
            sums = [s + factor * g for s, g in zip(sums, gradient, strict=True)]
            values.append(value.item())
        for p, total, found in zip(parameters, sums, model.trainable_variables, strict=True):
            torch.testing.assert_close(found.value.data, p.data - 0.1 * total / 8, rtol=1e-12, atol=1e-12)
    assert _rows(tmp_path)["loss"] == pytest.approx(values, rel=1e-6)


# ------------------------------------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize(("batch_size", "steps"), [(8, 1), pytest.param(4, 2, marks=pytest.mark.slow), (2, 4), (1, 8)])
def test_accumulation_gives_the_update_of_the_whole_batch(batch_size, steps, tmp_path):
    x, y, _ = _regression(16)
    with double():
        expected = _double_network()
        _loop(expected, Squared(), x, y, np.ones(16), 8, 1.0, 0.1)
        model = PerSample.of(_double_network())
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=None if steps == 1 else steps)
        model.compile(optimizer, Squared(), transforms=[sw.clip(1.0)], ledger=sw.Ledger(tmp_path))
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert _rows(tmp_path)["update"] == [0] * 8 + [1] * 8


def test_ragged_batches_accumulate_exactly_with_the_reduction_sum():
    """Keras divides by the number of batches, whatever their sizes: 3 + 3 + 2 samples are divided by 3."""
    x, y, _ = _regression(8)
    with double():
        expected = _double_network()
        _loop(expected, Squared(), x, y, np.ones(8), 8, 1.0, 0.1 / 3, divide=False)
        model = PerSample.of(_double_network())
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        model.compile(optimizer, Squared(reduction="sum"), transforms=[sw.clip(1.0)])
        model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
        for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- loss scale


@pytest.mark.slow
def test_updates_that_a_dynamic_loss_scale_skips_have_weight_zero(tmp_path):
    x, y = _data(16)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = PerSample.of(_network())
    finally:
        keras.config.set_dtype_policy("float32")
    model.layers[1].rate = 0.0
    reference = _network()
    model.compile(keras.optimizers.SGD(0.0), LOGITS, transforms=[sw.clip(100.0)], ledger=sw.Ledger(tmp_path))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**24)  # overflows in float16, and is halved until it does not
    model.fit(x, y, batch_size=4, epochs=4, shuffle=False, verbose=0)
    rows = _rows(tmp_path)
    applied = [w == 1 for w in rows["weight"][::4]]
    assert applied[-1] and not applied[0]
    assert rows["update"] == [sum(applied[: i // 4]) for i in range(64)]
    assert int(model.optimizer.inner_optimizer.iterations) == sum(applied)
    norms = gradients(reference, x, y, LOGITS).norms()
    expected = [norms[i].item() if w == 1 else np.nan for i, w in zip(rows["id"], rows["weight"], strict=True)]
    assert rows["norm"] == pytest.approx(expected, rel=0.02, nan_ok=True)


# --------------------------------------------------------------------------------------------------------------- ids


def _compiled(directory, **options):
    model = PerSample.of(_network())
    ledger = None if directory is None else sw.Ledger(directory, **options)
    model.compile(keras.optimizers.SGD(0.1), LOGITS, ledger=ledger)
    return model


def test_ids_of_a_loader_of_an_indexed_dataset(tmp_path):
    x, y = map(torch.tensor, _data())
    model = _compiled(tmp_path)
    loader = DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=8, shuffle=True)
    model.fit(loader, epochs=2, verbose=0, shuffle=False, validation_data=loader)
    assert sorted(_rows(tmp_path)["id"]) == sorted([*range(20)] * 2)
    assert _rows(tmp_path)["label"] == y[_rows(tmp_path)["id"]].tolist()
    assert model.predict(loader, verbose=0).shape == (20, 3)


def test_ids_of_a_loader_are_not_taken_for_sample_weights():
    x, y = map(torch.tensor, _data())
    plain = _network()
    plain.compile(keras.optimizers.SGD(0.1), LOGITS)
    plain.fit(DataLoader(TensorDataset(x, y), batch_size=8), shuffle=False, verbose=0)
    model = _compiled(None)
    model.fit(DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=8), shuffle=False, verbose=0)
    assert _same(plain, model)


class Batches(keras.utils.PyDataset):
    """Batches (x, y) with ids in x."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = _data()
        rows = np.arange(4) + 4 * index
        return {"features": x[rows], "key": rows + 100}, y[rows]


def test_ids_in_a_dict_of_inputs_are_not_passed_to_the_model(tmp_path):
    keras.utils.set_random_seed(0)
    features = keras.Input((5,), name="features")
    model = PerSample.of(keras.Model({"features": features}, layers.Dense(3)(features)))
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path, id="key"))
    model.fit(Batches(), verbose=0)
    assert sorted(_rows(tmp_path)["id"]) == [*range(100, 120)]
    x, y = _data()
    model.fit({"features": x, "key": np.arange(20)}, y, verbose=0)
    assert sorted(_rows(tmp_path)["id"]) == [*range(20), *range(100, 120)]


def test_arrays_in_a_dict_get_their_row_numbers(tmp_path):
    features = keras.Input((5,), name="features")
    model = PerSample.of(keras.Model({"features": features}, layers.Dense(3)(features)))
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path))
    x, y = _data()
    model.fit({"features": x}, y, verbose=0)
    assert sorted(_rows(tmp_path)["id"]) == [*range(20)]


def test_a_subclass_is_built_from_the_first_batch(tmp_path):
    x, y = np.ones((6, 3)), np.ones((6, 2))

    class Net(PerSample, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Net()
    model.compile("adam", "mse", transforms=sw.clip(1.0), ledger=sw.Ledger(tmp_path))
    model.fit(x, y, 2, 1, 0, keras.callbacks.TerminateOnNaN())  # positional arguments, one callback
    assert len(_rows(tmp_path)["id"]) == 6


def test_a_batch_without_ids_is_refused(tmp_path):
    x, y = map(torch.tensor, _data())
    with pytest.raises(sw.LedgerError, match=r"must have the ids of its samples .* a dict x with the key 'id'"):
        _compiled(tmp_path).fit(DataLoader(TensorDataset(x, y), batch_size=8), shuffle=False, verbose=0)
    with pytest.raises(sw.LedgerError, match="must have the ids of its samples"):
        _compiled(tmp_path).train_on_batch(x, y)


def _with_inputs(*names):
    inputs = {name: keras.Input((5,) if name == "features" else (), name=name) for name in names}
    parts = [layers.Dense(3)(inputs["features"])]
    parts += [layers.Embedding(20, 3)(inputs[name]) for name in names if name != "features"]
    return PerSample.of(keras.Model(inputs, parts[0] if len(parts) == 1 else layers.Add()(parts)))


def test_columns_that_are_not_inputs_are_recorded_and_read_by_transforms(tmp_path):
    x, y = _data()
    model = _with_inputs("features")
    ledger = sw.Ledger(tmp_path, columns=["age"])
    model.compile("sgd", LOGITS, transforms=[sw.weight("age")], ledger=ledger)
    model.fit({"features": x, "age": np.arange(20.0)}, y, verbose=0)
    rows = _rows(tmp_path)
    assert rows["age"] == rows["weight"] == [float(i) for i in rows["id"]]


@pytest.mark.slow
def test_a_column_of_the_batch_takes_the_place_of_the_label(tmp_path):
    x, y = _data()
    model = _with_inputs("features")
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path, columns=["label"]))
    model.fit({"features": x, "label": np.arange(20) + 100}, y, verbose=0)
    rows = _rows(tmp_path)
    assert rows["label"] == [i + 100 for i in rows["id"]]
    assert set(rows["prediction"]) <= {0, 1, 2}


def test_a_directory_with_rows_is_refused_before_the_first_update(tmp_path):
    x, y = _data()
    for updates in (2, 0):
        model = PerSample.of(_network())
        model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path))
        context = nullcontext() if updates else pytest.raises(LedgerError, match="a run directory without parts")
        with context:
            model.fit(x, y, batch_size=10, verbose=0)
        assert int(model.optimizer.iterations) == updates
    assert len(_rows(tmp_path)["id"]) == 20


def test_transforms_read_the_losses_of_the_samples(tmp_path):
    x, y = _data()
    model = PerSample.of(_network())
    model.compile("sgd", LOGITS, transforms=[sw.weight(lambda losses: 1 / (1 + losses))], ledger=sw.Ledger(tmp_path))
    model.fit(x, y, sample_weight=np.linspace(1, 2, 20), verbose=0)
    rows = _rows(tmp_path)
    assert rows["weight"] == pytest.approx([1 / (1 + loss) for loss in rows["loss"]], rel=1e-5)


def test_an_input_can_be_the_id(tmp_path):
    x, y = _data()
    model = _with_inputs("features", "id")
    model.compile("sgd", LOGITS)
    model.fit({"features": x, "id": np.arange(20)[::-1].copy()}, y, verbose=0)  # without a ledger, an ordinary input
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path))
    model.fit({"features": x, "id": np.arange(20)[::-1].copy()}, y, shuffle=False, verbose=0)
    assert _rows(tmp_path)["id"] == [*range(19, -1, -1)]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_settings_are_checked_before_training(tmp_path):
    model = PerSample.of(_network())
    with pytest.raises(ValueError, match=r"jit_compile must be False, .* found True"):
        model.compile("sgd", LOGITS, jit_compile=True)
    with pytest.raises(TypeError, match=r"ledger must be an sw\.Ledger; found PosixPath"):
        model.compile("sgd", LOGITS, ledger=tmp_path)
    with pytest.raises(ValueError, match="the ledger must have a run directory of its own"):
        model.compile("sgd", LOGITS, ledger=sw.Ledger())
    with pytest.raises(TypeError, match=r"PerSample\.of needs a keras\.Model; found Linear"):
        PerSample.of(torch.nn.Linear(1, 1))


def test_a_model_that_is_not_compiled_again_is_refused(tmp_path):
    model = _network()
    model.compile("sgd", LOGITS)
    PerSample.of(model)
    with pytest.raises(RuntimeError, match="must be compiled as PerSample before it is trained"):
        model.fit(*_data(), verbose=0)


def test_an_own_train_step_is_refused():
    class Net(PerSample, keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(TypeError, match="PerSample must define train_step; found that Net overrides it"):
        Net().compile("sgd", "mse")


def test_the_order_of_the_bases():
    with pytest.raises(TypeError, match=r"PerSample must come before Model .*; found Net\(Model, PerSample\)"):
        type("Net", (keras.Model, PerSample), {})


def test_a_transform_of_the_whole_update_is_refused():
    model = PerSample.of(_network())
    model.compile("sgd", LOGITS, transforms=[sw.noise(1.0)])
    with pytest.raises(sw.TransformError, match=r"must be applied once per update; .* Use sw\.Step"):
        model.fit(*_data(), verbose=0)


def test_different_reductions_are_refused():
    model = TwoHeads()
    losses = {"a": keras.losses.MeanSquaredError(), "b": keras.losses.MeanSquaredError(reduction="sum")}
    model.compile("sgd", losses, transforms=[sw.clip(1.0)])
    y = {"a": np.ones((4, 2)), "b": np.ones((4, 1))}
    with pytest.raises(sw.LossesError, match="found the reductions sum, sum_over_batch_size"):
        model.fit(np.ones((4, 5)), y, verbose=0)


class Normalized(keras.Model):
    """BatchNormalization of the input, which has no gradient, and of a layer. `training`: that of the second one."""

    def __init__(self, training):
        super().__init__()
        self.first = layers.BatchNormalization(name="of_input")
        self.dense = layers.Dense(3)
        self.last = layers.BatchNormalization(name="of_logits")
        self.mode = training

    def call(self, x, training=None):
        return self.last(self.dense(self.first(x, training=training)), training=self.mode)


@pytest.mark.parametrize(
    ("training", "names"),
    [(True, "layers 'of_input', 'of_logits'. They normalize"), (False, "layer 'of_input'. It normalizes")],
)
def test_batch_normalization_is_refused_by_name_with_the_remedies_of_keras(training, names, tmp_path):
    model = PerSample.of(Normalized(training))
    model.compile("sgd", LOGITS, transforms=[sw.clip(1.0)])
    message = (
        f"the loss of a sample must not depend on other samples; found BatchNormalization in training mode: {names} "
        "with the statistics of the whole batch. Set layer.trainable = False before model.compile or call the layer "
        "with training=False, both of which make it use its moving statistics, or use GroupNormalization or "
        "LayerNormalization."
    )
    with pytest.raises(sw.SamplesInteractError) as refused:
        model.fit(*_data(), verbose=0)
    assert str(refused.value) == message
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path / "norms"))
    with pytest.raises(sw.SamplesInteractError, match=r"or pass sw\.Ledger\(run, norms=False\), which records"):
        model.fit(*_data(), verbose=0)
    model.compile("sgd", LOGITS, ledger=sw.Ledger(tmp_path / "losses", norms=False))
    model.fit(*_data(), verbose=0)
    model.first.trainable = model.last.trainable = False
    model.compile("sgd", LOGITS, transforms=[sw.clip(1.0)])
    model.fit(*_data(), verbose=0)


def test_several_ranks_are_refused(monkeypatch):
    from samplewise.integrations.keras import per_sample

    monkeypatch.setattr(per_sample.collectives, "size", lambda: 2)
    with pytest.raises(sw.DistributedError, match=r"fit must run in a single process, .* found 2 ranks"):
        _compiled(None).fit(*_data(), verbose=0)
