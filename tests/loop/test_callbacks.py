"""EarlyStopping and other reasons for an end, over several calls of `fit`."""

import signal
import sys

import pytest
from small import loader, log, make

from samplewise.loop.callbacks import EarlyStopping, MaxTime, ModelCheckpoint
from samplewise.loop.checkpoint.directory import Checkpoints

OVER = "loss has not improved for 2 epochs"


def stopping(run, patience=2, **options):
    """A trainer that stops after `patience` more epochs than the first: nothing is an improvement by 100."""
    return make(run, [EarlyStopping(patience=patience, min_delta=100.0, **options)])


def test_a_stopped_run_stays_stopped(tmp_path):
    assert stopping(tmp_path).fit(loader(), epochs=20).reason == OVER
    before = log(tmp_path)
    for _ in range(3):
        trainer = stopping(tmp_path)
        assert trainer.fit(loader(), epochs=20, resume=True).reason == OVER
        assert trainer.step.counters.epochs == 3 and trainer.step.counters.updates == 9
        assert log(tmp_path) == before


def test_more_patience_continues_training(tmp_path):
    stopping(tmp_path).fit(loader(), epochs=20)
    trainer = stopping(tmp_path, patience=4)
    assert trainer.fit(loader(), epochs=20, resume=True).reason == "loss has not improved for 4 epochs"
    assert trainer.step.counters.epochs == 5
    trainer = make(tmp_path)  # or no early stopping at all
    result = trainer.fit(loader(), epochs=6, resume=True)
    assert (result.reason, result.epochs) == ("6 epochs are done", 6)


def test_less_patience_stops_at_once(tmp_path):
    stopping(tmp_path, patience=3).fit(loader(), epochs=3)
    result = stopping(tmp_path, patience=1).fit(loader(), epochs=9, resume=True)
    assert result.reason == "loss has not improved for 1 epoch"


def test_another_metric_starts_again(tmp_path):
    stopping(tmp_path).fit(loader(), epochs=20)
    trainer = stopping(tmp_path, monitor="train_loss")
    assert trainer.fit(loader(), epochs=20, resume=True).reason == "train_loss has not improved for 2 epochs"
    assert trainer.step.counters.epochs == 6


def test_a_second_fit_of_one_trainer_stays_stopped():
    trainer = stopping(None)
    early = trainer._callbacks.callbacks[0]
    assert trainer.fit(loader(), epochs=20).reason == OVER
    assert trainer.fit(loader(), epochs=30).reason == OVER and trainer.step.counters.epochs == 3
    assert trainer.fit(loader(), epochs=30, fast_dev_run=True).reason == "fast_dev_run is done"
    early.patience = 9
    assert trainer.fit(loader(), epochs=5).reason == "5 epochs are done"


def test_other_stop_requests_are_not_saved(tmp_path):
    """A time limit counts for one fit, and so does trainer.stop."""

    class Stops:
        def on_update(self, trainer):
            trainer.stop("enough")

    assert make(tmp_path, [MaxTime(1e-9)]).fit(loader(), epochs=2).reason == "time limit of 1e-09 s reached"
    assert make(tmp_path, [Stops()]).fit(loader(), epochs=2, resume=True).reason == "enough"
    trainer = make(tmp_path, [MaxTime(1e-9)])
    assert trainer.fit(loader(), epochs=2, resume=True).reason == "time limit of 1e-09 s reached"
    assert trainer.step.counters.updates == 3
    assert make(tmp_path).fit(loader(), epochs=2, resume=True).reason == "2 epochs are done"


@pytest.mark.parametrize("seconds", [-1, float("nan"), "60", None])
def test_time_limits_that_are_none(seconds):
    with pytest.raises(ValueError, match="seconds must be a number, 0 or more; found"):
        MaxTime(seconds)


def test_best_models_by_another_metric_start_again(tmp_path):
    first = ModelCheckpoint(best=1)
    make(tmp_path, [first]).fit(loader(), epochs=1)
    second = ModelCheckpoint(best=1, mode="max")
    make(tmp_path, [second]).fit(loader(), epochs=2, resume=True)
    assert len(second.best_models) == 1 and second.best_models != first.best_models
    assert all(path.exists() for path in first.best_models + second.best_models)
    third = ModelCheckpoint(best=1, mode="max")
    make(tmp_path, [third]).fit(loader(), epochs=2, resume=True)
    assert third.best_models == second.best_models


def test_the_idiom_for_scripts_that_end_after_ctrl_c(tmp_path):
    class Interrupts:
        def on_update(self, update):
            if update.index == 1:
                signal.raise_signal(signal.SIGINT)

    def script(callbacks):
        trainer = make(tmp_path, callbacks)
        if trainer.fit(loader(), epochs=2, resume=True).signal == "SIGINT":
            sys.exit(130)
        return trainer.step.counters.updates

    with pytest.raises(SystemExit) as ended:
        script([Interrupts()])
    assert ended.value.code == 130 and len(Checkpoints(tmp_path / "checkpoints").paths()) == 1
    assert script([]) == 6


def test_the_result_of_fit(tmp_path):
    class Interrupts:
        def on_update(self, update):
            if update.index == 4:
                signal.raise_signal(signal.SIGTERM)

    metrics = {"accuracy": lambda outputs, y: outputs.argmax(-1) == y}
    first = make(tmp_path, [Interrupts()], metrics=metrics).fit(loader(), validate=loader(), epochs=3)
    assert (first.reason, first.signal, first.epochs, first.updates) == ("stopped by SIGTERM", "SIGTERM", 1, 5)
    assert list(first.metrics) == ["loss", "train_loss", "accuracy"]
    trainer = make(tmp_path, metrics=metrics)
    second = trainer.fit(loader(), validate=loader(), epochs=3, resume=True)
    assert (second.reason, second.signal, second.epochs, second.updates) == ("3 epochs are done", None, 3, 9)
    values = second.metrics
    assert {name: values[name] for name in ("loss", "accuracy")} == trainer.evaluate(loader())
    shown = f"loss {values['loss']:.4g}, train_loss {values['train_loss']:.4g}, accuracy {values['accuracy']:.4g}"
    assert repr(second) == f"FitResult('3 epochs are done', 3 epochs, 9 updates, {shown})"
    assert second._repr_html_().startswith("<p>3 epochs are done</p><table><thead><tr><th>epochs</th><th>updates</th>")
    assert trainer.fit(loader(), epochs=3).metrics == {}  # no epoch is left
