"""Stop requests: the iterator over batches raises LoaderStopped in one process, after a signal."""

import signal
from types import SimpleNamespace

import pytest
import torch
from small import X, Y, loss_fn, make, parameters

import samplewise as sw
from samplewise.errors import LoaderStopped
from samplewise.loop.data.loader import ResumableLoader
from samplewise.loop.stopping import Duration, SingleProcessStop, stop_controller


def controller(deferred=False):
    counters = SimpleNamespace(updates=3)
    step = SimpleNamespace(
        _has_deferred_samples=deferred, _consumed=0, counters=counters, _started_updates=3, privacy=None
    )
    return stop_controller(step)


def test_batches_end_with_an_ordinary_exception():
    stopping, data = controller(), ResumableLoader([(X, Y)], seed=0)
    assert isinstance(stopping, SingleProcessStop) and issubclass(LoaderStopped, Exception)
    with stopping.handle_signals():
        batches = stopping.batches(iter("ab"), data)
        assert next(batches) == "a"
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LoaderStopped, match="SIGTERM"):
            next(batches)
    assert stopping.stop == ("stopped by SIGTERM", "SIGTERM")


def test_deferred_samples_are_not_left_behind():
    stopping, data = controller(deferred=True), ResumableLoader([(X, Y)], seed=0)
    with stopping.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert list(stopping.batches(iter("ab"), data)) == ["a", "b"]


@pytest.mark.parametrize("signaled", [True, False])
def test_an_error_of_the_loader(signaled):
    def broken():
        yield "a"
        raise RuntimeError("worker killed")

    stopping, data = controller(), ResumableLoader([(X, Y)], seed=0)
    with stopping.handle_signals():
        batches = stopping.batches(broken(), data)
        next(batches)
        if signaled:
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LoaderStopped if signaled else RuntimeError):
            next(batches)


def test_the_first_reason_is_kept():
    stopping = controller()
    assert not stopping.is_over(Duration(4, "up"), epochs=0) and stopping.is_over(Duration(3, "up"), epochs=0)
    stopping.request("first")
    stopping.request("second")
    assert stopping.stop == ("first", None) and stopping.is_over(Duration(4, "up"), epochs=0)


def test_a_loader_of_the_users_may_stop_an_epoch():
    """The open window is kept, and the next epoch completes it."""

    def stops(step, samples):
        yield X[:samples], Y[:samples]
        raise LoaderStopped

    def trained(*passes):
        model = torch.nn.Linear(6, 3)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        step = sw.Step(model, sw.sgd(0.1), loss_fn, samples=10)
        for batches in passes:
            for _ in step.over(batches(step)):
                pass
        return step

    whole = trained(lambda step: [(X[:10], Y[:10])])
    parts = trained(lambda step: stops(step, 7), lambda step: [(X[7:10], Y[7:10])])
    assert parts.counters.updates == 1 and parts.counters.epochs == 1
    torch.testing.assert_close(parts.model.weight, whole.model.weight)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_loader_of_the_users_may_stop_the_training(where, tmp_path):
    class Stops:
        def __iter__(self):
            yield X[:7], Y[:7]
            raise LoaderStopped

    batches = [(X[:7], Y[:7]), (X[7:], Y[7:])]
    training, validation = (Stops(), batches) if where == "training" else (batches, Stops())
    assert make(tmp_path).fit(training, validate=validation, epochs=2).reason == "stopped by the loader"
    second = make(tmp_path)
    assert second.fit(batches, validate=batches, epochs=2, resume=True).reason == "2 epochs are done"
    assert second.step.counters.samples == 60


def test_a_request_of_a_callback_ends_after_the_update():
    class Stops:
        def on_update(self, trainer, update):
            if update.index == 1:
                trainer.stop("enough")

    batches = [(X, Y)] * 2
    trainer = make(callbacks=[Stops()])
    assert trainer.fit(batches, epochs=5).reason == "enough"
    other = make()
    other.fit(batches, updates=2)
    assert torch.equal(parameters(trainer), parameters(other))
