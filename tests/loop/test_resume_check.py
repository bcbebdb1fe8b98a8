"""A run goes on inside an epoch with the data it was begun with; between two epochs the data may change."""

import warnings

import pytest
import torch
from small import X, Y, loader, log, make, parameters
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from samplewise.errors import CheckpointError, TrainingWarning
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.checkpoint.directory import Checkpoints
from samplewise.loop.checkpoint.io import read, write
from samplewise.loop.data.resume_check import describe, differences

DATA = TensorDataset(X, Y)
INSIDE = (
    "an epoch must be continued with the dataset length, batch size, sampler and drop_last that it was started with, "
    "or samples would be lost or repeated; found "
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Sized(Stream):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([DATA[k] for k in range(self.length)])


class Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))


class Pairs:
    """A batch sampler of one's own."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        return iter(torch.arange(30).split(self.batch_size))


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings(action="ignore"):  # it calls what torch has deprecated
        return StatefulDataLoader(DATA, **options)


def of(length, **options):
    return DataLoader(TensorDataset(X.repeat(2, 1)[:length], Y.repeat(2)[:length]), batch_size=7, **options)


def batches(size):
    return list(zip(X.split(size), Y.split(size), strict=True))


def sampled(sampler, **options):
    return DataLoader(DATA, **{"batch_size": 7, **options}, sampler=sampler)


CHANGES = {
    "batch size": (lambda: loader(7), lambda: loader(8), "batch size 8 instead of 7."),
    "longer": (lambda: of(30), lambda: of(32), "dataset length 32 instead of 30 and sampler length 32 instead of 30."),
    "shorter": (lambda: of(30), lambda: of(28), "dataset length 28 instead of 30 and sampler length 28 instead of 30."),
    "shuffle off": (
        lambda: loader(shuffle=True),
        loader,
        "sampler SequentialSampler instead of RandomSampler(replacement=False).",
    ),
    "shuffle on": (loader, lambda: loader(shuffle=True), "sampler RandomSampler(replacement=False) instead of "),
    "drop_last": (loader, lambda: loader(drop_last=True), "drop_last True instead of False."),
    "replacement": (
        lambda: sampled(RandomSampler(DATA)),
        lambda: sampled(RandomSampler(DATA, replacement=True)),
        "sampler RandomSampler(replacement=True) instead of RandomSampler(replacement=False).",
    ),
    "generator": (
        lambda: loader(shuffle=True),
        lambda: loader(shuffle=True, generator=torch.Generator()),
        "sampler RandomSampler(replacement=False, generator) instead of RandomSampler(replacement=False).",
    ),
    "a sampler of one's own": (loader, lambda: sampled(Backwards(DATA)), "sampler Backwards instead of Sequential"),
    "a subset": (
        lambda: sampled(SubsetRandomSampler(range(30))),
        lambda: sampled(SubsetRandomSampler(range(28))),
        "sampler length 28 instead of 30.",
    ),
    "weighted": (
        lambda: sampled(WeightedRandomSampler([1.0] * 30, 30)),
        lambda: sampled(WeightedRandomSampler([1.0] * 30, 24)),
        "sampler length 24 instead of 30.",
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 7, False)),
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, False)),
        "batch sampler BatchSampler(batch_size=8, drop_last=False, sampler=SequentialSampler) instead of BatchSampler(",
    ),
    "a batch sampler instead of none": (
        loader,
        lambda: DataLoader(DATA, batch_sampler=Pairs(7)),
        "batch sampler Pairs(batch_size=7) instead of unknown",
    ),
    "batch sampler of one's own": (
        lambda: DataLoader(DATA, batch_sampler=Pairs(7)),
        lambda: DataLoader(DATA, batch_sampler=Pairs(5)),
        "batch sampler Pairs(batch_size=5) instead of Pairs(batch_size=7).",
    ),
    "stateful": (lambda: stateful(batch_size=7), lambda: stateful(batch_size=5), "batch size 5 instead of 7."),
    "stateful, shuffled": (
        lambda: stateful(batch_size=7, shuffle=True),
        lambda: stateful(batch_size=7),
        "sampler SequentialSampler instead of RandomSampler",
    ),
    "iterable": (
        lambda: DataLoader(Stream(), batch_size=7),
        lambda: DataLoader(Stream(), batch_size=8),
        "batch size 8 instead of 7.",
    ),
    "iterable with a length": (
        lambda: DataLoader(Sized(30), batch_size=7),
        lambda: DataLoader(Sized(28), batch_size=7),
        "dataset length 28 instead of 30",
    ),
    "list": (lambda: batches(7), lambda: batches(8), "batch size 8 instead of 7 and batches 4 instead of 5."),
    "longer list": (lambda: batches(5), lambda: batches(5) + batches(5)[:1], "batches 7 instead of 6."),
}


def saved_inside(run, data):
    trainer = make(run, [ModelCheckpoint(every="1up")])
    trainer.fit(data, updates=2)
    return trainer


def files(run):
    return {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_inside_an_epoch(tmp_path, change):
    before, after, found = CHANGES[change]
    saved_inside(tmp_path, before())
    there = files(tmp_path)
    trainer = make(tmp_path)
    start, updates = parameters(trainer).clone(), trainer.step.counters.updates
    with pytest.raises(CheckpointError) as refused:
        trainer.fit(after(), epochs=2, resume=True)
    message = str(refused.value)
    assert message.startswith(INSIDE) and found in message
    assert "until epoch 1 has ended (epochs=1) and change it then, or start a new run directory." in message
    assert torch.equal(parameters(trainer), start) and trainer.step.counters.updates == updates
    assert files(tmp_path) == there
    assert trainer.fit(before(), epochs=1, resume=True).reason == "1 epoch is done"  # nothing was lost


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_between_two_epochs(tmp_path, change):
    before, after, found = CHANGES[change]
    make(tmp_path).fit(before(), epochs=1)
    trainer = make(tmp_path)
    with pytest.warns(TrainingWarning, match="resumed at the beginning of epoch 2 with other data") as warned:
        trainer.fit(after(), epochs=2, resume=True)
    assert found.rstrip(".") in str(warned[0].message)
    assert log(tmp_path)[-1]["reason"] == "2 epochs are done"


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_for_a_second_fit(change):
    """The same without checkpoints. Between two epochs it is the caller's explicit choice."""
    before, after, found = CHANGES[change]
    trainer = make()
    trainer.fit(before(), updates=2)
    with pytest.raises(CheckpointError) as refused:
        trainer.fit(after(), epochs=2)
    assert str(refused.value).startswith(INSIDE) and found in str(refused.value)
    assert str(refused.value).endswith("Finish the epoch with its own data first, or make a new Trainer.")
    trainer.fit(before(), epochs=1)
    assert trainer.fit(after(), epochs=2).reason == "2 epochs are done"


def test_a_data_set_that_grows_between_two_fits():
    rows = [DATA[k] for k in range(30)]
    data, trainer = DataLoader(rows, batch_size=7), make()
    trainer.fit(data, updates=2)
    rows += rows[:2]
    with pytest.raises(CheckpointError, match="dataset length 32 instead of 30"):
        trainer.fit(data, epochs=1)


def test_a_data_set_whose_length_is_an_error():
    class Broken(TensorDataset):
        def __len__(self):
            raise RuntimeError("not known yet")

    assert describe(DataLoader(Broken(X), sampler=range(30)))["dataset length"] is None


def test_overfit_is_part_of_the_data(tmp_path):
    make(tmp_path, [ModelCheckpoint(every="1up")]).fit(loader(), updates=1, overfit_batches=3)
    with pytest.raises(CheckpointError, match="overfit_batches unknown instead of 3"):
        make(tmp_path).fit(loader(), epochs=1, resume=True)


def test_overfit_does_not_change_inside_an_epoch():
    trainer = make()
    trainer.fit(loader(), updates=1, overfit_batches=3)
    with pytest.raises(CheckpointError, match=r"found overfit_batches 2 instead of 3\. Finish the epoch"):
        trainer.fit(loader(), epochs=1, overfit_batches=2)
    trainer.fit(loader(), epochs=1, overfit_batches=3)
    trainer.fit(loader(), epochs=2, overfit_batches=2)
    trainer.fit(loader(), epochs=3)
    assert trainer.step.counters.samples == 21 + 14 + 30


def test_the_mark_of_sharded_loaders_is_part_of_the_data():
    before, now = describe(loader(), sharded=True), describe(loader())
    assert differences(before, now) == ["sharded unknown instead of True"]
    assert differences(describe(iter([]), sharded=True), describe(iter([]))) == ["sharded unknown instead of True"]


def as_dict(samples):
    x, y = torch.utils.data.default_collate(samples)
    return {0: x, 1: y}


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 1},
        {"collate_fn": as_dict},
        {"timeout": 0, "pin_memory": False},
    ],
)
def test_what_may_change_inside_an_epoch(tmp_path, options):
    """The order of samples does not depend on it: the result is that of a run without interruption."""
    whole = make()
    whole.fit(loader(shuffle=True), epochs=2)
    saved_inside(tmp_path, loader(shuffle=True))
    resumed = make(tmp_path)
    resumed.fit(loader(shuffle=True, **options), epochs=2, resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))


def test_the_seed_of_a_generator_may_change_inside_an_epoch(tmp_path):
    whole = make()
    whole.fit(loader(shuffle=True, generator=torch.Generator().manual_seed(1)), epochs=2)
    saved_inside(tmp_path, loader(shuffle=True, generator=torch.Generator().manual_seed(2)))
    resumed = make(tmp_path)
    resumed.fit(loader(shuffle=True, generator=torch.Generator().manual_seed(3)), epochs=2, resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_failed_first_batch_may_be_followed_by_other_data():
    trainer = make()
    with pytest.raises(RuntimeError):
        trainer.fit(DataLoader(TensorDataset(X[:, :5], Y), batch_size=5), epochs=1)
    assert trainer.fit(loader(), epochs=1).reason == "1 epoch is done"


def test_other_data_to_evaluate():
    trainer = make()
    for data in (loader(7), loader(5), of(20), batches(4)):
        trainer.evaluate(data)
        trainer.fit(loader(), validate=data, updates=trainer.step.counters.updates + 1)


def test_a_checkpoint_that_says_nothing_of_its_data(tmp_path):
    """As earlier versions wrote them."""
    saved_inside(tmp_path, loader())
    for path in Checkpoints(tmp_path / "checkpoints").paths():
        state = read(path)
        del state["trainer"]["data"]
        write(path, state)
    assert make(tmp_path).fit(loader(), epochs=1, resume=True).reason == "1 epoch is done"


def test_describe():
    assert describe(loader(7, shuffle=True, drop_last=True), overfit_batches=2) == {
        "dataset length": 30,
        "batch size": 7,
        "drop_last": True,
        "sampler": "RandomSampler(replacement=False)",
        "sampler length": 30,
        "batch sampler": None,
        "batches": None,
        "overfit_batches": 2,
        "sharded": None,
    }
    assert set(describe(iter([])).values()) == {None}
    assert describe(batches(7))["batch size"] == 7 and describe([]) == {**describe(iter([])), "batches": 0}
