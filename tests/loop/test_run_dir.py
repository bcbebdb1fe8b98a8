"""Files of a run directory and their format version."""

import json
import re
from pathlib import Path

import pytest
import torch
from small import X, Y, loader, make

import samplewise as sw
from samplewise.errors import CheckpointError
from samplewise.loop.callbacks import EarlyStopping, ModelCheckpoint


def run_json(run):
    return json.loads((run / "run.json").read_text())


def test_run_json_has_a_format_version(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    assert run_json(tmp_path)["format_version"] == 2
    assert not list(tmp_path.glob(".*"))


NEWER = "it was written by a newer one; upgrade with pip install --upgrade samplewise."
OTHER = "use the version that wrote it, or start a new run directory."


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("version", "shown", "remedy"),
    [(3, "3", NEWER), (1, "1", OTHER), ("2", "'2'", OTHER), (True, "True", OTHER), (None, "none", OTHER)],
)
def test_another_version_is_refused_before_anything_is_changed(tmp_path, version, shown, remedy, resume):
    make(tmp_path).fit(loader(), epochs=1)
    about = {**run_json(tmp_path), "format_version": version}
    (tmp_path / "run.json").write_text(json.dumps(about))
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as error:
        make(tmp_path).fit(loader(), epochs=2, resume=resume)
    assert str(error.value) == (
        f"{tmp_path / 'run.json'} must have format version 2; found {shown}, which this version of samplewise does "
        f"not read: {remedy}"
    )
    assert run_json(tmp_path) == about and (tmp_path / "log.jsonl").read_bytes() == log
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("content", ["[]", "{}", '"text"'])
def test_a_run_json_without_a_version_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json must have format version 2; found none, which this version"):
        make(tmp_path).fit(loader(), epochs=1)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_a_run_json_that_is_no_json_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json must be readable JSON; found \w+: .* Restore it from a"):
        make(tmp_path).fit(loader(), epochs=1)


# --------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize("resume", ["yes", "runs/a/checkpoints/update-000000003.ckpt", None, 1])
def test_resume_is_true_or_false(tmp_path, resume):
    message = re.escape(f"resume must be True or False; found {resume!r}. The run to continue is that of Trainer(")
    with pytest.raises(ValueError, match=message):
        make(tmp_path).fit(loader(), epochs=1, resume=resume)


def test_resume_needs_a_run_directory():
    with pytest.raises(ValueError, match="resume=True needs a run directory; found none"):
        make().fit(loader(), epochs=1, resume=True)


@pytest.mark.parametrize("run", ["", 3, b"runs", Path])
def test_run_is_a_path(run):
    with pytest.raises(ValueError, match=re.escape(f"run must be the path of a directory, or None; found {run!r}.")):
        make(run)


@pytest.mark.parametrize("seed", [None, 1.5, "1", True])
def test_the_seed_is_an_int(seed):
    with pytest.raises(ValueError, match=f"^seed must be an int; found {seed!r}.$"):
        make(seed=seed)


def test_a_checkpoint_is_no_run_directory(tmp_path):
    run = tmp_path / "run"
    make(run).fit(loader(), epochs=1)
    there = sorted(run.rglob("*"))
    checkpoints = {
        "a checkpoint": run / "checkpoints" / "update-000000003.ckpt",
        "the checkpoints of a run": run / "checkpoints",
    }
    for found, path in checkpoints.items():
        with pytest.raises(CheckpointError) as error:
            make(path).fit(loader(), epochs=2, resume=True)
        assert str(error.value).startswith(
            f"run must be a run directory; found {found}, {path}. Pass the run directory,"
        )
        assert f"such as {run}. " in str(error.value)
    assert sorted(run.rglob("*")) == there


@pytest.mark.parametrize("name", ["", "a/b", "../b", "..", 3, None])
def test_names_of_saved_models(tmp_path, name):
    with pytest.raises(ValueError, match="the name of a saved model must be a file name without a path; found"):
        make(tmp_path / "run").save_model(name)
    assert not list(tmp_path.iterdir())


def test_a_model_may_be_saved_before_the_first_fit(tmp_path):
    trainer = make(tmp_path / "runs" / "new")
    saved = sw.load_checkpoint(trainer.save_model("initial"))["model"]
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    assert trainer.fit(loader(), epochs=1).reason == "1 epoch is done"


@pytest.mark.parametrize("options", [{"best": 1}, {"every": "2up"}, {}])
def test_checkpoints_without_a_run_directory_are_refused_at_once(options):
    updates = []

    class Counts:
        def on_update(self, update):
            updates.append(update)

    with pytest.raises(CheckpointError, match=r"ModelCheckpoint needs a run directory; found none\. Use Trainer"):
        make(None, [Counts(), ModelCheckpoint(**options)]).fit(loader(), epochs=1)
    assert not updates


@pytest.mark.parametrize("reason", [None, "", 3])
def test_a_stop_has_a_reason(reason):
    class Stops:
        def on_update(self, trainer):
            trainer.stop(reason)

    with pytest.raises(ValueError, match="the reason for a stop must be a text that is not empty; found"):
        make(None, [Stops()]).fit(loader(), epochs=1)


@pytest.mark.parametrize("min_delta", [-1, "a", None, float("nan")])
def test_an_improvement_is_a_number(min_delta):
    with pytest.raises(ValueError, match="min_delta must be a number, 0 or more; found"):
        EarlyStopping(min_delta=min_delta)


# -------------------------------------------------------------------------------------------------------------- repr


def test_reprs_say_what_they_are(tmp_path):
    trainer = make(tmp_path)
    assert repr(trainer.step) == "Step(Sequential, SGD, loss_fn, samples=10)"
    assert repr(trainer) == f"Trainer({trainer.step!r}, run '{tmp_path}', 0 epochs, 0 updates)"
    trainer.fit(loader(), epochs=1)
    assert repr(trainer).endswith("1 epoch, 3 updates)")
    assert repr(make()).endswith("no run directory, 0 epochs, 0 updates)")
    model = torch.nn.Linear(6, 3)
    step = sw.Step(
        model, sw.sgd(0.1), torch.nn.CrossEntropyLoss(), microbatch=4, transforms=[sw.clip(1.0), sw.noise(0.1)]
    )
    assert repr(step) == (
        "Step(Linear, GradientDescent, CrossEntropyLoss, microbatch=4, transforms=chain(clip(1.0), noise(0.1)))"
    )
    [update] = step((X[:4], Y[:4]))
    assert repr(update).startswith("Update(index=0, samples=4, loss=")
    assert repr(step.run([(X[:1], Y[:1])])).startswith("Totals(updates=1, samples=1, loss=")
    assert repr(sw.Ledger()) == "Ledger(the run directory of the trainer, columns id, 0 unwritten rows)"
    ledger = sw.Ledger(tmp_path / "mine", id=2, columns={"label": 1})
    assert repr(ledger) == f"Ledger('{tmp_path}/mine', columns label=1, id=2, 0 unwritten rows)"
