"""`Online` in river: metrics, pipelines, progressive validation, detectors of drift."""

import copy

import pytest
import torch
from river import base, compose, datasets, drift, evaluate, metrics, preprocessing
from torch import nn

import samplewise as sw
from samplewise import Online


def make(inputs, outputs, criterion=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Online(sw.Step(model, optimizer, criterion or nn.CrossEntropyLoss(), samples=1), **settings)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("metric", [metrics.Accuracy(), metrics.ROCAUC(), metrics.LogLoss()], ids=repr)
def test_progressive_validation_of_a_classifier(metric):
    model = preprocessing.StandardScaler() | make(9, 2)
    evaluate.progressive_val_score(datasets.Phishing().take(400), model, metric)
    assert metric.get() < 0.6 if isinstance(metric, metrics.LogLoss) else metric.get() > 0.8
    assert isinstance(model, base.Classifier) and model["OnlineClassifier"].samples == 400


def test_progressive_validation_is_the_same_as_run():
    scaler = preprocessing.StandardScaler()
    samples = []
    for x, y in datasets.Phishing().take(300):
        scaler.learn_one(x)
        samples.append((scaler.transform_one(x), y))
    metric = evaluate.progressive_val_score(samples, make(9, 2), metrics.Accuracy())
    totals = make(9, 2).run(samples, progress=False)
    assert totals.accuracy == pytest.approx(metric.get(), abs=1 / 300)  # river leaves out the first prediction, None
    assert totals.samples == 300 and totals.mean_absolute_error is None and totals.samples_per_second > 0


def test_classes_and_features_of_a_stream_with_more_of_both_than_the_model():
    model = preprocessing.StandardScaler() | make(10, 2)
    metric = evaluate.progressive_val_score(datasets.ImageSegments().take(300), model, metrics.Accuracy())
    assert metric.get() > 0.5
    assert len(model["OnlineClassifier"].classes) == 7
    assert model["OnlineClassifier"].step.model[0].in_features >= 18


def test_progressive_validation_of_regressors():
    stream = [({"a": float(k % 5), "b": float(k % 3)}, float(k % 5 - k % 3)) for k in range(600)]
    model = preprocessing.StandardScaler() | make(2, 1, nn.HuberLoss())
    assert isinstance(model, base.Regressor)
    assert evaluate.progressive_val_score(stream, model, metrics.MAE()).get() < 0.5
    model = make(5, 3, nn.MSELoss())
    assert isinstance(model, base.MultiTargetRegressor)
    metric = metrics.multioutput.MicroAverage(metrics.MAE())
    samples = [(dict(enumerate(x)), {"u": x[0], "v": -x[1], "w": 0.0}) for x in torch.rand(600, 5).tolist()]
    assert evaluate.progressive_val_score(samples, model, metric).get() < 0.3
    with pytest.raises(ValueError, match="not compatible"):
        evaluate.progressive_val_score(stream, model, metrics.Accuracy())


def test_pipelines_are_shown_cloned_copied_and_measured():
    model = compose.Select("https", "ip_in_url") | preprocessing.StandardScaler() | make(2, 2)
    stream = list(datasets.Phishing().take(50))
    for state in evaluate.iter_progressive_val_score(stream, model, metrics.Accuracy(), step=25, measure_memory=True):
        assert state["Memory"] > 0
    assert "OnlineClassifier" in repr(model)
    x, y = stream[0]
    assert "OnlineClassifier" in model.debug_one(x) or model.debug_one(x)
    fresh, twin = model.clone(), copy.deepcopy(model)
    assert fresh["OnlineClassifier"].samples == 0 and fresh.predict_one(x) is None
    assert twin.predict_proba_one(x) == model.predict_proba_one(x)
    twin.learn_one(x, y)
    assert (twin["OnlineClassifier"].samples, model["OnlineClassifier"].samples) == (51, 50)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("detector", [drift.ADWIN, drift.PageHinkley, lambda: drift.KSWIN(seed=1)])
def test_a_detector_of_river_raises_alarms_and_is_saved(detector, tmp_path):
    online = make(3, 1, nn.MSELoss(), drift=detector())
    x = torch.rand(400, 3)
    for row in x:
        online.learn_one(row, row.sum().item())
    online.save(tmp_path / "online")
    other = make(3, 1, nn.MSELoss(), drift=detector())
    other.load(tmp_path / "online")
    alarms = [[o.learn_one(row, 30.0).drift for row in x] for o in (online, other)]
    assert alarms[0] == alarms[1] and any(alarms[0])
