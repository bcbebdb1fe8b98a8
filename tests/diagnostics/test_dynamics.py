"""`sw.dynamics`: on digits, compared with plain loops; converters to other libraries; what a ledger cannot tell."""

import copy
import math
import pickle
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.diagnostics import Dynamics
from samplewise.ledger import aggregate

N, EPOCHS, EARLY = 120, 9, 3
COLUMNS = "visits confidence variability correctness forgetting_events learned_epoch".split()
COLUMNS += "aum el2n early_el2n grand norm_trend loss norm suspicion".split()


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    labels = torch.tensor(y[:N])
    labels[::10] = (labels[::10] + 3) % 10
    return torch.tensor(x[:N]) / 16, labels  # float64


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    """Run with a ledger; each epoch in the order of the data."""
    directory = tmp_path_factory.mktemp("runs") / "digits"
    model = network()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss())
    ledger = sw.Ledger(probabilities=True, rows_per_file=300, classes=[f"digit {k}" for k in range(10)])
    loader = DataLoader(sw.Indexed(TensorDataset(*digits)), batch_size=30)
    sw.Trainer(step, directory, [ledger], progress=False).fit(loader, epochs=EPOCHS)
    return directory


@pytest.fixture(scope="module")
def dynamics(run):
    return sw.dynamics(run, early_epochs=EARLY)


def plain_visits(x, y):
    """Loss, margin, probabilities and gradient norm of each sample at each epoch, by a plain loop: epoch -> list."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(EPOCHS):
        visits = []
        for start in range(0, N, 30):
            for i in range(start, start + 30):
                logits = model(x[i])
                loss = F.cross_entropy(logits, y[i])
                gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
                visits.append((loss.item(), norm, logits.tolist(), logits.softmax(0).tolist(), int(y[i])))
            optimizer.zero_grad()
            F.cross_entropy(model(x[start : start + 30]), y[start : start + 30]).backward()
            optimizer.step()
        yield visits


def test_equal_to_the_formulas_on_digits(digits, dynamics):
    epochs = list(plain_visits(*digits))
    assert dynamics.ids.tolist() == list(range(N)) and list(dynamics.columns) == COLUMNS and dynamics.absent == {}
    expected = {name: [] for name in COLUMNS if name != "suspicion"}
    for i in range(N):
        losses, norms, logits, probabilities, labels = zip(*(visits[i] for visits in epochs), strict=True)
        label = labels[0]
        confidences = [p[label] for p in probabilities]
        confidence = sum(confidences) / EPOCHS
        margins = [z[label] - max(value for k, value in enumerate(z) if k != label) for z in logits]
        errors = [math.sqrt(sum((value - (k == label)) ** 2 for k, value in enumerate(p))) for p in probabilities]
        right = [z.index(max(z)) == label for z in logits]
        middle = (EPOCHS - 1) / 2
        wrong_epochs = [epoch for epoch in range(EPOCHS) if not right[epoch]]
        learned = wrong_epochs[-1] + 1 if wrong_epochs else 0
        values = {
            "visits": EPOCHS,
            "confidence": confidence,
            "variability": math.sqrt(sum((c - confidence) ** 2 for c in confidences) / EPOCHS),
            "correctness": sum(right) / EPOCHS,
            "forgetting_events": sum(a and not b for a, b in pairwise(right)),
            "learned_epoch": learned if learned < EPOCHS else math.nan,
            "aum": sum(margins) / EPOCHS,
            "el2n": sum(errors) / EPOCHS,
            "early_el2n": sum(errors[:EARLY]) / EARLY,
            "grand": sum(norms[:EARLY]) / EARLY,
            "norm_trend": sum((e - middle) * n for e, n in enumerate(norms)) / sum((e - middle) ** 2 for e in range(9)),
            "loss": sum(losses) / EPOCHS,
            "norm": sum(norms) / EPOCHS,
        }
        for name, value in values.items():
            expected[name].append(value)
    assert sum(expected["forgetting_events"]) > 0 and any(math.isnan(epoch) for epoch in expected["learned_epoch"])
    for name, values in expected.items():
        float32 = name in ("loss", "norm", "grand", "norm_trend")  # types of the columns loss and norm
        tolerance = dict(rtol=1e-6, atol=1e-7) if float32 else dict(rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(dynamics[name].double(), values, **tolerance, err_msg=name)
    assert dynamics.visits.dtype == dynamics.forgetting_events.dtype == torch.int64


def test_the_wrong_labels_come_first(dynamics):
    assert sum(i % 10 == 0 for i in dynamics.top(12).tolist()) >= 6  # of 12 wrong labels in 120
    assert dynamics.order[:8].tolist() == dynamics.top(8).tolist()  # ids are rows here
    assert dynamics.ranked_by.startswith("mean ")


def test_of_a_table_in_any_form(run, dynamics, monkeypatch):
    monkeypatch.setattr(aggregate, "AGGREGATE_EVERY", 100)
    table = sw.read_ledger(run)
    for source in (str(run), table, table.to_pandas(), table.to_pydict()):
        found = sw.dynamics(source, early_epochs=EARLY)
        assert found.ids.tolist() == dynamics.ids.tolist()
        for name, column in dynamics.columns.items():
            torch.testing.assert_close(found[name], column, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_shown_as_a_table(dynamics):
    lines = repr(dynamics).splitlines()
    assert lines[0] == f"training dynamics of 120 samples, the most suspicious first by {dynamics.ranked_by}"
    assert lines[1].split()[:3] == ["sample", "suspicion", "confidence"] and len(lines) == 13
    assert lines[3].split()[0] == str(dynamics.top(1).item())
    assert "<table>" in dynamics._repr_html_()


def test_columns_by_name_and_as_attributes(dynamics):
    assert torch.equal(dynamics.aum, dynamics["aum"]) and len(dynamics) == N
    for again in (copy.deepcopy(dynamics), pickle.loads(pickle.dumps(dynamics))):
        assert torch.equal(again.aum, dynamics.aum)
    with pytest.raises(KeyError, match=r"no column 'margin': the columns are visits, confidence, "):
        dynamics["margin"]
    with pytest.raises(AttributeError, match="no column 'margins'"):
        dynamics.margins  # noqa: B018


def test_what_a_ledger_cannot_tell():
    found = sw.dynamics({"id": ["a", "b", "a"], "loss": [1.0, 2.0, math.nan], "epoch": [0, 0, 1], "label": [1, 1, 0]})
    assert found.ids == ["a", "b"] and found.top(1) == ["b"]
    assert list(found.columns) == ["visits", "loss", "suspicion"] and found.visits.tolist() == [2, 1]
    assert found.ranked_by == "mean loss over all visits"
    assert set(found.absent) == {*COLUMNS} - {*found.columns, "norm"}
    reason = "it needs label and prediction and epoch of the visits; found no values of prediction"
    assert found.absent["learned_epoch"] == reason
    assert found.absent["confidence"] == "it needs confidence of the visits; found no values of confidence"
    with pytest.raises(KeyError, match=f"no column 'learned_epoch': {reason}"):
        found["learned_epoch"]
    assert f"no learned_epoch: {reason}" in repr(found)


def test_without_epochs_and_with_labels_of_another_type():
    visits = {"id": [1, 1], "norm": [1.0, 2.0], "label": ["cat", "cat"], "prediction": [0, 1]}
    found = sw.dynamics(visits)
    assert found.absent["grand"] == "it needs norm and epoch of the visits; found no values of epoch"
    cannot = "it needs label and prediction of the visits; found values that cannot be compared"
    assert found.absent["correctness"] == cannot
    assert sw.dynamics(visits | {"prediction": ["cat", "dog"]}).forgetting_events.tolist() == [1]


def test_samples_without_a_finite_score():
    found = sw.dynamics({"id": [1, 2], "loss": [math.nan, 1.0]})
    assert found.unknown == [1] and found.ids.tolist() == [2]
    with pytest.raises(ValueError, match="must have a finite score of at least one sample; found none"):
        sw.dynamics({"id": [1], "loss": [math.nan]})


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="early_epochs must be a positive whole number; found 0"):
        sw.dynamics({"id": [1], "loss": [1.0]}, early_epochs=0)
    with pytest.raises(TypeError, match=r"dynamics needs the visits of a run: a run directory, .* found Linear"):
        sw.dynamics(nn.Linear(1, 1))
    with pytest.raises(sw.LedgerError, match="a run must have a ledger"):
        sw.dynamics(tmp_path)
    with pytest.raises(ValueError, match="must have the column id and one of loss, norm"):
        sw.dynamics({"id": [1], "label": [1]})
    for name in ("confidence", "epoch"):
        with pytest.raises(ValueError, match=f"the column '{name}' must hold numbers; found string"):
            sw.dynamics({"id": [1], "loss": [1.0], name: ["high"]})


# ------------------------------------------------------------------------------------ other libraries


def test_to_pandas(dynamics):
    frame = dynamics.to_pandas()
    assert list(frame) == ["id", "label", "prediction", *COLUMNS] and len(frame) == N
    assert frame["aum"].tolist() == dynamics.aum.tolist() and frame["id"].tolist() == dynamics.ids.tolist()


class Dataset:
    """The methods of datasets.Dataset that are used."""

    def __init__(self, columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]

    def add_column(self, name, values):
        assert name not in self.columns and len(values) == len(self)
        return Dataset({**self.columns, name: values})


def replaced(monkeypatch, name, **content):
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_to_datasets(dynamics, monkeypatch):
    replaced(monkeypatch, "datasets", Dataset=Dataset)
    data = Dataset({"text": [str(i) for i in range(N + 1)]})
    joined = dynamics.to_datasets(data)
    assert joined.column_names == ["text", *COLUMNS] and data.column_names == ["text"]
    assert joined["aum"] == [*dynamics.aum.tolist(), None]

    reversed_ids = Dataset({"key": list(range(N))[::-1], "id": ["x"] * N})
    assert dynamics.to_datasets(reversed_ids, id="key")["aum"] == dynamics.aum.tolist()[::-1]
    named = sw.dynamics({"id": ["b", "a"], "loss": [1.0, 2.0]})
    assert named.to_datasets(Dataset({"id": ["a", "b"]}))["loss"] == [2.0, 1.0]


def test_errors_of_to_datasets(dynamics, monkeypatch):
    replaced(monkeypatch, "datasets", Dataset=Dataset)
    with pytest.raises(
        TypeError, match=r"needs a datasets.Dataset; found dict. Pass one split, such as data\['train'\]"
    ):
        dynamics.to_datasets({})
    with pytest.raises(ValueError, match=r"columns of the same names; found aum, loss. Rename them"):
        dynamics.to_datasets(Dataset({"loss": [], "aum": []}))
    with pytest.raises(ValueError, match="id must be a column of the dataset; found 'path', its columns are text"):
        dynamics.to_datasets(Dataset({"text": [""] * N}), id="path")
    with pytest.raises(ValueError, match=r"found 119 ids that is no row number, such as 1. Pass the dataset that"):
        dynamics.to_datasets(Dataset({"text": ["one row"]}))
    with pytest.raises(ValueError, match="found 120 ids that column 'id' lacks, such as 0"):
        dynamics.to_datasets(Dataset({"id": ["a"]}))


def test_to_cleanlab(run, digits, dynamics):
    arrays = dynamics.to_cleanlab()
    table = sw.read_ledger(run).to_pandas().groupby("id")[[f"probability/{k}" for k in range(10)]].mean()
    np.testing.assert_allclose(arrays["pred_probs"], table, rtol=1e-12)
    assert arrays["labels"].tolist() == digits[1].tolist() and arrays["labels"].dtype == np.int64
    np.testing.assert_allclose(arrays["pred_probs"].sum(1), 1, rtol=1e-12)
    with pytest.raises(
        ValueError, match=r"needs the probabilities of all classes; found .* sw.Ledger\(probabilities=True"
    ):
        sw.dynamics({"id": [1], "loss": [1.0], "label": [0]}).to_cleanlab()


def test_to_wandb(dynamics, monkeypatch):
    replaced(monkeypatch, "wandb", Table=lambda columns, data: SimpleNamespace(columns=columns, data=data))
    table = dynamics.to_wandb()
    assert table.columns == ["id", "label", "prediction", *COLUMNS]
    assert [row[0] for row in table.data] == dynamics.top(N).tolist()
    assert table.data[0][table.columns.index("aum")] == dynamics.aum[dynamics.order[0]].item()


@pytest.mark.parametrize(
    ("package", "convert"),
    [("pandas", Dynamics.to_pandas), ("numpy", Dynamics.to_cleanlab), ("wandb", Dynamics.to_wandb)],
)
def test_a_package_that_is_not_installed(dynamics, monkeypatch, package, convert):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"^{convert.__name__} needs {package}: pip install {package}$"):
        convert(dynamics)


def test_datasets_is_not_installed(dynamics, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"^to_datasets needs datasets: pip install datasets$"):
        dynamics.to_datasets(None)
