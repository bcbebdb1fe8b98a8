"""`sw.attribution.attribute` and the files of its results. tests/cli/test_cli_attribute.py compares its scores."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import AttributionResults, attribute, attribution_results
from samplewise.errors import BatchError, CheckpointError


def data(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


TRAIN, VALIDATION = data(24, 1), data(9, 2)
LOADERS = DataLoader(TRAIN, batch_size=8, shuffle=True), DataLoader(VALIDATION, batch_size=4, shuffle=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run of two epochs."""
    run = tmp_path_factory.mktemp("runs") / "net"
    model = network()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss())
    sw.Trainer(step, run, progress=False, device="cpu").fit(LOADERS[0], epochs=2)
    return run


def run_attribute(run, **arguments):
    return attribute(network(), nn.CrossEntropyLoss(), *LOADERS, run, **arguments)


def test_scores_are_those_of_influence_and_the_model_is_restored(trained):
    model = network().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = attribute(model, nn.CrossEntropyLoss(), *LOADERS, trained, queries=[7, 2])
    paths = sorted((trained / "checkpoints").glob("*.ckpt"))
    checkpoints = [(sw.load_checkpoint(path)["model"], 0.5) for path in paths]
    queries = [VALIDATION[[7, 2]]]
    expected = sw.influence(network(), nn.CrossEntropyLoss(), [TRAIN.tensors], queries, checkpoints)
    assert (results.queries, results.samples) == ([7, 2], list(range(24)))
    assert results.scores.dtype == torch.float64
    torch.testing.assert_close(results.scores, expected)
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "recipe" not in results.settings and results.settings["method"] == "influence"


def test_save_and_load(trained, tmp_path):
    results = run_attribute(trained, queries="worst", limit=3, method="trak", dim=5)
    results.save(tmp_path / "there" / "results")
    assert sorted(path.name for path in (tmp_path / "there" / "results").iterdir()) == [
        "attribution.html",
        "attribution.json",
        "scores.parquet",
    ]
    loaded = AttributionResults.load(tmp_path / "there" / "results")
    assert (loaded.queries, loaded.samples, loaded.page) == (results.queries, results.samples, results.page)
    assert loaded.settings == results.settings and loaded.settings["dim"] == 5
    assert loaded.scores.dtype == results.scores.dtype and torch.equal(loaded.scores, results.scores)


def test_scores_that_were_not_written_are_nan(trained, tmp_path, monkeypatch):
    results = run_attribute(trained, queries=[0, 1])
    monkeypatch.setattr(attribution_results, "MAX_ROWS", 20)
    monkeypatch.setattr(attribution_results, "KEPT", 2)
    results.save(tmp_path)
    loaded = AttributionResults.load(tmp_path)
    kept = ~loaded.scores.isnan()
    assert kept.sum(1).tolist() == [4, 4]
    best = int(results.scores[0].argmax())
    assert repr(loaded).splitlines()[0].startswith("training samples that help each query most, by influence, of ")
    assert repr(loaded).splitlines()[3].startswith(f"0      {results.samples[best]} ({results.scores[0, best]:.3g}), ")
    assert loaded._repr_html_().count("<tr>") == 3
    assert torch.equal(loaded.scores[kept], results.scores[:, loaded.samples][kept])
    assert loaded.scores[0].nan_to_num(-torch.inf).max() == results.scores[0].max()


def test_refine_of_a_run_without_a_rule_has_the_default_damping(tmp_path):
    model = network()
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    sw.Trainer(step, tmp_path, progress=False, device="cpu").fit(LOADERS[0], epochs=2)
    results = run_attribute(tmp_path, queries=[3, 1], method="ekfac", refine=40)
    queries, curvature = [VALIDATION[[3, 1]]], sw.ekfac(model, nn.CrossEntropyLoss(), LOADERS[0])
    matrix = sw.attribution.GaussNewton(model, nn.CrossEntropyLoss(), [TRAIN.tensors], curvature, 40, damping=10)
    expected = sw.influence(model, nn.CrossEntropyLoss(), [TRAIN.tensors], queries, curvature=matrix)
    torch.testing.assert_close(results.scores, expected)
    assert results.settings["damping"].endswith(f"= 10 * mean eigenvalue {matrix.mean_eigenvalue:.3g}")
    assert results.notes == ()


@pytest.mark.parametrize("damage", ["nothing there", "not json", "another format", "another file"])
def test_other_files_are_refused(trained, tmp_path, damage):
    if damage != "nothing there":
        run_attribute(trained, queries=[0]).save(tmp_path)
    index = tmp_path / "attribution.json"
    if damage == "not json":
        index.write_text("[")
    elif damage == "another format":
        index.write_text(json.dumps({**json.loads(index.read_text()), "format_version": 2}))
    elif damage == "another file":
        path = tmp_path / "scores.parquet"
        path.write_bytes(path.read_bytes() + b"x")
    message = "found another checksum" if damage == "another file" else "must be a directory of AttributionResults.save"
    with pytest.raises(ValueError, match=message):
        AttributionResults.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": [-1]}, r"queries must be indices of validation samples such as .*; found \[-1\]"),
        ({"queries": [9]}, "queries must be indices of validation samples, 0 to 8; found 9"),
        ({"limit": 0}, "limit must be an integer, 1 or more; found 0"),
        ({"top": 1.5}, "top must be an integer, 1 or more; found 1.5"),
        (
            {"method": "trac"},
            "method must be one of influence, trak, ekfac, metagradient; found 'trac'. Did you mean 'trak'",
        ),
        ({"dim": 8}, "dim must be used with method trak; found influence"),
        ({"method": "trak", "damping": 0.0}, "damping must be a positive number; found 0.0"),
        ({"method": "ekfac", "refine": 0}, "refine must be an integer, 1 or more; found 0"),
        ({"method": "trak", "refine": 5}, "refine must be used with method ekfac; found trak"),
        ({"method": "ekfac", "checkpoints": 2}, "checkpoints must be one with method ekfac; found 2"),
        ({"trust": "nowhere"}, "trust must be a directory with a measured quality: nowhere.lds.json must be"),
    ],
)
def test_wrong_arguments(trained, arguments, message):
    with pytest.raises(ValueError, match=message):
        run_attribute(trained, **arguments)


def test_a_run_without_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="a run must be a directory with a readable checkpoint of a trained"):
        run_attribute(Path(tmp_path))


def test_data_without_queries(trained):
    with pytest.raises(BatchError, match="queries are samples of the validation loader; found none"):
        attribute(network(), nn.CrossEntropyLoss(), LOADERS[0], None, trained)


class HoldsTheModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, model, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")


def test_a_loss_that_holds_the_model_is_not_copied(trained):
    model = network()
    loss = HoldsTheModel(model).train()
    found = attribute(model, loss, *LOADERS, trained, queries=[7, 2])
    torch.testing.assert_close(found.scores, run_attribute(trained, queries=[7, 2]).scores)
    assert loss.training and model.training
