"""Fitting again: with the same trainer, another loader, other callbacks, other parts; and loaders that run dry."""

import pytest
import torch
from small import loader, log, make, parameters

import samplewise as sw
from samplewise.loop.callbacks import EarlyStopping, LRMonitor, ModelCheckpoint


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("samples", [None, 10, 4])
@pytest.mark.parametrize("where", [1, 2, 3, 5])
@pytest.mark.parametrize("another", [lambda batches: batches, lambda _: loader(shuffle=True)], ids=["same", "new"])
def test_two_fits_are_one(tmp_path, samples, where, another):
    """In the middle of an epoch, and of a batch, too."""
    whole = make(tmp_path / "whole", samples=samples, log_every="1up")
    whole.fit(loader(shuffle=True), epochs=3)
    for run in (None, tmp_path / "run"):
        parts, batches = make(run, samples=samples, log_every="1up"), loader(shuffle=True)
        parts.fit(batches, updates=where)
        assert parts.fit(another(batches), epochs=3).reason == "3 epochs are done"
        assert torch.equal(parameters(parts), parameters(whole))
        assert parts.step.counters == whole.step.counters
    lines = [line for line in log(tmp_path / "run") if line["kind"] != "end"]
    assert lines == log(tmp_path / "whole")[:-1]


def test_a_fit_that_has_nothing_left_to_do(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(loader(), epochs=2)
    before = parameters(trainer)
    assert trainer.fit(loader(), epochs=2).reason == "2 epochs are done"
    again = make(tmp_path)
    assert again.fit(loader(), epochs=1, resume=True).reason == "1 epoch is done"
    assert again.step.counters.updates == 6
    assert torch.equal(parameters(trainer), before) and torch.equal(parameters(again), before)


# ------------------------------------------------------------- loaders that run dry


@pytest.mark.parametrize("given", [dict(epochs=2), dict(updates=4)])
def test_an_empty_loader(given):
    with pytest.raises(sw.BatchError, match="an epoch must have at least one batch; found none in epoch 1"):
        make().fit([], **given)


def test_too_few_samples_for_an_update():
    trainer = make(samples=50)
    trainer.step.tail = "drop"
    with pytest.raises(sw.BatchError, match="an epoch must make at least one update; found fewer than samples=50"):
        trainer.fit(loader(), updates=4)
    trainer = make(samples=50)
    trainer.step.tail = "carry"
    assert trainer.fit(loader(), updates=2).reason == "2 updates are done"


def test_validation_without_samples():
    trainer = make()
    with pytest.raises(sw.BatchError, match=r"found .*used up|at least one batch; found none"):
        trainer.fit(loader(), validate=iter(list(loader())), epochs=2)
    assert trainer.step.counters.updates == 6
    with pytest.raises(sw.BatchError, match="predict needs at least one batch; found none"):
        trainer.predict([])


# ------------------------------------------------------------- resuming with something else


def test_other_callbacks_keep_the_state_of_those_that_stay(tmp_path):
    make(tmp_path, [EarlyStopping("loss", patience=5, mode="max")]).fit(loader(), epochs=3)
    stopping = EarlyStopping("loss", patience=5, mode="max")
    make(tmp_path, [LRMonitor(), stopping, EarlyStopping()]).fit(loader(), epochs=4, resume=True)
    assert stopping.state_dict()["waited"] == 3
    make(tmp_path).fit(loader(), epochs=5, resume=True)  # and without any


def test_callbacks_are_saved_as_they_are_after_the_event(tmp_path):
    callbacks = [ModelCheckpoint(), EarlyStopping("loss", patience=5, mode="max")]  # saved first, asked second
    make(tmp_path, callbacks).fit(loader(), epochs=3)
    stopping = EarlyStopping("loss", patience=5, mode="max")
    make(tmp_path, [stopping]).fit(loader(), epochs=3, resume=True)
    assert stopping.state_dict()["waited"] == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, dict(scheduler=cosine), "resumed with the scheduler it was saved with, none; found CosineAnnealingLR"),
        (dict(scheduler=cosine), {}, "resumed with the scheduler it was saved with, CosineAnnealingLR; found none"),
        ({}, dict(optimizer=torch.optim.AdamW), "resumed with the optimizer it was saved with, SGD; found AdamW"),
    ],
)
def test_other_parts(tmp_path, before, after, message):
    make(tmp_path, **before).fit(loader(), epochs=1)
    trainer = make(tmp_path, **after)
    fresh = parameters(trainer)
    with pytest.raises(sw.CheckpointError, match=message):
        trainer.fit(loader(), epochs=2, resume=True)
    assert torch.equal(parameters(trainer), fresh)


def test_checkpoints_of_which_none_can_be_read(tmp_path):
    make(tmp_path).fit(loader(), epochs=2)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "state.json").write_bytes(b"nothing")
    before = (tmp_path / "log.jsonl").read_bytes()
    with (
        pytest.warns(sw.CheckpointWarning, match="Trying the previous checkpoint"),
        pytest.raises(sw.CheckpointError, match="resuming needs a readable checkpoint; found none among 2 in"),
    ):
        make(tmp_path).fit(loader(), epochs=3, resume=True)
    with pytest.raises(sw.CheckpointError, match=r"found checkpoints in .* exists='resume'\) to continue"):
        make(tmp_path).fit(loader(), epochs=3)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_last_update_is_never_lost(tmp_path):
    """Ended by a number of updates or by a callback, between two saves."""
    first = make(tmp_path, [ModelCheckpoint(every="100ep")])
    first.fit(loader(), updates=5)
    second = make(tmp_path)
    second.fit(loader(), updates=5, resume=True)
    assert torch.equal(parameters(first), parameters(second))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_state_in_channels_last(tmp_path, optimizer, fused):
    """Fused kernels need state in the memory order of the parameters, and do not check it."""

    def fit(run, updates, **options):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(36, 3))
        model = layers.to(memory_format=torch.channels_last)
        settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        made = optimizer(model.parameters(), lr=0.01, fused=fused, **settings)
        step = sw.Step(model, made, torch.nn.CrossEntropyLoss())
        trainer = sw.Trainer(step, run, progress=False, device="cpu")
        trainer.fit(data, updates=updates, **options)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    data = torch.utils.data.DataLoader([(torch.full((2, 5, 5), k / 8).sin(), k % 3) for k in range(16)], batch_size=4)
    whole = fit(tmp_path / "whole", 8)
    fit(tmp_path / "parts", 3)
    assert torch.equal(fit(tmp_path / "parts", 8, resume=True), whole)
