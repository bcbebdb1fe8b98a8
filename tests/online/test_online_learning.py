"""`learn_one` compared with the plain loop: zero_grad, backward, clip, optimizer step; in float64."""

import copy
import math

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.errors import BatchError, NonFiniteLossError
from samplewise.online import Online, OnlineClassifier, OnlineMultiTargetRegressor, OnlineRegressor
from samplewise.online.growth import CompileDelay, resize

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}


def net(inputs=4, outputs=3, hidden=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def make(model, optimizer="adam", criterion=None, clip=None, compile=False, **settings):
    transforms = [] if clip is None else [sw.clip(clip)]
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    step = sw.Step(
        model, optimizer, criterion or nn.CrossEntropyLoss(), samples=1, transforms=transforms, compile=compile
    )
    return Online(step, **settings)


def plain_update(model, optimizer, criterion, x, y, clip=None):
    """One update of the plain loop; returns loss, norm of the gradient, and weight."""
    optimizer.zero_grad()
    loss = criterion(model(x[None]), y)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    weight = 1.0 if clip is None else min(1.0, clip / norm.item())
    for p in model.parameters():
        p.grad *= weight
    optimizer.step()
    return loss.item(), norm.item(), weight


def assert_near(model, other, tolerance=1e-10):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def stream(samples, columns=4, seed=1):
    x = torch.randn(samples, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * 2).round().clamp(-1, 1) + 0.0


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_classifier_makes_the_updates_of_the_plain_loop(optimizer, clip):
    model = net()
    other = copy.deepcopy(model)
    plain = OPTIMIZERS[optimizer](other.parameters())
    online = make(model, optimizer, clip=clip)
    x, y = stream(300)
    index: dict[str, int] = {}
    for row, value in zip(x, y.tolist(), strict=True):
        label = f"class {value:.0f}"
        update = online.learn_one(row, label)
        target = torch.tensor([index.setdefault(label, len(index))])
        expected = plain_update(other, plain, nn.CrossEntropyLoss(), row, target, clip)
        assert update[:3] == pytest.approx(expected, rel=1e-9)
    assert isinstance(online, OnlineClassifier) and online.classes == list(index)
    assert_near(model, other)


@pytest.mark.parametrize(
    ("criterion", "outputs"),
    [(nn.MSELoss(), 1), (nn.L1Loss(), 1), (nn.HuberLoss(), 1), (nn.SmoothL1Loss(), 1), (nn.MSELoss(), 2)],
    ids=repr,
)
def test_a_regressor_makes_the_updates_of_the_plain_loop(criterion, outputs):
    model = net(outputs=outputs)
    other = copy.deepcopy(model)
    plain = OPTIMIZERS["momentum"](other.parameters())
    online = make(model, "momentum", criterion)
    assert type(online) is (OnlineRegressor if outputs == 1 else OnlineMultiTargetRegressor)
    x, _ = stream(100)
    y = torch.stack([x.sum(1), x[:, 1]], 1)[:, :outputs]
    for row, values in zip(x, y, strict=True):
        named = values.item() if outputs == 1 else {"sum": values[0].item(), "second": values[1].item()}
        update = online.learn_one(row.tolist(), named)
        assert update[:3] == pytest.approx(plain_update(other, plain, criterion, row, values[None]), rel=1e-9)
    assert_near(model, other)
    prediction, expected = online.predict_one(x[0]), other(x[:1])[0].tolist()
    assert (list(prediction.values()) if outputs == 2 else [prediction]) == pytest.approx(expected)


@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), nn.BCELoss()], ids=repr)
def test_a_binary_classifier_has_one_output(criterion):
    model = net(outputs=1)
    if isinstance(criterion, nn.BCELoss):
        model.append(nn.Sigmoid())
    other = copy.deepcopy(model)
    plain = OPTIMIZERS["adam"](other.parameters())
    online = make(model, criterion=criterion, classes=[False, True])
    x, y = stream(60)
    for row, value in zip(x, (y > 0).tolist(), strict=True):
        online.learn_one(row.numpy(), value)
        plain_update(other, plain, criterion, row, torch.tensor([[float(value)]], dtype=torch.float64))
    assert_near(model, other)
    output = other(x[:1]).item()
    probability = output if isinstance(criterion, nn.BCELoss) else 1 / (1 + math.exp(-output))
    assert online.predict_proba_one(x[0]) == pytest.approx({False: 1 - probability, True: probability})
    assert online.predict_one(x[0]) is (probability > 0.5)


@pytest.mark.usefixtures("backend")
def test_compiled_updates_are_those_of_the_plain_loop_before_and_after_growth(monkeypatch):
    monkeypatch.setattr(CompileDelay, "STABLE", 30)
    model = net(outputs=2)
    other = copy.deepcopy(model)
    plain = OPTIMIZERS["adam"](other.parameters())
    online = make(model, clip=0.5, compile=True)
    x, y = stream(900)
    labels = y.abs().long().tolist()
    for k, row in enumerate(x):
        label = 2 if k > 400 and labels[k] else labels[k]
        if k == next(j for j in range(401, 900) if labels[j]):
            resize(other[2], plain, 5, 3)
        if k == 0:
            first = label
        index = label if first == 0 or label == 2 else 1 - label
        online.learn_one(row, label)
        plain_update(other, plain, nn.CrossEntropyLoss(), row, torch.tensor([index]), 0.5)
        if k == 300:
            assert online.step.compiled == "compiled"
        if k == 410:
            assert "layers have grown" in online.step.compiled
    assert online.step.compiled == "compiled" and len(online.classes) == 3
    assert_near(model, other, 1e-8)


# --- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_features_and_classes_that_appear_later_are_those_of_layers_grown_by_hand(optimizer):
    """The plain loop begins with layers large enough, whose further entries are zero."""
    model = net(inputs=2, outputs=2)
    parameters = list(model.parameters())
    online = make(model, optimizer)
    large = net(inputs=12, outputs=2)
    for layer, start in zip(large, net(inputs=2, outputs=2), strict=True):
        if isinstance(layer, nn.Linear):
            columns = start.in_features
            layer.weight.data = torch.cat(
                [start.weight.data, torch.zeros(start.out_features, layer.in_features - columns).double()], 1
            )
            layer.bias.data = start.bias.data
    plain = OPTIMIZERS[optimizer](large.parameters())
    x, _ = stream(200, columns=8)
    names: list[str] = []
    generator = torch.Generator().manual_seed(0)
    for k, values in enumerate(x.tolist()):
        features = dict(zip("abcdefgh"[: 2 + k // 30], values, strict=False))
        features.pop("a" if k % 7 == 3 else "b" if k % 7 == 4 else "") if k % 7 in (3, 4) else None
        label = int(torch.randint(2 + (k > 50) + (k > 90), (1,), generator=generator)) if k > 1 else k
        online.learn_one(features, label)
        names += [name for name in features if name not in names]
        if label == large[2].out_features:
            resize(large[2], plain, 5, label + 1)
        row = torch.zeros(12, dtype=torch.float64)
        for name, value in features.items():
            row[names.index(name)] = value
        plain_update(large, plain, nn.CrossEntropyLoss(), row, torch.tensor([online.classes.index(label)]))
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert model[0].in_features == 10 and model[2].out_features == 4 == len(online.classes)
    large[0].weight.data = large[0].weight.data[:, :10]
    assert_near(model, large, 1e-9)


def test_growth_of_the_first_layer_changes_no_prediction():
    online = make(net(inputs=2))
    online.learn_one({"a": 1.0, "b": 2.0}, "x")
    before = online.predict_proba_one({"a": 1.0, "b": 2.0, "c": 5.0})
    model = copy.deepcopy(online.step.model)
    resize(model[0], online.step.optimizer, 12, 5)
    row = torch.zeros(1, 12, dtype=torch.float64)
    row[0, :3] = torch.tensor([1.0, 2.0, 5.0])
    assert before == pytest.approx({"x": 1.0})
    torch.testing.assert_close(model(row), online.step.model(row[:, :2]))


def test_new_features_are_ignored_or_refused_if_asked():
    for policy in ("ignore", "raise"):
        model = net()
        online = make(model, new_features=policy)
        online.learn_one({"a": 1.0, "b": 2.0}, 0)
        sample = {"a": 1.0, "c": 3.0}
        if policy == "raise":
            with pytest.raises(
                BatchError, match="among those of the first sample with new_features='raise'; found 'c'"
            ):
                online.learn_one(sample, 0)
            with pytest.raises(BatchError, match="found 'c'"):
                online.predict_one(sample)
        else:
            online.learn_one(sample, 1)
            assert online.predict_proba_one(sample) == online.predict_proba_one({"a": 1.0})
        assert online._features.names == ["a", "b"] and model[0].in_features == 4


def test_probabilities_are_those_of_classes_that_have_appeared():
    online = make(net(outputs=5))
    x = [0.1, 0.2, 0.3, 0.4]
    assert online.predict_one(x) is None and online.predict_proba_one(x) == {}
    online.learn_one(x, "a")
    assert online.predict_proba_one(x) == {"a": 1.0}
    online.learn_one(x, "b")
    logits = online.step.model(torch.tensor([x], dtype=torch.float64))[0, :2]
    assert [*online.predict_proba_one(x).values()] == pytest.approx(logits.softmax(0).tolist())


# --- errors leave everything as it was -------------------------------------------------------------------------------


def snapshot(online):
    state = online.state_dict()
    del state["step"]["layouts"]  # structures of batches that were sliced, also by an update that was refused
    return {**state, "row": 0}, [*online.step.model.parameters()]


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for first, second in zip(a, b, strict=True):
            assert_same(first, second)
    else:
        assert a == b or (a != a and b != b)


BAD = {
    "text": ({"a": 1.0, "b": "red"}, 0, "must be numbers; found 'red' as 'b'"),
    "none": ({"a": None}, 0, "must be numbers; found None as 'a'"),
    "unhashable": ({"a": 1.0}, [1], "a label must be hashable"),
    "not finite": ({"a": math.nan}, 0, "must be finite"),
    "not finite, new feature and class": ({"a": math.inf, **dict.fromkeys("cdefgh", 1.0)}, 7, "must be finite"),
    "text in a new feature": ({"z": "x", **dict.fromkeys("cdefgh", 1.0)}, 7, "found 'x'"),
    "row": ([1.0, 2.0, 3.0, 4.0], 0, "all samples of a stream must be dicts"),
}


@pytest.mark.parametrize("begun", [False, True], ids=["first sample", "later"])
@pytest.mark.parametrize("name", BAD)
def test_a_refused_sample_changes_nothing(name, begun):
    x, y, message = BAD[name]
    if name == "row" and not begun:
        return
    online = make(net(), clip=1.0)
    for k in range(20 if begun else 0):
        online.learn_one({"a": k / 10, "b": 1.0}, k % 3)
    before, parameters = snapshot(online)
    with pytest.raises(sw.SamplewiseError, match=message):
        online.learn_one(x, y)
    after, _ = snapshot(online)
    assert_same(before, after)
    assert [*map(id, parameters)] == [*map(id, online.step.model.parameters())]
    other = make(net(), clip=1.0)
    for k in range(20 if begun else 0):
        other.learn_one({"a": k / 10, "b": 1.0}, k % 3)
    for o in (online, other):
        o.learn_one({"a": 0.5, "b": -1.0}, 1)
    assert_same(snapshot(online)[0], snapshot(other)[0])


def test_layers_change_their_size_while_an_earlier_graph_is_alive():
    """Tracebacks and hooks keep graphs, whose nodes expect gradients of the earlier shapes."""
    online = make(net(), clip=1.0)
    outputs = []
    online.step.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    for k in range(6):
        online.learn_one({"a": k / 10, "b": 1.0}, k % 3)
    x, y, message = BAD["not finite, new feature and class"]
    with pytest.raises(sw.SamplewiseError, match=message) as refused:
        online.learn_one(x, y)  # layers grow, and are made small again
    assert online.learn_one({"a": 0.5, "b": -1.0}, 1).weight > 0
    assert online.learn_one({"a": 0.5, **dict.fromkeys("cdefgh", 1.0)}, 7).weight > 0
    assert outputs and refused.tb is not None


@pytest.mark.parametrize("x", [[1.0, 2.0], torch.ones(5), torch.ones(1, 4), torch.ones(4).numpy()[:3]], ids=repr)
def test_rows_of_another_shape_are_refused(x):
    for begun in (False, True):
        online = make(net())
        if begun:
            online.learn_one([1.0, 2.0, 3.0, 4.0], 0)
        before, _ = snapshot(online)
        with pytest.raises(BatchError, match=r"columns|shape"):
            online.learn_one(x, 0)
        assert_same(before, snapshot(online)[0])
        with pytest.raises(BatchError, match=r"columns|shape"):
            online.predict_one(x)
        assert online.learn_one([1.0, 2.0, 3.0, 4.0], 0).weight == 1


@pytest.mark.usefixtures("backend")
def test_an_update_that_is_not_finite_is_refused_by_compiled_code_too():
    model = net()
    online = make(model, compile=True, clip=1.0)
    x, y = stream(40)
    for row, label in zip(x, y.tolist(), strict=True):
        online.learn_one(row, label)
    assert online.step.compiled == "compiled"
    before, _ = snapshot(online)
    with pytest.raises(NonFiniteLossError):
        online.learn_one(x[0] * math.nan, 0.0)
    assert_same(before, snapshot(online)[0])
    online.learn_one(x[0], 0.0)
    assert online.step.compiled == "compiled" and online.samples == 41


def test_a_skipped_update_is_reported():
    model = net()
    step = sw.Step(model, OPTIMIZERS["adam"](model.parameters()), nn.CrossEntropyLoss(), samples=1, on_nonfinite="skip")
    online = Online(step)
    online.learn_one([1.0, 2.0, 3.0, 4.0], "a")
    update = online.learn_one([math.nan, 2.0, 3.0, 4.0], "b")
    assert math.isnan(update.loss) and update.weight == 0 and not update.drift
    assert online.step.counters.skipped == 1 and online.samples == 2


def test_a_further_label_is_refused_if_classes_are_given_or_the_model_has_one_output():
    online = make(net(outputs=1), criterion=nn.BCEWithLogitsLoss())
    for label in ("a", "b"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], label)
    with pytest.raises(BatchError, match=r"one output has two classes, 'a' and 'b'; found the further label 'c'"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], "c")
    online = make(net(), classes=["a", "b"])
    with pytest.raises(BatchError, match=r"one of classes=\['a', 'b'\]; found 'c'"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], "c")


def test_targets_of_a_regression_must_have_the_names_of_the_first_sample():
    online = make(net(outputs=2), criterion=nn.MSELoss())
    x = [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(BatchError, match="as many targets as the model has outputs, 2; found u"):
        online.learn_one(x, {"u": 1.0})
    with pytest.raises(BatchError, match="found 'big'"):
        online.learn_one(x, {"u": 1.0, "v": "big"})
    assert online.predict_one(x) == {}
    online.learn_one(x, {"u": 1.0, "v": 2.0})
    with pytest.raises(BatchError, match="targets of the first sample, u, v; found u, w"):
        online.learn_one(x, {"u": 1.0, "w": 2.0})
    with pytest.raises(BatchError, match="y must be a dict of target name to number; found float"):
        online.learn_one(x, 1.0)


# --- predictions and other uses of the step --------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and BatchNorm with frozen statistics, in a model of which one part stays in eval mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        sw.freeze_batchnorm(self.body)

    def forward(self, x):
        return self.body(x)


def test_predictions_use_eval_mode_and_change_nothing():
    streams = stream(60)
    results = []
    for predicts in (False, True):
        model = Noisy().double()
        online = make(model)
        torch.manual_seed(5)
        for row, label in zip(*streams, strict=True):
            if predicts:
                assert online.predict_proba_one(row) == online.predict_proba_one(row)
            online.learn_one(row, label.item())
        assert model.training and model.body[3].training and not model.body[1].training
        results.append(online.state_dict())
    assert results[0]["draws"] is True
    assert_same(*results)


def test_the_step_may_be_used_for_other_batches_in_between():
    x, y = stream(40)
    labels = (y + 1).long()
    model, other = net(), net()
    online, single = make(model, classes=[0, 1, 2]), make(other, classes=[0, 1, 2])
    for k in range(20):
        online.learn_one(x[k], labels[k].item())
    leftover = iter(online.step.over([(x[20:30], labels[20:30])]))
    for _ in range(3):
        next(leftover)
    online.learn_one(x[30], labels[30].item())
    totals = online.step.run([(x[31:35], labels[31:35])])  # first the rest of the batch
    assert totals.samples == 7 + 4
    online.learn_one(x[35], labels[35].item())
    for k in [*range(23), 30, *range(23, 30), *range(31, 36)]:
        single.learn_one(x[k], labels[k].item())
    assert_near(model, other)


def test_a_changed_number_of_samples_is_refused():
    online = make(net())
    online.learn_one([1.0, 2.0, 3.0, 4.0], 0)
    online.step.samples = 2
    with pytest.raises(ValueError, match="samples=1"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], 0)


def test_models_of_tokens_images_and_plain_loss_functions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 2)).double()
    online = make(model)
    update = online.learn_one([1, 2, 3], "a")
    assert update.loss == pytest.approx(math.log(2), rel=0.5) and online.predict_one([1, 2, 3]) == "a"
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double()
    online = make(model)
    online.learn_one(torch.ones(1, 4, 4, dtype=torch.float64), "a")
    with pytest.raises(BatchError, match=r"must have the shape \(1, 4, 4\); found \(4, 4\)"):
        online.learn_one(torch.ones(4, 4), "a")
    with pytest.raises(BatchError, match=r"a dict after rows|found dict"):
        online.learn_one({"a": 1.0}, "a")
    model = net(outputs=1)

    def loss_fn(model, batch):
        x, y = batch
        return (model(x) - y).abs().pow(1.5).sum(1)

    step = sw.Step(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn, samples=1)
    with pytest.raises(ValueError, match="needs a task if loss_fn is a function"):
        Online(step)
    online = Online(step, task="regression")
    losses = [online.learn_one([1.0, 0.0, 0.0, 1.0], 2.0).loss for _ in range(50)]
    assert losses[-1] < losses[0]
