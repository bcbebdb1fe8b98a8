"""A fit inside a fit of the same step is refused; looking at the model from callbacks is not."""

import threading

import pytest
import torch
from small import X, Y, loader, loss_fn, make, parameters

import samplewise as sw
from samplewise.loop.events import EVENTS

REFUSED = (
    "fit must have returned before the same step is trained again; found a call of fit inside fit: from a callback, "
    "a loss function, a loader or another thread"
)


def callback(event, call):
    """An object that calls `call(trainer)` at an event, and catches nothing."""
    return type("Calls", (), {event: lambda self, trainer: call(trainer)})()


def refused(trainer):
    """Calls fit, which must be refused."""
    with pytest.raises(RuntimeError, match=REFUSED) as found:
        trainer.fit(loader(), epochs=1)
    assert str(found.value).endswith("evaluate, predict and save may be called from callbacks.")


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "on_error"])
def test_fit_in_a_callback(event, tmp_path):
    """Refused, and the training around it goes on as if nothing had been."""
    plain = make(tmp_path / "plain")
    plain.fit(loader(), epochs=2)
    nested = make(tmp_path / "nested", [callback(event, refused)])
    assert nested.fit(loader(), epochs=2).reason == "2 epochs are done"
    assert torch.equal(parameters(nested), parameters(plain))
    assert nested.fit(loader(), epochs=3).reason == "3 epochs are done"


def test_fit_in_a_callback_that_does_not_catch_it(tmp_path):
    trainer = make(tmp_path, [callback("on_update", lambda trainer: trainer.fit(loader(), epochs=1))])
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.fit(loader(), epochs=1)
    assert trainer.step.counters.updates == 1


def test_fit_after_an_error_is_not_nested():
    trainer = make(callbacks=[callback("on_error", refused)])
    with pytest.raises(RuntimeError):
        trainer.fit([(X[:, :5], Y)], epochs=1)
    assert trainer.fit([(X, Y)], epochs=1).reason == "1 epoch is done"


def test_another_trainer_of_the_same_step():
    other = make()
    trainer = sw.Trainer(other.step, callbacks=[callback("on_update", lambda _: refused(other))], progress=False)
    trainer.fit(loader(), epochs=1)
    assert other.fit(loader(), epochs=2).reason == "2 epochs are done"


def test_another_trainer_of_another_step():
    other = make()
    make(callbacks=[callback("on_epoch_end", lambda _: other.fit(loader(), epochs=1))]).fit(loader(), epochs=1)
    assert other.step.counters.epochs == 1


def test_fit_in_a_loss_function():
    def loss(model, batch):
        refused(trainer)
        return loss_fn(model, batch)

    trainer = make(loss=loss)
    assert trainer.fit(loader(), epochs=1).reason == "1 epoch is done"


def test_fit_in_a_loader():
    def batches():
        refused(trainer)
        yield X, Y

    trainer = make()
    assert trainer.fit(batches(), epochs=1).reason == "1 epoch is done"


def test_fit_in_another_thread():
    def in_thread(trainer):
        thread = threading.Thread(target=refused, args=[trainer])
        thread.start()
        thread.join()

    assert make(callbacks=[callback("on_update", in_thread)]).fit(loader(), epochs=1).reason == "1 epoch is done"


def test_looking_in_a_callback_changes_nothing(tmp_path):
    plain = make()
    plain.fit(loader(shuffle=True), epochs=2)

    def look(trainer):
        assert trainer.evaluate(loader())["loss"] > 0
        assert len(trainer.predict(loader())) == 30
        trainer.save()
        trainer.save_model("aside")

    data = loader(shuffle=True)
    looking = make(tmp_path, [callback("on_update", look), callback("on_epoch_end", lambda t: t.evaluate(data))])
    looking.fit(data, validate=data, epochs=2)
    assert torch.equal(parameters(looking), parameters(plain))
