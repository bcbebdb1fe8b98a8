"""State after an error in fit, after a full disk, and after a signal."""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from small import X, Y, loader, log, make, parameters
from test_resume import assert_same, ended, running, to_the_end

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.loop.callbacks import ModelCheckpoint


class Boom(Exception):
    pass


class Raising:
    def __init__(self, event):
        def boom():
            raise Boom

        setattr(self, event, boom)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(
    "event", ["on_fit_start", "on_epoch_start", "on_update", "on_log", "on_epoch_end", "on_fit_end"]
)
def test_a_callback_that_raises_leaves_nothing_open(tmp_path, event):
    told = []

    class Told:
        def on_error(self, error):
            told.append(type(error))

    trainer = make(tmp_path, [Raising(event), Told()], log_every="1up")
    modes = [module.training for module in trainer.model.modules()]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Boom):
        trainer.fit(loader(), validate=loader(), epochs=1)
    assert told == [Boom]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert [module.training for module in trainer.model.modules()] == modes
    assert trainer._files._log is None
    if Path("/proc/self/fd").exists():
        assert not [link for link in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "log.jsonl" in link]


def test_a_metric_that_raises_leaves_the_modes(tmp_path):
    def boom(outputs, batch):
        raise Boom

    trainer = make(metrics={"boom": boom})
    with pytest.raises(Boom):
        trainer.fit(loader(), validate=loader(), epochs=1)
    assert all(module.training for module in trainer.model.modules())


def test_fit_continues_after_a_callback_raised():
    class Once:
        raised = False

        def on_update(self, update):
            if update.index == 1 and not self.raised:
                self.raised = True
                raise Boom

    whole, batches = make(samples=4), loader(shuffle=True)
    whole.fit(batches, epochs=2)
    trainer = make(None, [Once()], samples=4)
    with pytest.raises(Boom):
        trainer.fit(batches, epochs=2)
    trainer.fit(batches, epochs=2)
    assert torch.equal(parameters(trainer), parameters(whole))


# ------------------------------------------------------------- directories and disks


def test_a_run_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(sw.CheckpointError, match="must be a directory that can be written to"):
        make(tmp_path / "run").fit(loader(), epochs=1)
    assert (tmp_path / "run").read_text() == "mine"


def test_state_that_cannot_be_saved_raises_before_training(tmp_path):
    class Strange:
        def on_update(self):
            raise AssertionError("trained")

        def state_dict(self):
            return {"thing": object()}

        def load_state_dict(self, state): ...

    with pytest.raises(TypeError, match=r"callbacks\.Strange\.thing must be a tensor, number, text, .*; found object"):
        make(tmp_path, [Strange()]).fit(loader(), epochs=1)


def test_missing_library_raises_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    trainer = make(tmp_path)
    with pytest.raises(ImportError, match="checkpoints need safetensors"):
        trainer.fit(loader(), epochs=1)
    assert trainer.step.counters.updates == 0


def test_a_disk_that_becomes_full(tmp_path, monkeypatch):
    """At the second checkpoint: the first is whole, and the run goes on from it."""
    whole = make()
    whole.fit(loader(), epochs=3)
    real = os.fsync

    def full(descriptor):
        checkpoints = [path for path in tmp_path.rglob("*") if ".ckpt" in str(path)]
        synced = os.fstat(descriptor)
        if any(os.path.samestat(path.stat(), synced) for path in checkpoints) and trainer.step.counters.updates > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    trainer = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            sw.CheckpointError, match=r"could not be written to .*No space left on device.*Free disk space"
        ):
            trainer.fit(loader(), epochs=3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-000000003.ckpt"]
    again = make(tmp_path)
    again.fit(loader(), epochs=3, resume=True)
    assert torch.equal(parameters(again), parameters(whole))


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            self.file.close()
            self.flush()

    class Filling:
        def on_update(self, trainer, update):
            if update.index == 4:
                written = trainer._files._log
                written._file = Full(written._file)

    with pytest.raises(sw.CheckpointError, match=r"the log file .*log\.jsonl must be writable; found: .*No space"):
        make(tmp_path, [Filling()], log_every="1up").fit(loader(), epochs=3)
    make(tmp_path).fit(loader(), epochs=3, resume=True)
    assert log(tmp_path)[-1]["reason"] == "3 epochs are done"


# ------------------------------------------------------------- being asked to leave


class Asked:
    """Sends a signal at a call of the loss function."""

    def __init__(self, call, number=signal.SIGTERM, training=True):
        self.call, self.number, self.training, self.calls = call, number, training, 0

    def __call__(self, model, batch):
        self.calls += model.training == self.training
        if self.calls == self.call and model.training == self.training:
            self.calls += 1
            os.kill(os.getpid(), self.number)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.sweep(1 / 10)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("call", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("samples", [None, 20])
def test_a_signal_anywhere(tmp_path, number, training, call, samples):
    def fit(run, loss, **given):
        trainer = make(run, loss=loss, samples=samples, log_every="2up")
        return trainer, trainer.fit(loader(shuffle=True), validate=loader(batch_size=9), epochs=3, **given)

    never = Asked(0)
    whole, _ = fit(tmp_path / "whole", never)
    _, result = fit(tmp_path / "run", Asked(call, number, training))
    assert result.signal == signal.Signals(number).name
    second, _ = fit(tmp_path / "run", never, resume=True)
    assert torch.equal(parameters(second), parameters(whole))
    assert log(tmp_path / "run") == log(tmp_path / "whole")


def test_validation_is_not_gone_through_to_its_end_first(tmp_path):
    def endless():
        while True:
            yield X, Y

    class Endless:
        def __iter__(self):
            return endless()

    asked = Asked(3, training=False)
    assert make(tmp_path, loss=asked).fit(loader(), validate=Endless(), epochs=1).signal == "SIGTERM"


def test_a_window_that_never_ends_is_left_in_its_middle(tmp_path):
    def endless():
        while True:
            yield X, Y

    assert make(tmp_path, loss=Asked(3), samples=10**9).fit(endless(), epochs=1).signal == "SIGTERM"
    second = make(tmp_path, samples=90)
    with pytest.warns(TrainingWarning, match="samples: 90 from now on, the run had 1000000000"):
        second.fit([(X, Y)] * 4, epochs=1, resume=True)
    assert second.step.counters.samples == 120


def test_evaluation_after_a_signal(tmp_path):
    trainer = make(tmp_path, loss=Asked(2))
    trainer.fit(loader(), epochs=2)
    expected = make(tmp_path / "other")
    expected.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate(loader()) == expected.evaluate(loader())


def test_a_second_ctrl_c_is_a_plain_one(tmp_path):
    def twice(model, batch):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    trainer, before = make(tmp_path, loss=twice), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loader(), epochs=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_a_thread(tmp_path):
    trainer, before = make(tmp_path), signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=trainer.fit, args=(loader(),), kwargs=dict(epochs=2))
    thread.start()
    thread.join()
    assert trainer.step.counters.updates == 6
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.sweep(1 / 2)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals to process groups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_workers_too(tmp_path, number):
    """As a terminal sends Ctrl-C, and a cluster SIGTERM: to the whole group."""
    run = tmp_path / "run"
    with running(run, "plain", pause=0.05) as process:
        while not list(run.glob("checkpoints/*.ckpt")):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, number)
        assert process.wait(timeout=600) == 0, (run / "errors.txt").read_text()
    assert f'"reason": "stopped by {signal.Signals(number).name}"' in (run / "log.jsonl").read_text()
    for directory in (run, tmp_path / "whole"):
        to_the_end(directory, "plain")
    assert_same(ended(run), ended(tmp_path / "whole"))


def test_two_checkpoints_in_one_run_keep_their_own_best(tmp_path):
    checkpoints = [ModelCheckpoint(best=1, monitor="loss"), ModelCheckpoint(best=1, monitor="train_loss", mode="max")]
    make(tmp_path, checkpoints).fit(loader(), validate=loader(), epochs=4)
    assert sorted(path.name for path in tmp_path.glob("best-*")) == [
        "best-loss-000000012.ckpt",
        "best-train_loss-000000003.ckpt",
    ]
