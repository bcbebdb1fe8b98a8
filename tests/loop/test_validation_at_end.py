"""Validation at the end of a training run that ends inside an epoch: once, and not part of a resumed run."""

import signal

import pytest
import torch
from small import loader, log, make, parameters

import samplewise as sw
from samplewise.loop.callbacks import MaxTime, ModelCheckpoint
from samplewise.loop.evaluation import accuracy

METRICS = {"accuracy": accuracy}


class Recorder:
    """Callback that keeps what loggers receive, until the end."""

    def __init__(self):
        self.lines = []
        self.open = True

    def on_log(self, kind, fields):
        if self.open and kind == "validation":
            self.lines.append(fields)

    def on_fit_end(self):
        self.open = False


def validations(run):
    return [(line["epoch"], line["update"]) for line in log(run) if line["kind"] == "validation"]


def fit(trainer, validate=True, **options):
    return trainer.fit(loader(shuffle=True), loader() if validate else None, **options)


@pytest.mark.parametrize("updates", [1, 3, 4, 5, 6])  # an epoch has 3: the last one is broken off before its end
def test_a_number_of_updates(tmp_path, capsys, updates):
    recorder = Recorder()
    trainer = make(tmp_path, [recorder], metrics=METRICS, progress=True)
    result = fit(trainer, updates=updates)
    expected = trainer.evaluate(loader())
    assert result.metrics == expected
    (line,) = [line for line in log(tmp_path) if line["kind"] == "validation" and line["update"] == updates]
    assert line == {"kind": "validation", "epoch": (updates + 2) // 3, "update": updates, **expected}
    assert recorder.lines[-1] == {name: value for name, value in line.items() if name != "kind"}
    shown = f"validation after update {updates}  loss {expected['loss']:.4g}  accuracy {expected['accuracy']:.4g}"
    assert capsys.readouterr().err.splitlines().count(shown) == 1


def test_not_after_the_validation_of_an_epoch(tmp_path):
    result = fit(make(tmp_path), epochs=2)
    assert validations(tmp_path) == [(1, 3), (2, 6)]
    assert "train_loss" in result.metrics


def test_no_validation_data(tmp_path):
    assert fit(make(tmp_path), validate=False, updates=4).metrics.keys() == {"loss", "train_loss"}
    assert validations(tmp_path) == []


@pytest.mark.parametrize("stop", [MaxTime(0), "callback"])
def test_a_stop_of_a_callback(tmp_path, stop):
    class Stop:
        def on_update(self, trainer):
            trainer.stop("enough")

    result = fit(make(tmp_path, [Stop() if stop == "callback" else stop]), epochs=2)
    assert validations(tmp_path) == [(1, 1)] and "loss" in result.metrics


class Signal:
    def __init__(self, update):
        self.update = update

    def on_update(self, update):
        if update.index == self.update:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_and_the_resumed_run(tmp_path):
    assert fit(make(tmp_path, [Signal(3)]), updates=5).metrics.keys() == {"loss", "train_loss"}
    assert validations(tmp_path) == [(1, 3)]
    result = fit(make(tmp_path), updates=5, resume=True)
    assert validations(tmp_path) == [(1, 3), (2, 5)]
    whole = make(tmp_path / "whole")
    assert fit(whole, updates=5).metrics == result.metrics
    assert log(tmp_path) == log(tmp_path / "whole")


def test_a_signal_with_the_last_update(tmp_path):
    assert fit(make(tmp_path, [Signal(4)]), updates=5).signal == "SIGTERM"
    assert validations(tmp_path) == [(1, 3)]
    result = fit(make(tmp_path), updates=5, resume=True)
    assert result.reason == "5 updates are done" and result.metrics.keys() == {"loss"}
    assert validations(tmp_path) == [(1, 3), (2, 5)]


def test_a_signal_in_the_validation_at_the_end(tmp_path):
    def batches():
        for number, batch in enumerate(loader()):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    result = make(tmp_path).fit(loader(shuffle=True), list_of(batches), updates=2)
    assert (result.signal, result.updates, result.metrics) == ("SIGTERM", 2, {})
    assert validations(tmp_path) == []
    assert fit(make(tmp_path), updates=2, resume=True).metrics.keys() == {"loss"}
    assert validations(tmp_path) == [(1, 2)]


def list_of(function):
    """Iterable that calls the function each time."""

    class Batches:
        def __iter__(self):
            return function()

    return Batches()


def test_a_loader_that_stops_the_training(tmp_path):
    def batches():
        yield from list(loader())[:3]
        raise sw.LoaderStopped

    make(tmp_path).fit(list_of(batches), loader(), updates=5)
    assert validations(tmp_path) == []


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("every", ["1up", "1ep"])
@pytest.mark.parametrize("end", [2, 3, 4])
def test_a_longer_run_is_bit_identical(tmp_path, end, every):
    """The validation draws no random numbers of the training, and its line is not in the log of the resumed run."""
    first = make(tmp_path / "parts", [ModelCheckpoint(every)], metrics=METRICS)
    fit(first, updates=end)
    parts = make(tmp_path / "parts", [ModelCheckpoint(every)], metrics=METRICS)
    fit(parts, updates=7, resume=True)
    whole = make(tmp_path / "whole", [ModelCheckpoint(every)], metrics=METRICS)
    fit(whole, updates=7)
    plain = make()
    fit(plain, validate=False, updates=7)
    assert torch.equal(parameters(parts), parameters(whole)) and torch.equal(parameters(parts), parameters(plain))
    assert log(tmp_path / "parts") == log(tmp_path / "whole")


def test_an_error_in_the_first_validation_does_not_cost_the_updates(tmp_path):
    def fail(outputs, batch):
        raise RuntimeError("why")

    with pytest.raises(RuntimeError, match="why"):
        fit(make(tmp_path, metrics={"fail": fail}), updates=2)
    result = fit(make(tmp_path), updates=2, resume=True)
    assert result.updates == 2 and result.metrics.keys() == {"loss"}
    whole = make(tmp_path / "whole")
    fit(whole, updates=2)
    assert log(tmp_path) == log(tmp_path / "whole")


def test_a_second_call(tmp_path):
    trainer = make(tmp_path)
    fit(trainer, updates=2)
    fit(trainer, updates=2, resume=True)  # its line was cut off
    assert validations(tmp_path) == [(1, 2)]
    assert fit(trainer, updates=2).metrics == {}  # nothing was trained since the last validation
    assert validations(tmp_path) == [(1, 2)]
    fit(trainer, updates=4)
    assert validations(tmp_path) == [(1, 2), (1, 3), (2, 4)]
