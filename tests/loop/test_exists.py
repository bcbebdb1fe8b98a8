"""`Trainer(exists=)`: a run directory with an earlier run."""

import re

import pytest
import torch
from small import X, Y, loader, log, make, parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import CheckpointError, PrivacyError
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.loggers import CSV, TensorBoard


def content(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    """A run with files of each kind, and one of the user's."""
    data = DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=7)
    callbacks = [ModelCheckpoint(every="2up", best=1), sw.Ledger(), CSV(), TensorBoard()]
    make(tmp_path / "a", callbacks, loss=nn.CrossEntropyLoss()).fit(data, data, epochs=2)
    (tmp_path / "a" / "report.html").write_text("old")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    return tmp_path / "a"


def test_an_error_by_default(run):
    before = content(run)
    with pytest.raises(CheckpointError) as error:
        make(run).fit(loader(), epochs=1)
    assert str(error.value) == (
        f"a new run must have an unused directory; found checkpoints in {run}. Use Trainer(..., exists='resume') to "
        "continue that run, exists='overwrite' to remove it, or exists='new' for the next free name."
    )
    assert content(run) == before


def test_resume(tmp_path):
    for epochs in (1, 2):  # the same cell, run twice
        trainer = make(tmp_path / "a", exists="resume")
        trainer.fit(loader(shuffle=True), epochs=epochs)
    whole = make(tmp_path / "b", exists="resume")
    whole.fit(loader(shuffle=True), epochs=2)
    assert torch.equal(parameters(trainer), parameters(whole)) and log(tmp_path / "a") == log(tmp_path / "b")


def test_resume_is_for_the_first_fit(tmp_path):
    """A second call continues from the state of the trainer, not from a checkpoint."""
    make(tmp_path).fit(loader(), epochs=1)
    trainer = make(tmp_path, exists="resume")
    trainer.fit(loader(), epochs=2)
    trainer.model[0].weight.data.zero_()
    trainer.fit(loader(), epochs=2)
    assert not trainer.model[0].weight.any()


def test_overwrite(run):
    trainer = make(run, exists="overwrite")
    trainer.fit(loader(), updates=1)
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    checkpoint = {f"checkpoints/update-000000001.ckpt/{name}" for name in ("state.json", *TENSOR_FILES)}
    assert names == {"run.json", "log.jsonl", "notes.txt", *checkpoint}
    assert [line["kind"] for line in log(run)] == ["train", "end"]
    trainer.fit(loader(), updates=2)  # the second call continues
    assert trainer.step.counters.updates == 2 and [line["update"] for line in log(run)] == [1, 1, 2, 2]


TENSOR_FILES = ("model.safetensors", "rank-0.safetensors")


def test_overwrite_without_an_earlier_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    make(tmp_path, exists="overwrite").fit(loader(), updates=1)
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "run.json").exists()


def test_overwrite_leaves_what_is_no_run(run):
    (run / "run.json").unlink()
    before = content(run)
    with pytest.raises(CheckpointError, match=r"removes a run, which has a run\.json; found checkpoints without it in"):
        make(run, exists="overwrite").fit(loader(), epochs=1)
    assert content(run) == before


def test_overwrite_leaves_a_folder_that_is_no_model(run):
    (run / "other.ckpt").mkdir()
    (run / "other.ckpt" / "weights.bin").write_text("mine")
    make(run, exists="overwrite").fit(loader(), updates=1)
    assert (run / "other.ckpt" / "weights.bin").exists()


def test_overwrite_leaves_a_run_of_another_version(run):
    (run / "run.json").write_text('{"format_version": 99}')
    before = content(run)
    with pytest.raises(CheckpointError, match="must have format version"):
        make(run, exists="overwrite").fit(loader(), epochs=1)
    assert content(run) == before


def test_overwrite_leaves_a_live_run(tmp_path):
    class Second:
        def on_update(self):
            with pytest.raises(CheckpointError, match="must be used by one training at a time"):
                make(tmp_path, exists="overwrite").fit(loader(), epochs=1)

    make(tmp_path, [ModelCheckpoint(every="1up"), Second()]).fit(loader(), updates=2)
    assert [line["update"] for line in log(tmp_path) if line["kind"] == "end"] == [2]


def test_files_that_cannot_be_removed(run, monkeypatch):
    def fail(path):
        raise PermissionError("not permitted")

    monkeypatch.setattr("samplewise.loop.checkpoint.io.remove_checkpoint", fail)
    with pytest.raises(CheckpointError, match=r"must be able to remove the run in .*; found: not permitted\. Choose"):
        make(run, exists="overwrite").fit(loader(), epochs=1)


def private(run, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    privacy = sw.Privacy(noise_multiplier=1.0, delta=1e-3, updates=4, sample_rate=0.3, clip=1.0)
    data = privacy.loader(TensorDataset(X, Y))
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), privacy=privacy)
    return sw.Trainer(step, run, progress=False, device="cpu", **options), data


def test_overwrite_never_forgets_what_is_spent(tmp_path):
    trainer, data = private(tmp_path)
    trainer.fit(data, updates=2)
    before = content(tmp_path)
    for start in (
        lambda: private(tmp_path, exists="overwrite"),
        lambda: (make(tmp_path, exists="overwrite"), loader()),
    ):
        trainer, data = start()
        with pytest.raises(PrivacyError) as error:
            trainer.fit(data, updates=2)
        assert str(error.value) == (
            "a private run must not be overwritten, because the privacy that it has spent would be forgotten; found "
            f"privacy.jsonl or privacy.key in {tmp_path}. Use exists='resume' to continue it, or exists='new' for "
            "another directory."
        )
        assert content(tmp_path) == before
    trainer, data = private(tmp_path)
    with pytest.raises(CheckpointError, match=r"to continue that run, or exists='new' for the next free name\."):
        trainer.fit(data, updates=2)
    trainer, data = private(tmp_path, exists="resume")
    assert trainer.fit(data, updates=4).updates == 4


def test_a_private_run_is_validated_at_its_end(tmp_path):
    trainer, data = private(tmp_path)
    result = trainer.fit(data, loader())
    assert result.updates == 4 and result.metrics == trainer.evaluate(loader())
    assert [line["update"] for line in log(tmp_path) if line["kind"] == "validation"][-1] == 4


def test_new(tmp_path):
    for name in ("a", "a-2", "a-3"):
        trainer = make(tmp_path / "a", exists="new")
        assert trainer.run == tmp_path / name  # which creates nothing
        trainer.fit(loader(), epochs=1)
        assert log(tmp_path / name)[-1]["reason"] == "1 epoch is done"
    trainer.fit(loader(), epochs=2, resume=True)  # continues its own run
    assert trainer.run == tmp_path / "a-3" and trainer.step.counters.epochs == 2


def test_new_takes_an_empty_directory(tmp_path):
    (tmp_path / "a").mkdir()
    assert make(tmp_path / "a", exists="new").run == tmp_path / "a"
    (tmp_path / "a" / "log.jsonl").touch()  # of a run without checkpoints
    (tmp_path / "a-2").touch()
    assert make(tmp_path / "a", exists="new").run == tmp_path / "a-3"


@pytest.mark.parametrize("exists", ["overwrite", "new"])
def test_resuming_contradicts_a_new_run(run, exists):
    message = f"resume=True continues the run of a directory; found exists='{exists}', which starts another one."
    before = content(run)
    with pytest.raises(ValueError, match=re.escape(message)):
        make(run, exists=exists).fit(loader(), epochs=3, resume=True)
    assert content(run) == before


def test_values(tmp_path):
    with pytest.raises(ValueError, match="exists must be one of 'error', 'resume', 'overwrite', 'new'; found 'delete'"):
        make(tmp_path, exists="delete")
    with pytest.raises(ValueError, match=r"exists='resume' needs a run directory; found none\. Use Trainer"):
        make(exists="resume")


def test_a_rehearsal_removes_nothing(run):
    before = content(run)
    make(run, exists="overwrite").fit(loader(), epochs=1, fast_dev_run=True)
    assert content(run) == before
