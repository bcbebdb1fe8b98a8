"""`ResumableLoader`: whatever the loader, the rest of a run is the same from any place on.

Each loader of the table is gone through once from the beginning to the end, and then by new loaders from places in
between, which have been through a file. Every dataset draws random numbers, and so does the caller in between.
"""

import os
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import samplewise as sw
from samplewise.core.state import RandomState
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.checkpoint import io
from samplewise.loop.data import adapters, rng
from samplewise.loop.data.loader import DataPosition, ResumableLoader

SAMPLES, EPOCHS = 11, 3


def noise():
    return torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Samples(Dataset):
    """The number of the sample, and what was drawn for it."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return int(i), noise()


class WithGenerators(Samples):
    def __init__(self):
        self.numpy, self.python, self.torch = numpy.random.default_rng(), random.Random(), torch.Generator()
        self.old = numpy.random.RandomState()

    def __getitem__(self, i):
        drawn = [self.numpy.random(), self.python.random(), torch.rand((), generator=self.torch), self.old.rand()]
        return i, torch.tensor(drawn, dtype=torch.float64)


class Rows(Dataset):
    """A sample is a batch by itself."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return 3 * i + torch.arange(3), torch.rand(3)


class Named(Dataset):
    """Indices are texts."""

    def __getitem__(self, name):
        return ord(name), noise()


class Names(Sampler):
    def __iter__(self):
        return iter(random.sample("abcdefgh", 8))


class Stepwise(Sampler):
    """Draws as it goes, from numbers of its own and from everybody's, and hands out the same list again and again."""

    def __init__(self):
        self.own = random.Random(5)

    def __iter__(self):
        batch = []
        for _ in range(5):
            batch[:] = [self.own.randrange(SAMPLES), int(torch.randint(SAMPLES, ())), random.randrange(SAMPLES)]
            yield batch


class Shards(IterableDataset):
    """Each worker has its share; the order is drawn."""

    def __iter__(self):
        info = get_worker_info()
        mine = range(SAMPLES) if info is None else range(info.id, SAMPLES, info.num_workers)
        for i in random.sample(mine, len(mine)):
            yield i, noise()


class ShardsByEpoch(Shards):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i, drawn in super().__iter__():
            yield i, drawn + self.epoch


class ShardsWithState(IterableDataset):
    """What is drawn belongs to the state."""

    def __init__(self):
        self.start, self.number, self.generator = 0, 0, torch.Generator()

    def __iter__(self):
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        self.number, self.start = self.start, 0
        while first + self.number * every < SAMPLES:
            self.number += 1
            yield first + (self.number - 1) * every, torch.rand(2, generator=self.generator)

    def state_dict(self):
        return {"number": self.number, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.start = self.number = state["number"]
        self.generator.set_state(state["generator"])

    def __getstate__(self):
        """torch 2.13 cannot send a generator to a worker, unless the worker is a fork; an array can be sent."""
        return vars(self) | {"generator": self.generator.get_state().numpy()}

    def __setstate__(self, state):
        vars(self).update(state)
        self.generator = torch.Generator()
        self.generator.set_state(torch.from_numpy(state["generator"]))


class Drawing:
    """Iterable, and no more than that."""

    def __iter__(self):
        for k in torch.randperm(5).tolist():
            yield torch.arange(2) + 2 * k, noise().repeat(2, 1)


class OwnState:
    """Not a DataLoader; its state is changed in place."""

    def __init__(self):
        self.left = None

    def __iter__(self):
        if self.left is None:
            self.left = random.sample(range(5), 5)
        while self.left:
            yield torch.arange(2) + 2 * self.left.pop(), noise().repeat(2, 1)
        self.left = None

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def masking(samples):
    ids, drawn = default_collate(samples)
    return ids, drawn + noise() * torch.rand(len(ids), 1)


def own():
    return torch.Generator().manual_seed(random.randrange(99))  # other in every process


WEIGHTS = torch.arange(SAMPLES) + 1.0
FOUR = dict(batch_size=4)
SHUFFLED = dict(batch_size=4, shuffle=True)

PLAIN = {
    "in order": lambda: DataLoader(Samples(), **FOUR),
    "shuffled": lambda: DataLoader(Samples(), **SHUFFLED),
    "shuffled by a generator": lambda: DataLoader(Samples(), **SHUFFLED, generator=own()),
    "dropping the last": lambda: DataLoader(Samples(), **SHUFFLED, drop_last=True),
    "weighted": lambda: DataLoader(Samples(), **FOUR, sampler=WeightedRandomSampler(WEIGHTS, 9)),
    "weighted by a generator": lambda: DataLoader(
        Samples(), **FOUR, sampler=WeightedRandomSampler(WEIGHTS, 9, generator=own())
    ),
    "batches of a sampler": lambda: DataLoader(
        Samples(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=own()), 3, False)
    ),
    "batches drawn one by one": lambda: DataLoader(Samples(), batch_sampler=Stepwise()),
    "one rank of two": lambda: DataLoader(Samples(), batch_size=3, sampler=DistributedSampler(Samples(), 2, 1)),
    "no batches": lambda: DataLoader(Samples(), batch_size=None, shuffle=True),
    "samples that are batches": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "random collation": lambda: DataLoader(Samples(), **SHUFFLED, collate_fn=masking),
    "generators of the dataset": lambda: DataLoader(Subset(WithGenerators(), range(9)), **SHUFFLED),
    "texts for indices": lambda: DataLoader(Named(), batch_size=3, sampler=Names()),
    "iterable": lambda: DataLoader(Shards(), **FOUR),
    "iterable with generator": lambda: DataLoader(Shards(), **FOUR, generator=own()),
    "iterable told the epoch": lambda: DataLoader(ShardsByEpoch(), **FOUR),
    "a list": lambda: list(DataLoader(range(SAMPLES), **FOUR)),
    "an iterable": Drawing,
    "state": lambda: StatefulDataLoader(Samples(), **FOUR),
    "state, shuffled": lambda: StatefulDataLoader(Samples(), **SHUFFLED),
    "state, shuffled by a generator": lambda: StatefulDataLoader(Samples(), **SHUFFLED, generator=own()),
    "state, dropping the last": lambda: StatefulDataLoader(Samples(), **SHUFFLED, drop_last=True),
    "state, torch's sampler": lambda: StatefulDataLoader(Samples(), **FOUR, sampler=RandomSampler(Samples())),
    "state, weighted": lambda: StatefulDataLoader(Samples(), **FOUR, sampler=WeightedRandomSampler(WEIGHTS, 9)),
    "state, one rank of two": lambda: StatefulDataLoader(
        Samples(), batch_size=3, sampler=StatefulDistributedSampler(Samples(), 2, 1)
    ),
    "state, no batches": lambda: StatefulDataLoader(Samples(), batch_size=None, shuffle=True),
    "state, random collation": lambda: StatefulDataLoader(Samples(), **SHUFFLED, collate_fn=masking),
    "state, iterable": lambda: StatefulDataLoader(Shards(), **FOUR),
    "state, iterable with state": lambda: StatefulDataLoader(ShardsWithState(), **FOUR),
    "a state of one's own": OwnState,
}

WORKERS = {
    "shuffled": lambda **o: DataLoader(Samples(), **SHUFFLED, **o),
    "random collation": lambda **o: DataLoader(Samples(), **SHUFFLED, collate_fn=masking, **o),
    "iterable": lambda **o: DataLoader(Shards(), **FOUR, **o),
    "state, shuffled": lambda **o: StatefulDataLoader(Samples(), **SHUFFLED, **o),
    "state, snapshots now and then": lambda **o: StatefulDataLoader(
        Samples(), batch_size=2, shuffle=True, snapshot_every_n_steps=3, **o
    ),
    "state, iterable": lambda **o: StatefulDataLoader(Shards(), **FOUR, **o),
    "state, iterable with state": lambda **o: StatefulDataLoader(ShardsWithState(), **FOUR, **o),
}


def rows(batch):
    """A batch as what was drawn for each of its samples; one that is no batch is a sample."""
    parts = batch if isinstance(batch, (list, tuple)) else [batch]
    whole = [torch.as_tensor(part, dtype=torch.float64) for part in parts]
    if whole[0].dim() == 0:
        return [torch.cat([part.reshape(-1) for part in whole]).tolist()]
    return torch.cat([part.reshape(len(part), -1) for part in whole], 1).tolist()


def rest_of_run(resumable, first):
    """Every sample, and what the caller draws in between."""
    seen = []
    for epoch in range(first, EPOCHS):
        for batch, position in resumable.epoch(epoch):
            seen.append((epoch, rows(batch)[position.batch_offset :], torch.rand(()).item()))
        resumable.seek(DataPosition())
    return seen


def whole_run(resumable):
    """The same from the beginning, and what it takes to go on from places in it: after each batch, and within."""
    seen, saved = [], []
    for epoch in range(EPOCHS):
        for batch, _ in resumable.epoch(epoch):
            size, random_numbers = len(rows(batch)), RandomState()
            seen.append((epoch, rows(batch), torch.rand(()).item()))
            for taken in range(1, size) if size > 1 else ():
                resumable.commit(taken)
                saved.append((len(seen) - 1, taken, epoch, resumable.committed, random_numbers))
            resumable.commit(0)
            saved.append((len(seen), 0, epoch, resumable.committed, RandomState()))
        saved.append((len(seen), 0, epoch, resumable.committed, RandomState()))
        resumable.seek(DataPosition())
    resumable.close()
    return seen, saved


def through_a_file(path, place):
    io.write(path, {"place": vars(place)})
    return DataPosition(**io.read(path)["place"])


def assert_goes_on(make, saved, seen, path):
    number, taken, epoch, place, random_numbers = saved
    random.seed(f"{number} {taken}"), torch.manual_seed(number)  # of no concern
    resumable = ResumableLoader(make(), seed=7)
    resumable.seek(through_a_file(path, place))
    random_numbers.restore()
    found = rest_of_run(resumable, epoch)
    resumable.close()
    expected = list(seen[number:])
    if taken:
        expected[0] = (expected[0][0], expected[0][1][taken:], expected[0][2])
    assert found == expected


def assert_no_epoch_is_like_another(seen):
    epochs = [[batch for number, batch, _ in seen if number == epoch] for epoch in range(EPOCHS)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize(
    "epochs",
    [pytest.param([1], id="second epoch"), pytest.param([0, 1, 2], id="all epochs", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_from_every_place(make, epochs, tmp_path):
    seen, places = whole_run(ResumableLoader(make(), seed=7))
    assert_no_epoch_is_like_another(seen) if type(make()) is not list else None
    for saved in [places[0], *(saved for saved in places if saved[2] in epochs), places[-1]]:
        assert_goes_on(make, saved, seen, tmp_path / "place")


@pytest.mark.sweep(1 / 15)
@pytest.mark.parametrize("living_on", [False, True], ids=["", "living on"])
@pytest.mark.parametrize("name", WORKERS)
def test_with_workers(name, living_on, tmp_path):
    def with_workers():
        return WORKERS[name](num_workers=2, persistent_workers=living_on)

    seen, places = whole_run(ResumableLoader(with_workers(), seed=7))
    assert_no_epoch_is_like_another(seen)
    of_second = [saved for saved in places if saved[2] == 1]
    for saved in (of_second[0], of_second[len(of_second) // 2], of_second[-1]):
        assert_goes_on(with_workers, saved, seen, tmp_path / "place")


# ------------------------------------------------------------- what is fetched, and by whom


class Counting(Samples):
    def __init__(self):
        self.asked = []

    def __getitem__(self, i):
        self.asked.append(i)
        return super().__getitem__(i)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_only_the_rest_is_fetched(kind):
    whole, rest = Counting(), Counting()
    resumable = ResumableLoader(kind(whole, **SHUFFLED), seed=7)
    batches = resumable.epoch(0)
    next(batches), next(batches)
    resumable.commit(3)
    place = resumable.committed
    list(batches)
    assert len(whole.asked) == SAMPLES
    resumable = ResumableLoader(kind(rest, **SHUFFLED), seed=7)
    resumable.seek(place)
    assert [position.batch_offset for _, position in resumable.epoch(0)] == [3, 0]
    assert rest.asked == whole.asked[4:]  # the second batch once more, and the third


class Told(Samples):
    """Says who has made a sample, and what the worker's init function has left in its dataset."""

    left = 0

    def __getitem__(self, i):
        return i, get_worker_info().id, self.left, os.getpid()


def leave(worker):
    get_worker_info().dataset.left = worker + 10


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(("kind", "living_on"), [(DataLoader, False), (DataLoader, True), (StatefulDataLoader, False)])
def test_workers_that_live_on(kind, living_on):
    options = dict(batch_size=1, num_workers=2, persistent_workers=living_on, worker_init_fn=leave)
    resumable = ResumableLoader(kind(Told(), **options), seed=7)
    processes = []
    for epoch in range(2):
        batches = [batch for batch, _ in resumable.epoch(epoch)]
        assert all(left == worker + 10 for _, worker, left, _ in batches)
        processes.append({int(process) for *_, process in batches})
        resumable.seek(DataPosition())
    resumable.close()
    assert len(processes[0]) == len(processes[1]) == 2
    assert (processes[0] == processes[1]) is living_on


class Later(Samples):
    """Knows the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return i, self.epoch


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_live_on_know_the_epoch(kind):
    resumable = ResumableLoader(kind(Later(), batch_size=SAMPLES, num_workers=1, persistent_workers=True), seed=7)
    for epoch in range(3):
        [((_, told), _)] = resumable.epoch(epoch)
        assert told.tolist() == [epoch] * SAMPLES
        resumable.seek(DataPosition())
    resumable.close()


def test_augmentation_does_not_depend_on_workers():
    alone, helped = (
        list(ResumableLoader(DataLoader(Samples(), num_workers=n, **SHUFFLED), seed=7).epoch(0)) for n in (0, 2)
    )
    assert [rows(batch) for batch, _ in alone] == [rows(batch) for batch, _ in helped]


IN_MEMORY = TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES) / 8)
DETERMINISTIC = {
    "tensors": IN_MEMORY,
    "subset": Subset(IN_MEMORY, [8, 2, 5, 7, 1]),
    "concatenated": ConcatDataset([IN_MEMORY, Subset(IN_MEMORY, range(3))]),
    "indexed": sw.Indexed(IN_MEMORY),
    "list": [(k, k / 8) for k in range(SAMPLES)],
    "tensor": torch.arange(SAMPLES),
}


def collate_with_noise(items):
    return default_collate(items), noise()


def seen(dataset, **options):
    """Batches of two epochs, and random numbers that the caller draws after each."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    data = ResumableLoader(DataLoader(dataset, batch_size=4, shuffle=True, **options), seed=3)
    found = []
    for epoch in range(2):
        found += [(batch, noise()) for batch, _ in data.epoch(epoch)]
        data.seek(DataPosition())
    data.close()
    return repr(found)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [None, collate_with_noise], ids=["default", "random"])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_datasets_without_random_numbers_are_read_without_seeding_each_sample(name, collate, workers, monkeypatch):
    dataset = DETERMINISTIC[name]
    options = dict(collate_fn=collate, num_workers=workers)
    calls = []
    monkeypatch.setattr(rng, "reseed", lambda seed, reseed=rng.reseed: calls.append(seed) or reseed(seed))
    found = seen(dataset, **options)
    few = len(calls)
    for module in (rng, adapters):
        monkeypatch.setattr(module, "is_deterministic", lambda dataset: False)
    assert found == seen(dataset, **options)
    assert workers or len(calls) - few > few + len(dataset)


class Doubled(TensorDataset):
    """A subclass, which may draw random numbers."""


@pytest.mark.parametrize("dataset", [Samples(), Subset(Samples(), [1]), sw.Indexed(Samples()), Doubled(torch.ones(2))])
def test_other_datasets_may_draw_random_numbers(dataset):
    assert not rng.is_deterministic(dataset)
    assert not rng.is_deterministic(ConcatDataset([IN_MEMORY, dataset]))


def test_pinned_memory_is_asked_for():
    resumable = ResumableLoader(DataLoader(Samples(), pin_memory=True), seed=7)
    if torch.accelerator.is_available():
        assert all(part.is_pinned() for batch, _ in resumable.epoch(0) for part in batch)
    else:
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"):
            next(resumable.epoch(0))


def test_other_kinds_of_data_loader():
    """A subclass with another collation, as libraries of graphs have it, is as good as a DataLoader."""

    class Graphs(DataLoader):
        def __init__(self, dataset):
            super().__init__(dataset, batch_size=4, collate_fn=lambda samples: default_collate([s[0] for s in samples]))

    rest = Counting()
    resumable = ResumableLoader(Graphs(rest), seed=7)
    resumable.seek(DataPosition(batches=2))
    [(batch, _)] = resumable.epoch(0)
    assert batch.tolist() == rest.asked == [8, 9, 10]


def test_a_loader_whose_own_way_is_gone_through():
    class Backwards(DataLoader):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    resumable = ResumableLoader(Backwards(range(6), batch_size=2), seed=7)
    assert [batch.tolist() for batch, _ in resumable.epoch(0)] == [[4, 5], [2, 3], [0, 1]]


def test_a_sampler_that_hands_out_one_list():
    class Growing(Sampler):
        def __iter__(self):
            batch = []
            for i in range(3):
                batch.append(i)
                yield batch

    batches = ResumableLoader(DataLoader(Samples(), batch_sampler=Growing()), seed=7).epoch(0)
    assert [batch[0].tolist() for batch, _ in batches] == [[0], [0, 1], [0, 1, 2]]


def test_an_order_without_end():
    class Forever(Sampler):
        def __iter__(self):
            while True:
                yield random.randrange(SAMPLES)

    def batches(place):
        resumable = ResumableLoader(DataLoader(Samples(), batch_size=2, sampler=Forever()), seed=7)
        resumable.seek(place)
        return (rows(batch) for batch, _ in resumable.epoch(0))

    found, later = batches(DataPosition()), batches(DataPosition(batches=100))
    for _ in range(100):
        next(found)
    assert [next(found) for _ in range(3)] == [next(later) for _ in range(3)]


# ------------------------------------------------------------- refusals


class Strange:
    pass


def test_an_index_without_a_name():
    resumable = ResumableLoader(DataLoader(Samples(), batch_size=None, sampler=[Strange()]), seed=7)
    with pytest.raises(TypeError, match=r"an index must be a number, text, .* found <.*Strange object .*__repr__"):
        next(resumable.epoch(0))


def test_an_iterator_has_one_epoch():
    resumable = ResumableLoader(iter([torch.ones(2)] * 3), seed=7)
    assert len(list(resumable.epoch(0))) == 3
    resumable.seek(DataPosition())
    message = "must be iterable once per epoch; found a list_iterator, which is exhausted after epoch 1. Pass a list"
    with pytest.raises(sw.BatchError, match=message):
        next(resumable.epoch(1))


@pytest.mark.parametrize("loader", [[], DataLoader(Samples(), batch_size=99, drop_last=True)], ids=["list", "dropped"])
def test_an_epoch_of_nothing(loader):
    with pytest.raises(sw.BatchError, match="an epoch must have at least one batch; found none in epoch 4"):
        next(ResumableLoader(loader, seed=7).epoch(3))


class Unsaid(OwnState):
    def state_dict(self):
        return {"left": numpy.arange(3)}


def test_a_state_that_cannot_be_saved():
    message = (
        r"the state of a loader must be savable in a checkpoint: loader.loader.left must be .* found numpy.ndarray"
    )
    with pytest.raises(sw.CheckpointError, match=message):
        next(ResumableLoader(Unsaid(), seed=7, checkpointed=True).epoch(0))
    assert len(list(ResumableLoader(Unsaid(), seed=7).epoch(0))) == 5  # where nothing is saved


KINDS = {
    "a DataLoader with a map-style dataset": lambda: DataLoader(Samples(), batch_size=2),
    "a loader with state_dict and load_state_dict": lambda: StatefulDataLoader(Samples(), batch_size=2),
    "a loader that is replayed from the beginning of the epoch": Drawing,
}


@pytest.mark.parametrize("resumed", KINDS)
@pytest.mark.parametrize("begun", KINDS)
def test_another_kind_of_loader(begun, resumed):
    resumable, other = ResumableLoader(KINDS[begun](), seed=7), ResumableLoader(KINDS[resumed](), seed=7)
    next(resumable.epoch(0))
    resumable.commit(1)
    other.seek(resumable.committed)
    if begun == resumed:
        assert next(other.epoch(0))[1].batch_offset == 1
        return
    with pytest.raises(sw.CheckpointError, match=f"the kind of loader it was started with, {begun}; found {resumed}"):
        next(other.epoch(0))


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("workers", [0, 2])
def test_another_number_of_workers(workers):
    resumable = ResumableLoader(StatefulDataLoader(Samples(), batch_size=2, num_workers=1), seed=7)
    batches = resumable.epoch(0)
    next(batches), resumable.commit(0), next(batches), resumable.commit(0)
    other = ResumableLoader(StatefulDataLoader(Samples(), batch_size=2, num_workers=workers), seed=7)
    other.seek(resumable.committed)
    with pytest.raises(
        sw.CheckpointError, match=r"a loader must accept the state that was saved in the checkpoint; .* of workers"
    ):
        next(other.epoch(0))


def test_another_batch_size():
    resumable = ResumableLoader(DataLoader(Samples(), batch_size=2), seed=7)
    resumable.seek(DataPosition(batches=1, batch_offset=3))
    with pytest.raises(sw.CheckpointError, match="found a batch of 2 samples, of which 3 are recorded as used"):
        next(resumable.epoch(0))


# ------------------------------------------------------------- by the trainer

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))


class Images(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(6), i % 3, i


class Order:
    """The samples of each update; with `fails`, an error after so many."""

    def __init__(self, fails=None):
        self.updates, self.fails = [], fails

    def on_update(self, update):
        self.updates.append((update.index, update.losses.tolist()))
        if self.fails == len(self.updates):
            raise RuntimeError("on purpose")


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainer(run=None, callbacks=(), samples=9, loss_fn=loss_fn, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = sw.Step(model, optimizer, loss_fn, samples=samples, microbatch=4, recheck=False, **options)
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu")


def fit(trainer, loader, **options):
    torch.manual_seed(5)
    trainer.fit(loader, **options)


def parameters(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


IMAGES = {
    "ours": lambda: DataLoader(Images(), batch_size=7, shuffle=True),
    "its own": lambda: StatefulDataLoader(Images(), batch_size=7, shuffle=True),
    "gone through": lambda: list(DataLoader(Images(), batch_size=7)),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
@pytest.mark.parametrize("samples", [9, None, 40])
def test_resumed_again_and_again(make, tail, samples, tmp_path):
    """After every single update a new process, as it were."""
    if samples == 40 and tail == "drop":
        with pytest.raises(sw.BatchError, match="at least one update; found fewer than samples=40 samples in epoch 1"):
            trainer(samples=samples, tail=tail).fit(make(), updates=1)
        return
    data = make()
    whole = trainer(samples=samples, tail=tail, callbacks=[seen := Order()])
    fit(whole, data, validate=make(), updates=9)
    found = []
    for updates in range(1, 10):
        callbacks = [order := Order(), ModelCheckpoint(every="1up")]
        part = trainer(tmp_path, callbacks, samples, tail=tail)
        again = data if type(data) is list else make()
        fit(part, again, validate=make(), updates=updates, resume=True)
        found += order.updates
    assert found == seen.updates
    assert torch.equal(parameters(part), parameters(whole))
    assert part.step.counters == whole.step.counters


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("samples", [9, None])
@pytest.mark.parametrize("same", [True, False], ids=["the same loader", "another"])
def test_fit_goes_on_with_fit(make, samples, same):
    data = make()
    whole, parts = trainer(None, [seen := Order()], samples), trainer(None, [found := Order()], samples)
    fit(whole, data, updates=9)
    loaders = [data] * 9 if same or type(data) is list else [make() for _ in range(9)]
    torch.manual_seed(5)
    for updates, loader in enumerate(loaders, start=1):
        parts.fit(loader, updates=updates)
    assert found.updates == seen.updates
    assert torch.equal(parameters(parts), parameters(whole))


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("samples", [9, None])
def test_after_an_error_of_a_callback(make, samples):
    data = make()
    whole, broken = trainer(None, [seen := Order()], samples), trainer(None, [found := Order(fails=3)], samples)
    fit(whole, data, updates=9)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(broken, data, updates=9)
    broken.fit(data, updates=9)
    assert found.updates == seen.updates
    assert torch.equal(parameters(broken), parameters(whole))


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("calls", [1, 2, 5, 6, 8])
def test_after_an_error_in_the_model(make, calls):
    """The window is given up; its samples come again."""
    seen, left = [], calls

    def failing(model, batch):
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("on purpose")
        seen.extend(batch[2].tolist())
        return loss_fn(model, batch)

    data = make()
    broken = trainer(callbacks=[order := Order()], loss_fn=failing)

    def fit_in_parts():
        for until in (dict(updates=1), dict(updates=2), dict(epochs=1)):  # a window may be open from one to the next
            broken.fit(data, **until)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit_in_parts()
    del seen[len(order.updates) * 9 :]
    broken.fit(data, epochs=1)
    assert sorted(seen) == list(range(30))


def test_a_generator():
    data = DataLoader(Images(), batch_size=7)
    whole, parts = trainer(samples=None), trainer(samples=None)
    fit(whole, data, updates=4)
    generator = (batch for batch, _ in ResumableLoader(data, 0).epoch(0))
    torch.manual_seed(5)
    for updates in (1, 3, 4):
        parts.fit(generator, updates=updates)
    assert torch.equal(parameters(parts), parameters(whole))
    with pytest.raises(sw.BatchError, match="found a generator, which is exhausted after epoch 1"):
        parts.fit(generator, updates=9)


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_update(tmp_path):
    run = trainer(tmp_path, [order := Order()])
    with pytest.raises(sw.CheckpointError, match="the state of a loader must be savable in a checkpoint"):
        run.fit(Unsaid(), epochs=1)
    assert order.updates == []


def test_carried_samples_that_wait_cannot_be_saved(tmp_path):
    run = trainer(tmp_path, [ModelCheckpoint(every="1ep")], tail="carry", transforms=[sw.drop(largest=1)])
    with pytest.raises(sw.CheckpointError, match="an open window can be saved only as accumulated sums; found samples"):
        run.fit(IMAGES["ours"](), epochs=2)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("transforms", [[], [sw.clip(1.0)]], ids=["plain", "clip"])
@pytest.mark.parametrize("batches", [1, 2, 4])
def test_saved_in_the_middle_of_a_window(make, transforms, batches, tmp_path):
    data, options = make(), dict(samples=20, transforms=transforms)
    whole, saving = trainer(**options), trainer(tmp_path, **options)
    fit(whole, data, epochs=2)
    own = saving._batches

    def broken_off(resumable):
        for k, batch in enumerate(own(resumable), start=1):
            yield batch
            if k == batches:
                saving.save()
                raise RuntimeError("on purpose")

    saving._batches = broken_off
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(saving, data if type(data) is list else make(), epochs=1)
    part = trainer(tmp_path, **options)
    fit(part, data if type(data) is list else make(), epochs=2, resume=True)
    assert torch.equal(parameters(part), parameters(whole))
    assert part.step.counters == whole.step.counters


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
def test_windows_that_a_transform_sees_as_a_whole(make, tmp_path):
    data, options = make(), dict(tail="carry", transforms=[sw.drop(largest=1)])
    whole = trainer(callbacks=[seen := Order()], **options)
    fit(whole, data, updates=9)
    found = []
    for updates in range(1, 10):
        part = trainer(tmp_path, [order := Order(), ModelCheckpoint(every="1up")], **options)
        fit(part, data if type(data) is list else make(), updates=updates, resume=True)
        found += order.updates
    assert found == seen.updates


def test_validation_is_the_same_each_time():
    """Also where its order and its augmentation are drawn from a generator that is never reset."""
    run = trainer(loss_fn=lambda model, batch: batch[1].sum(1) * torch.rand(len(batch[0])))
    loader = DataLoader(WithGenerators(), batch_size=3, shuffle=True, generator=torch.Generator())
    assert run.evaluate(loader) == run.evaluate(loader) != trainer_of_another_seed(run).evaluate(loader)


def trainer_of_another_seed(run):
    return sw.Trainer(run.step, progress=False, device="cpu", seed=1)


@pytest.mark.parametrize("make", [IMAGES["ours"], IMAGES["its own"]])
def test_validation_on_the_training_data_in_the_middle_of_an_epoch(make, tmp_path):
    class Looking:
        def on_update(self, trainer):
            trainer.evaluate(data)

    data = make()
    whole = trainer()
    fit(whole, data, updates=9)
    for updates in (3, 7, 9):
        data = make()
        part = trainer(tmp_path, [Looking(), ModelCheckpoint(every="1up")])
        fit(part, data, updates=updates, resume=True)
    assert torch.equal(parameters(part), parameters(whole))


@pytest.mark.parametrize(
    "look", [lambda made: made.evaluate([]), lambda made: made.fit(IMAGES["ours"](), validate=[], epochs=1)]
)
def test_validation_on_nothing(look):
    message = "an evaluation must have at least one batch; found none. Check the loader: a generator is empty after"
    with pytest.raises(sw.BatchError, match=message):
        look(trainer())


def test_checkpoints_do_not_reseed_a_sampler(tmp_path):
    """RandomSampler with replacement draws 32 indices at a time, from its own generator."""

    def draws(run, every):
        sampler = RandomSampler(range(300), replacement=True, generator=torch.Generator())
        seen = []

        def loss_fn(model, batch):
            seen.extend(batch[1].tolist())
            return model(batch[0])[:, 0]

        model = nn.Linear(2, 1)
        step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
        callbacks = [sw.callbacks.ModelCheckpoint(every=every)]
        trainer = sw.Trainer(step, run, callbacks, progress=False, device="cpu")
        loader = DataLoader([(torch.ones(2), i) for i in range(300)], batch_size=4, sampler=sampler)
        trainer.fit(loader, updates=75)
        return seen

    whole = draws(tmp_path / "without", "9ep")
    assert len(whole) == 300
    assert draws(tmp_path / "with", "10up") == whole
