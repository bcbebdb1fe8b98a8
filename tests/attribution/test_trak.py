"""TRAK against the formula on rows of the plain loop, and its arguments."""

import runpy
from pathlib import Path

import pytest
import torch
from plain_loop import batches, make, rows
from projection_matrix import projection

import samplewise as sw

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def by_formula(models, x, y, queries, dim, damping, seed=0):
    total, weights = 0, 0
    for k, model in enumerate(models):
        matrix = projection(model, dim, seed + k)
        features, of_queries = (rows(model, *data, sw.attribution.margin) @ matrix for data in ((x, y), queries))
        gram = features.T @ features
        damped = gram + damping * gram.trace() / dim * torch.eye(dim)
        total = total + of_queries @ torch.linalg.inv(damped) @ features.T
        weights = weights + torch.sigmoid(-sw.attribution.margin(model, (x, y)).detach())
    return total * weights / len(models) ** 2


@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_formula(count, damping):
    models = [make(n=40, seed=seed)[0] for seed in range(count)]
    _, x, y = make(n=40)
    queries = x[:7] + 0.3, y[:7]
    found = sw.trak(models, sw.attribution.margin, batches(x, y, 9), batches(*queries, 4), 16, damping=damping)
    wanted = by_formula(models, x, y, queries, 16, damping).float()
    assert found.shape == (7, 40)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_one_model_and_a_generator(tmp_path):
    models = [make(n=40, seed=seed)[0] for seed in range(2)]
    _, x, y = make(n=40)
    train, queries = batches(x, y, 9), batches(x[:3], y[:3], 2)
    together = sw.trak(models, sw.attribution.margin, train, queries, 16)
    assert torch.equal(sw.trak(models, sw.attribution.margin, train, queries, 16, damping=0.1), together)  # the default
    in_a_module = torch.nn.ModuleList(models)
    torch.testing.assert_close(sw.trak(in_a_module, sw.attribution.margin, train, queries, 16), together)
    half = sw.trak(models, sw.attribution.margin, train, queries, 16, dtype="float16")
    assert 0 < (half - together).abs().max() < 0.01 * together.abs().max()
    model = make()[0]

    def loaded():
        for each in models:
            model.load_state_dict(each.state_dict())
            yield model

    torch.testing.assert_close(sw.trak(loaded(), sw.attribution.margin, train, queries, 16), together)
    torch.testing.assert_close(
        sw.trak(models[0], sw.attribution.margin, train, queries, 16),
        sw.trak(models[:1], sw.attribution.margin, train, queries, 16),
    )
    assert not torch.allclose(sw.trak(models, sw.attribution.margin, train, queries, 16, seed=5), together)


def test_models_can_be_added_to_a_path(tmp_path):
    """An ensemble of the first models can be scored from the same store."""
    models = [make(n=40, seed=seed)[0] for seed in range(3)]
    _, x, y = make(n=40)
    train, queries = batches(x, y, 9), batches(x[:3], y[:3], 2)
    calls = []

    def output_fn(model, batch):
        calls.append(len(batch[0]))
        return sw.attribution.margin(model, batch)

    first = sw.trak(models[:1], output_fn, train, queries, 16, directory=tmp_path)
    assert sum(calls) == 43
    calls.clear()
    together = sw.trak(models, output_fn, train, queries, 16, directory=tmp_path)
    assert sum(calls) == 1 + 2 * 40 + 3 * 3  # the first sample of the first model is compared
    torch.testing.assert_close(together, sw.trak(models, sw.attribution.margin, train, queries, 16))
    torch.testing.assert_close(sw.trak(models[:1], output_fn, train, queries, 16, directory=tmp_path), first)


def test_an_interrupted_call_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("samplewise.attribution.projected_features.ELEMENTS_PER_WRITE", 1)
    models = [make(n=40, seed=seed)[0] for seed in range(2)]
    _, x, y = make(n=40)
    train, queries = batches(x, y, 9), batches(x[:3], y[:3], 2)
    calls = []
    limit = 10  # the third batch of the second model, after 5 batches of the first one and 2 of queries

    def output_fn(model, batch):
        calls.append(len(batch[0]))
        if len(calls) == limit:
            raise RuntimeError("interrupted")
        return sw.attribution.margin(model, batch)

    with pytest.raises(RuntimeError, match="interrupted"):
        sw.trak(models, output_fn, train, queries, 16, directory=tmp_path)
    calls.clear()
    limit = None
    found = sw.trak(models, output_fn, train, queries, 16, directory=tmp_path)
    assert sum(calls) == 2 + (40 - 18) + 2 * 3  # first samples, the rest of the second model, queries
    torch.testing.assert_close(found, sw.trak(models, sw.attribution.margin, train, queries, 16))


def test_refusals(tmp_path):
    model, x, y = make(n=40)
    train = batches(x, y, 9)
    with pytest.raises(ValueError, match="models must differ; found one with the parameters of an earlier one"):
        sw.trak([model, model], sw.attribution.margin, train, train, 16)
    with pytest.raises(ValueError, match="models must be a model, or at least one model in a list; found none"):
        sw.trak([], sw.attribution.margin, train, train, 16)
    for run in ("runs/a", ["runs/a"]):
        with pytest.raises(TypeError, match=r"models must be a model, .*; found str\. For the checkpoints of a run"):
            sw.trak(run, sw.attribution.margin, train, train, 16)
    with pytest.raises(ValueError, match="train must be a loader or a list, because it is iterated more than once"):
        sw.trak(model, sw.attribution.margin, iter(train), train, 16)
    with pytest.raises(sw.LossesError, match=r"output_fn must return outputs \(B,\), or \(outputs, weights\); found"):
        sw.trak(model, lambda model, batch: model(batch[0]), train, train, 16)
    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
    with pytest.raises(
        ValueError, match=r"must keep the order of its dataset; found one that shuffles. Use shuffle=False"
    ):
        sw.trak(model, sw.attribution.margin, shuffled, train, 16)
    sw.trak(model, sw.attribution.margin, train, train, 16, directory=tmp_path)
    with pytest.raises(sw.StoreError, match="needs the same samples, in the same order"):
        sw.trak(model, sw.attribution.margin, train[::-1], train, 16, directory=tmp_path)


def test_equals_traker_on_the_same_projection(tmp_path):
    pytest.importorskip("trak", reason="needs traker")
    compare = runpy.run_path(str(BENCHMARKS / "attribution_trak_peers.py"))["compare"]
    for models, damping in ((1, 0.0), (1, 0.1), (3, 0.1)):
        assert compare(tmp_path / f"{models}-{damping}", models, damping, dim=32, train=200, queries=20) < 1e-4
