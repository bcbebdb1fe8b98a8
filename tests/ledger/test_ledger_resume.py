"""Ledger of a run that was stopped, failed or was killed, and resumed: no row is lost or duplicated."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import torch
from recorded_run import loader, trainer

import samplewise as sw
from samplewise.loop.checkpoint.directory import Checkpoints

SCRIPT = Path(__file__).with_name("recorded_run.py")
EPOCHS = 4


class At:
    """Callback that calls a function after one update."""

    def __init__(self, update, act):
        self.update, self.act = update, act

    def on_update(self, trainer, update):
        if update.index == self.update:
            self.act(trainer)


def explode(trainer):
    raise RuntimeError("boom")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    trainer(directory).fit(loader(), epochs=EPOCHS)
    return sw.read_ledger(directory)


def test_every_sample_once_an_epoch(whole):
    rows = whole.to_pydict()
    assert sorted(zip(rows["epoch"], rows["id"], strict=True)) == [(e, i) for e in range(EPOCHS) for i in range(50)]
    assert "margin" in rows


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("last", [0, 4, 7, 11])
def test_resumed_after_a_stop(whole, tmp_path, last):
    trainer(tmp_path, [At(last, lambda t: t.stop("enough"))]).fit(loader(), epochs=EPOCHS)
    assert sw.read_ledger(tmp_path).num_rows < whole.num_rows
    trainer(tmp_path).fit(loader(), epochs=EPOCHS, resume=True)
    assert sw.read_ledger(tmp_path).equals(whole)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("last", [1, 4, 7, 11])
def test_resumed_after_an_error(whole, tmp_path, last):
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, [At(last, explode)]).fit(loader(), epochs=EPOCHS)
    trainer(tmp_path).fit(loader(), epochs=EPOCHS, resume=True)
    assert sw.read_ledger(tmp_path).equals(whole)


def test_rows_before_an_error_are_written(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, [At(4, explode)]).fit(loader(), epochs=EPOCHS)
    assert max(sw.read_ledger(tmp_path)["update"].to_pylist()) == 4


def test_a_second_fit_of_the_same_trainer_continues(whole, tmp_path):
    first = trainer(tmp_path)
    first.fit(loader(), epochs=2)
    first.fit(loader(), epochs=EPOCHS)
    assert sw.read_ledger(tmp_path).equals(whole)


def test_resumed_from_an_older_checkpoint(whole, tmp_path):
    trainer(tmp_path).fit(loader(), epochs=2)
    newest = Checkpoints(tmp_path / "checkpoints").paths()[0]
    (newest / "state.json").write_bytes(b"broken")
    with pytest.warns(sw.CheckpointWarning):
        trainer(tmp_path).fit(loader(), epochs=EPOCHS, resume=True)
    assert sw.read_ledger(tmp_path).equals(whole)


def test_resumed_in_the_middle_of_a_window(whole, tmp_path):
    """The ids of the open window are part of the checkpoint."""

    class Leaving(torch.utils.data.Dataset):
        def __init__(self, dataset):
            self.dataset, self.left = dataset, 5

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, i):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return self.dataset[i]

    data = loader()
    left = torch.utils.data.DataLoader(Leaving(data.dataset), batch_size=8, shuffle=True)
    first = trainer(tmp_path)
    first.fit(left, epochs=EPOCHS)
    assert first.step._has_pending_samples and first.step.counters.samples == 8  # of 9
    trainer(tmp_path).fit(loader(), epochs=EPOCHS, resume=True)
    assert sw.read_ledger(tmp_path).equals(whole)


@pytest.mark.slow  # test_resumed_after_an_error: the same without processes
@pytest.mark.parametrize("kills", [[3], pytest.param([2, 5], marks=pytest.mark.slow)], ids=["once", "twice"])
def test_resumed_after_a_kill(kills, whole, tmp_path):
    def start(*parts):
        command = [sys.executable, str(SCRIPT), str(tmp_path), *map(str, parts)]
        return forks.Popen(command, stderr=subprocess.PIPE, start_new_session=True)

    for parts in kills:
        process = start(parts)
        while len(list((tmp_path / "samples").glob("*.parquet"))) < parts and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1].decode()  # the process is still running
        forks.kill(process)
        process.communicate()
    process = start()
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors.decode()
    assert sw.read_ledger(tmp_path).to_pydict().keys() == whole.to_pydict().keys()
    assert sw.read_ledger(tmp_path).select(["id", "epoch", "update"]).equals(whole.select(["id", "epoch", "update"]))
    assert sw.read_ledger(tmp_path)["loss"].to_pylist() == pytest.approx(whole["loss"].to_pylist(), rel=1e-4)


def test_resuming_with_missing_parts(tmp_path):
    trainer(tmp_path).fit(loader(), epochs=1)
    (tmp_path / "samples" / "part-000001.parquet").unlink()
    with pytest.raises(
        sw.LedgerError, match=r"all parts it had at the checkpoint to be resumed; found no .*part-000001\.parquet"
    ):
        trainer(tmp_path).fit(loader(), epochs=2, resume=True)


def test_parts_of_a_run_without_a_checkpoint_are_removed(whole, tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, [At(3, explode)], every="9ep").fit(loader(), epochs=EPOCHS)
    assert sw.read_ledger(tmp_path).num_rows
    trainer(tmp_path).fit(loader(), epochs=EPOCHS, resume=True)
    assert sw.read_ledger(tmp_path).equals(whole)


def test_a_custom_loop(tmp_path):
    def hand():
        step = trainer(None).step
        ledger = sw.Ledger(tmp_path)
        ledger.listen(step)
        return step, ledger

    batches = list(loader())
    step, ledger = hand()
    for update in step.over(batches):
        ledger.add(update)
    states = step.state_dict(), ledger.state_dict()
    for update in step.over(batches):
        ledger.add(update)
    ledger.flush()
    assert sw.read_ledger(tmp_path).num_rows == 100
    step, ledger = hand()
    step.load_state_dict(states[0])
    ledger.load_state_dict(states[1])
    for update in step.over(batches):
        ledger.add(update)
    rows = ledger.read().to_pydict()
    assert rows["epoch"] == [0] * 50 + [1] * 50 and rows["id"][:50] == rows["id"][50:]


def test_fast_dev_run_writes_nothing(tmp_path):
    rehearsal = sw.Trainer(trainer(None).step, tmp_path / "run", [sw.Ledger()], progress=False)
    rehearsal.fit(loader(), epochs=1, fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_a_trainer_without_a_directory():
    with pytest.raises(ValueError, match="a ledger must have a run directory"):
        sw.Trainer(trainer(None).step, None, [sw.Ledger()], progress=False).fit(loader(), epochs=1)
