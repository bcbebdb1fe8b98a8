"""callbacks.Quarantine: the file with the samples that a guard has dropped."""

import json
import re
from math import isfinite

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import CheckpointError, TrainingWarning
from samplewise.loop.quarantine import finite_json
from samplewise.report.page import write_report

BAD = {7: "loss", 31: "gradient", 50: "norm", 51: "norm"}
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def loss_fn(model, batch):
    outputs = model(batch[0])
    root = (model[2].bias[0].square().clamp(min=1e-12) * (batch[0][:, 0] - 9.0).abs()).sqrt() * (batch[0][:, 0] == 9.0)
    return (outputs.squeeze(1) - batch[1]).square() + root


def trained(run, updates, resume=False, indexed=True, callbacks=None, transforms=None, **options):
    torch.manual_seed(0)
    x, y = torch.randn(200, 6), torch.randn(200)
    x[7, 2] = torch.nan
    x[31, 0] = 9.0
    y[50:52] = 1e5
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Dropout(0.1), nn.Linear(8, 1))
    model = nn.Sequential(model[0], model[1], model[3])
    data = TensorDataset(x, y)
    loader = DataLoader(sw.Indexed(data) if indexed else data, batch_size=25, shuffle=True)
    transforms = [sw.guard(window="40up")] if transforms is None else transforms
    step = sw.Step(model, torch.optim.Adam(model.parameters(), 1e-2), loss_fn, samples=20, transforms=transforms)
    callbacks = [sw.callbacks.Quarantine()] if callbacks is None else callbacks
    callbacks = [*callbacks, sw.callbacks.ModelCheckpoint("5up")]
    trainer = sw.Trainer(step, run, callbacks, progress=False, device="cpu", **options)
    trainer.fit(loader, updates=updates, resume=resume)
    return trainer


def lines(run):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run / "quarantine.jsonl").read_text().splitlines()]


def test_each_dropped_sample_is_a_line(tmp_path):
    trainer = trained(tmp_path, 60, callbacks=[sw.callbacks.Quarantine(), sw.Ledger()])
    found = lines(tmp_path)
    ledger = sw.read_ledger(tmp_path).to_pandas()
    visits = ledger[ledger["weight"] == 0]
    assert [(line["update"], line["id"]) for line in found] == list(zip(visits["update"], visits["id"], strict=True))
    assert {line["id"]: line["reason"] for line in found} == BAD
    assert {line["layer"] for line in found if line["reason"] == "loss"} == {None}
    assert {line["layer"] for line in found if line["reason"] == "gradient"} == {"2.bias"}
    assert {line["layer"] for line in found if line["reason"] == "norm"} <= set(NAMES)
    for line, loss, norm in zip(found, visits["loss"], visits["norm"], strict=True):
        assert line["loss"] == (pytest.approx(loss, rel=1e-6) if isfinite(loss) else None)
        assert line["norm"] == (pytest.approx(norm, rel=1e-6) if isfinite(norm) else None)
        assert 0 <= line["position"] < 20
        assert line["rank"] == 0
    shown = [line["id"] for line in found if line["preview"]]
    assert sorted(shown) == sorted(BAD)  # once each
    preview = next(line["preview"] for line in found if line["id"] == 7)
    assert preview["values"]["2"] == "nan"
    assert trainer.step.counters.skipped == 0


def test_the_largest_layer_is_that_of_the_gradient(tmp_path):
    seen = []

    class Watch:
        def on_update(self, update, model):
            if update.dropped.any():
                seen.append(update.index)
            else:
                self.before = [p.detach().clone() for p in model.parameters()]

    trained(tmp_path, 60, callbacks=[sw.callbacks.Quarantine(), Watch()])
    norms = [line for line in lines(tmp_path) if line["reason"] == "norm"]
    torch.manual_seed(0)
    x, y = torch.randn(200, 6), torch.randn(200)
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))
    # The output's bias gets 2(f - y), its weight that times the hidden units, of norm above 1.
    assert all(line["layer"] in ("2.weight", "0.weight") for line in norms)
    gradient = torch.autograd.grad((model(x[50:51]).squeeze() - 1e5).square(), list(model.parameters()))
    largest = max(range(4), key=lambda k: float(gradient[k].norm()))
    assert norms[0]["layer"] == NAMES[largest]
    assert norms[0]["norm"] > 50 * F.mse_loss(y, torch.zeros(200))


def test_a_resumed_run_has_the_same_file(tmp_path):
    whole = trained(tmp_path / "whole", 60)
    trained(tmp_path / "parts", 33)
    with (tmp_path / "parts" / "quarantine.jsonl").open("a") as file:
        file.write('{"update": 40, "id": 3')
    resumed = trained(tmp_path / "parts", 60, resume=True)
    assert (tmp_path / "parts" / "quarantine.jsonl").read_bytes() == (
        tmp_path / "whole" / "quarantine.jsonl"
    ).read_bytes()
    assert resumed.step.state_dict()["transforms"] == whole.step.state_dict()["transforms"]
    for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_second_fit_continues_the_file_and_a_new_run_replaces_it(tmp_path):
    trainer = trained(tmp_path, 30)
    before = lines(tmp_path)
    trainer.fit(trainer.loader, updates=60)
    assert lines(tmp_path)[: len(before)] == before
    assert len(lines(tmp_path)) > len(before)
    trained(tmp_path, 20, exists="overwrite")
    assert max(line["update"] for line in lines(tmp_path)) < 20


def test_samples_without_ids_have_their_position(tmp_path):
    trained(tmp_path, 40, indexed=False)
    found = lines(tmp_path)
    assert found
    assert all(line["id"] is None and line["preview"] is None for line in found)
    report = write_report(tmp_path).read_text()
    assert f"{found[0]['position']} of update {found[0]['update']}" in report


def test_previews_are_optional_and_their_errors_are_warnings(tmp_path):
    trained(tmp_path / "none", 20, callbacks=[sw.callbacks.Quarantine(show=False)])
    assert all(line["preview"] is None for line in lines(tmp_path / "none"))
    trained(tmp_path / "own", 20, callbacks=[sw.callbacks.Quarantine(show=lambda id: f"sample {id}")])
    assert lines(tmp_path / "own")[0]["preview"] == {"text": f"sample {lines(tmp_path / 'own')[0]['id']}"}
    with pytest.warns(TrainingWarning, match="samples must be accessible by id to be shown; found KeyError"):
        trained(tmp_path / "error", 20, callbacks=[sw.callbacks.Quarantine(show={}.__getitem__)])


def test_the_report_lists_samples_by_the_number_of_times(tmp_path):
    trained(tmp_path, 60)
    report = write_report(tmp_path).read_text()
    section = report[report.index('<section id="quarantine">') :].partition("</section>")[0]
    found = lines(tmp_path)
    assert f"4 samples got weight 0, {len(found)} times in all" in section
    rows = re.findall(r"<tr><td>(\d+)</td><td>(\w+)</td>.*?</tr>", section)
    assert dict(rows) == {str(id): reason for id, reason in BAD.items()}
    assert section.count('class="card"') == 4
    trained(tmp_path / "clean", 5, callbacks=[])
    assert 'id="quarantine"' not in write_report(tmp_path / "clean").read_text()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"transforms": [sw.clip(1.0)]},
            ValueError,
            "Quarantine needs a step with sw.guard; found transforms=chain(clip",
        ),
        ({"run": None, "callbacks": [sw.callbacks.Quarantine()]}, CheckpointError, "Quarantine needs a run directory"),
    ],
)
def test_what_is_missing(tmp_path, options, error, message):
    if "run" in options:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), transforms=[sw.guard()])
        trainer = sw.Trainer(step, None, options["callbacks"], progress=False, device="cpu")
        with pytest.raises(error) as raised:
            trainer.fit([(torch.randn(4, 6), torch.randn(4, 1))], epochs=1)
    else:
        with pytest.raises(error) as raised:
            trained(tmp_path, 5, **options)
    assert message in str(raised.value)


def test_bad_arguments():
    with pytest.raises(TypeError, match="show must be a function of the id, None or False; found 3"):
        sw.callbacks.Quarantine(show=3)
    assert finite_json({"a": [1.0, float("nan")], "b": (float("-inf"), "x")}) == {"a": [1.0, "nan"], "b": ["-inf", "x"]}
