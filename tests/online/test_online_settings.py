"""Refusals of steps and arguments that `Online` cannot use, and progress of `run`."""

import re

import pytest
import torch
from test_online_learning import make, net
from torch import nn

import samplewise as sw
from samplewise.errors import BatchError
from samplewise.online import Online, OnlineRegressor


def step(model=None, criterion=None, **settings):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.Step(model, optimizer, criterion or nn.CrossEntropyLoss(), **{"samples": 1, **settings})


def pending():
    result = step(samples=1)
    result.accumulate((torch.ones(1, 4).double(), torch.tensor([0])))
    return result


REFUSED = {
    "samples": (lambda: step(samples=None), "a step with samples=1.*; found samples=None. Create Step"),
    "groups": (lambda: step(transforms=[sw.group("user"), sw.clip(1.0)]), "found group"),
    "keys": (lambda: step(transforms=[sw.weight("importance")]), "found the keys 'importance'. The batch is"),
    "open window": (pending, r"no open window; found samples that are in no update. Call step.flush\(\) first"),
    "criterion": (lambda: step(criterion=nn.MultiMarginLoss()), "found MultiMarginLoss with 3 outputs. Write a loss"),
    "several logits": (lambda: step(criterion=nn.BCEWithLogitsLoss()), "found BCEWithLogitsLoss with 3 outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_used_is_refused(name):
    make_step, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Online(make_step())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "ranking"}, "task must be one of 'classification', .*; found 'ranking'"),
        (
            {"task": "regression"},
            "task must be 'classification' for CrossEntropyLoss and 3 outputs; found 'regression'",
        ),
        ({"new_features": "drop"}, "new_features must be 'grow', 'ignore' or 'raise'; found 'drop'"),
        ({"classes": ["a", "a"]}, re.escape("each of them once; found ['a', 'a']")),
    ],
)
def test_invalid_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Online(step(), **settings)


def test_objects_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"step must be a samplewise\.Step; found Sequential"):
        Online(net())
    with pytest.raises(ValueError, match="OnlineRegressor is for regression; found a step for classification"):
        OnlineRegressor(step())


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        return self.layer(batch["a"]) + batch["b"]


class FixedSize(nn.Module):
    """A model that uses its input twice, so that its first layer cannot grow alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x


def test_a_model_that_needs_other_inputs_is_refused():
    online = Online(step(TwoInputs()))
    with pytest.raises(BatchError, match=r"must accept one tensor of shape \(1, 4\), a batch of one row; found"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], 0)
    convolution = nn.Sequential(nn.Conv1d(1, 3, 4), nn.Flatten())
    with pytest.raises(BatchError, match=r"first layer is an nn\.Linear"):
        Online(step(convolution)).learn_one({"a": 1.0}, 0)


def test_growth_that_the_model_does_not_allow_is_undone():
    online = Online(step(FixedSize().double()))
    online.learn_one(dict.fromkeys("abcd", 1.0), "x")
    with pytest.raises(BatchError, match=r"must accept one tensor of shape \(1, 12\)"):
        online.learn_one(dict.fromkeys("abcde", 1.0), "x")
    assert online.step.model.layer.in_features == 4
    online.learn_one(dict.fromkeys("abcd", 1.0), "y")
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Conv1d(1, 1, 1)).double()
    model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)).double()
    online = Online(step(model))
    online.learn_one([1.0, 2.0, 3.0, 4.0], "a")
    online.learn_one([1.0, 2.0, 3.0, 4.0], "b")
    with pytest.raises(BatchError, match=r"a further class needs a model whose last layer is an nn\.Linear"):
        online.learn_one([1.0, 2.0, 3.0, 4.0], "c")
    assert online.classes == ["a", "b"]


def test_class_weights_do_not_allow_growth():
    online = Online(step(net(outputs=2), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]).double())))
    x = [1.0, 2.0, 3.0, 4.0]
    online.learn_one(x, "a")
    update = online.learn_one(x, "b")
    assert update.loss > 0
    with pytest.raises(Exception, match="weight"):
        online.learn_one(x, "c")
    assert online.step.model[2].out_features == 2 and online.classes == ["a", "b"]
    online.learn_one(x, "b")


def test_run_returns_totals_and_shows_progress(capsys, monkeypatch):
    monkeypatch.setattr("samplewise.online.stream.perf_counter", iter(range(10**6)).__next__)
    online = make(net(outputs=1), criterion=nn.L1Loss())
    rows = torch.randn(64, 4, dtype=torch.float64)
    totals = online.run([(row, row[0].item()) for row in rows])
    assert totals.samples == 64 and totals.accuracy is None and totals.loss == totals.mean_absolute_error
    lines = capsys.readouterr().err.splitlines()
    assert lines and re.fullmatch(r"epoch 1  update \d+  loss \S+  error \S+  \S+ samples/s", lines[0])
    online.run([], progress=False)
    assert not capsys.readouterr().err
