"""Parts of the scripts of `make evidence`, in small; their tables are in docs/evidence.md."""

import json
import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import samplewise as sw

ROOT = Path(__file__).parents[1]
PLACES = [ROOT / "benchmarks/evidence", ROOT / "benchmarks", ROOT / "examples"]


@pytest.fixture
def scripts(monkeypatch):
    """Import a script by its name; modules of these directories are forgotten afterwards."""
    for place in reversed(PLACES):
        monkeypatch.syspath_prepend(str(place))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in PLACES:
            del sys.modules[name]


def test_a_recorded_run_is_not_made_again(scripts, tmp_path):
    record = scripts("record")
    path = tmp_path / "new" / "runs.jsonl"
    first = record.Record(path)
    assert first.run("a", lambda: {"loss": 1.5}) == {"loss": 1.5}
    second = record.Record(path)
    assert second.run("a", pytest.fail) == {"loss": 1.5}
    assert second.run("b", lambda: {"loss": 2.5}) == {"loss": 2.5}
    assert second.seconds("a") == first.seconds("a") >= 0
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_step_equals_the_plain_loop_of_nanogpt(scripts, tmp_path):
    nanogpt = scripts("nanogpt")
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (k * k // 7) % 23) for k in range(2000)))
    models = {}
    for name in ("plain loop", "sw.Step"):
        setup = nanogpt.Setup.of(text)
        assert len([*islice(nanogpt.LOOPS[name](setup, tmp_path), 3)]) == 3
        models[name] = setup.model.state_dict()
    start = nanogpt.Setup.of(text).model.state_dict()
    assert all(torch.equal(p, models["plain loop"][key]) for key, p in models["sw.Step"].items())
    assert not any(torch.equal(p, start[key]) for key, p in models["sw.Step"].items())
    rates = [nanogpt.RATE * nanogpt.rate_of(update) for update in (0, 100, 1050, 2000)]
    assert rates == pytest.approx([1e-3 / 101, 1e-3, 5.5e-4, 1e-4])


# 820 imports peft and transformers.
@pytest.mark.parametrize(
    "number", [841, 505, pytest.param(820, marks=pytest.mark.slow), 578, 462, 646, 588, 248, 270, 219]
)
def test_models_of_issues(scripts, number):
    issues = scripts("open_issues")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert [issues.COLUMNS["samplewise"](case).word for *_, n, case in issues.ISSUES if n == number] == ["right"]
    finally:
        torch.set_default_dtype(default)


def test_parameters_that_were_replaced():
    """The situation of Opacus #820: hooks and optimizer hold parameters that the model no longer uses."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 3))
    adapters = [p for p in model.parameters() if p.requires_grad]
    step = sw.Step(model, torch.optim.SGD(adapters, lr=0.1), torch.nn.CrossEntropyLoss(), transforms=[sw.clip(1.0)])
    for name, p in list(model[1].named_parameters()):
        setattr(model[1], name, torch.nn.Parameter(p.detach().clone()))
    with (
        pytest.warns(sw.TrainingWarning, match=r"parameters that the optimizer does not have: 1\.weight, 1\.bias"),
        pytest.raises(sw.GraphError, match=r"at least one of the parameters; found none of them in the graph"),
    ):
        step.run([(torch.randn(5, 4), torch.arange(5) % 3)])


def test_votes_and_places(scripts, tmp_path):
    wrong_labels = scripts("wrong_labels")
    votes = [(4, 1), (2, 3), (3, 2), (0, 4)]
    images = [
        {"id": 10 + k, "given_original_label": k, "mturk": {"given": given, "guessed": guessed, "neither": 0}}
        for k, (given, guessed) in enumerate(votes)
    ]
    path = tmp_path / "votes.json"
    path.write_text(json.dumps(images))
    labels = torch.cat([torch.zeros(10), torch.arange(4)])
    wrong, looked_at = wrong_labels.votes(path, labels)
    assert wrong == {11, 13} and looked_at == {10, 11, 12, 13}
    assert wrong_labels.places([5, 13, 10, 11], wrong) == [2, 4]
    with pytest.raises(ValueError, match="must have votes on the labels of the MNIST test set; found other labels"):
        wrong_labels.votes(path, labels + 1)


def test_fit_of_the_critical_batch_size(scripts):
    batch_size = scripts("batch_size")
    sizes = (16, 64, 256, 1024)
    exact = [batch_size.Row(size, 0.1, 200 * (1 + 256 / size), 0, 0, []) for size in sizes]
    fitted = batch_size.fit(exact)
    assert (fitted.updates, fitted.critical) == pytest.approx((200, 256))
    assert max(fitted.updates_error, fitted.samples_error, fitted.critical_error) < 1e-6
    # Errors of the linear regression of log S on its two parameters, by the normal equations.
    noisy = [
        replace(row, updates=row.updates * noise) for row, noise in zip(exact, (1.1, 0.9, 1.05, 0.97), strict=True)
    ]
    fitted = batch_size.fit(noisy)
    design = torch.tensor([[1, fitted.critical / (size + fitted.critical)] for size in sizes], dtype=torch.float64)
    left = [math.log(row.updates / (fitted.updates * (1 + fitted.critical / row.size))) for row in noisy]
    covariance = sum(r * r for r in left) / 2 * torch.linalg.inv(design.T @ design)
    wanted = [covariance[0, 0], covariance.sum(), covariance[1, 1]]
    errors = [fitted.updates_error, fitted.samples_error, fitted.critical_error]
    assert errors == pytest.approx([math.sqrt(value) for value in wanted])


def test_tables_of_batch_sizes_are_read(scripts):
    critical_batch = scripts("critical_batch")
    text = (ROOT / "docs/batch-size.md").read_text()
    for key in critical_batch.TABLES.values():
        rows = critical_batch.rows_of(text, key)
        assert [row.size for row in rows] == [16, 32, 64, 128, 256, 512, 1024, 2048]
        assert all(row.samples == pytest.approx(row.size * row.updates, rel=2e-3) for row in rows)
    with pytest.raises(ValueError, match=r"must have the table other; found none\. Run `make batch-size`"):
        critical_batch.rows_of(text, "other")
