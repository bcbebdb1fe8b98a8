"""Whose sample is whose: N ranks together see each sample once, in the order of one process; and others can go on.

Ranks are played one after the other: a share is a number out of how many, and needs no process group.
"""

import re
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import samplewise as sw
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.data.adapters import kind_name
from samplewise.loop.data.loader import DataPosition, ResumableLoader
from samplewise.loop.data.sharding import RankShard, ShardedBatches
from samplewise.parallel import collectives

SAMPLES = 23


class Samples(Dataset):
    """The number of the sample, and what was drawn for it."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return int(i), torch.rand(())


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(SAMPLES):
            yield i, torch.rand(())


class StreamWithState(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < SAMPLES:
            self.at += 1
            yield self.at - 1, torch.zeros(())
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Uneven:
    """A batch sampler: 5 samples, then 4, 5, 4, ..."""

    def __iter__(self):
        order, size = torch.randperm(SAMPLES).tolist(), 5
        while order:
            yield order[:size]
            order, size = order[size:], 9 - size


class HasState:
    """A loader that is no DataLoader, and says where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < SAMPLES:
            start, self.at = self.at, self.at + 6
            numbers = torch.arange(start, min(start + 6, SAMPLES))
            yield numbers, torch.zeros(len(numbers))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def ready_made():
    return [(part, part / 2) for part in torch.arange(SAMPLES).split(6)]


LOADERS = {
    "in order": lambda: DataLoader(Samples(), batch_size=4),
    "shuffled": lambda: DataLoader(Samples(), batch_size=4, shuffle=True),
    "two workers": lambda: DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2),
    "one by one": lambda: DataLoader(Samples(), batch_size=None, shuffle=True),
    "a batch sampler": lambda: DataLoader(Samples(), batch_sampler=Uneven()),
    "a batch sampler of torch's": lambda: DataLoader(
        Samples(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 6, False)
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a stream one by one": lambda: DataLoader(Stream(), batch_size=None),
    "stateful": lambda: StatefulDataLoader(Samples(), batch_size=4, shuffle=True),
    "stateful with workers": lambda: StatefulDataLoader(Samples(), batch_size=4, num_workers=2),
    "stateful stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "stateful stream with a state": lambda: StatefulDataLoader(StreamWithState(), batch_size=4),
    "a list": ready_made,
    "a tuple": lambda: tuple(ready_made()),
    "a loader with a state": HasState,
}
MOVABLE = [name for name in LOADERS if "state" not in name]  # where others can go on in the middle of an epoch


def of(name, rank=0, size=1):
    return ResumableLoader(LOADERS[name](), seed=5, shard=RankShard(rank, size))


def read(resumable, epoch=0, batches=None):
    """(number of the sample, what was drawn for it)"""
    found = []
    for done, (batch, position) in enumerate(resumable.epoch(epoch), 1):
        numbers, drawn = (torch.as_tensor(part).reshape(-1)[position.batch_offset :].tolist() for part in batch)
        found += zip(numbers, drawn, strict=True)
        if done == batches:
            break
    resumable.close()
    return found


def in_turn(shares):
    """The samples of all ranks as one process would have them."""
    longest = max(map(len, shares))
    return [share[k] for k in range(longest) for share in shares if k < len(share)]


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_once_in_the_order_of_one_process(name, size):
    for epoch in range(2):
        shares = [read(of(name, rank, size), epoch) for rank in range(size)]
        alone = read(of(name), epoch)
        assert sorted(number for share in shares for number, _ in share) == list(range(SAMPLES))
        assert [len(share) for share in shares] == [len(range(rank, SAMPLES, size)) for rank in range(size)]
        if name != "stateful":  # whose own sampler draws in an order of its own
            assert in_turn(shares) == alone


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("name", LOADERS)
def test_rank_resumes_in_mid_epoch(name):
    whole = of(name, 1, 2)
    places, batches = [], []
    for batch, _ in whole.epoch(0):
        places.append(whole.position_after(0) if places else DataPosition())
        batches.append(batch[0])
        last = whole.position_after(0)
    for done in range(1, len(batches)):
        again = of(name, 1, 2)
        rest = read(again, batches=done)
        there = of(name, 1, 2)
        there.seek(again.position_after(0))
        rest += read(there)
        assert [number for number, _ in rest] == torch.cat([torch.as_tensor(b).reshape(-1) for b in batches]).tolist()
    assert last.samples == len(range(1, SAMPLES, 2))


def used(name, size, batches):
    """What ranks have used that had so many batches each, and where they are."""
    loaders = [of(name, rank, size) for rank in range(size)]
    shares = [read(resumable, batches=batches) for resumable in loaders]
    places = [resumable.position_after(0) for resumable in loaders]
    if size == 1:
        return shares[0], loaders[0].state(0), loaders[0]
    return (
        in_turn(shares),
        {"positions": [vars(p) for p in places], "samples_used": loaders[0]._used(places)},
        loaders[0],
    )


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow), (2, 3)],
)
@pytest.mark.parametrize("name", MOVABLE)
def test_resume_with_another_number_of_ranks(name, before, after, monkeypatch):
    alone = read(of(name))
    for batches in (1, 2):
        seen, state, _ = used(name, before, batches)
        assert seen == alone[: len(seen)]
        rest = []
        for rank in range(after):
            with monkeypatch.context() as patch:  # the next state is taken by one process
                patch.setattr(collectives, "size", lambda: after)
                patch.setattr(collectives, "rank", lambda rank=rank: rank)
                resumable = of(name, rank, after)
                resumable.load(state, 0)
                rest.append(read(resumable))
        assert in_turn(rest) == alone[len(seen) :]


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in MOVABLE])
def test_loaders_that_need_the_same_number_of_ranks(name, monkeypatch):
    _, state, resumable = used(name, 1, 1)
    monkeypatch.setattr(collectives, "size", lambda: 2)
    kind = kind_name(resumable._adapter.kind)
    message = (
        f"inside an epoch, a run with {kind} must be resumed with the number of ranks it was saved with, 1; found 2. "
        "Start that number of ranks, or resume from a checkpoint between two epochs."
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        of(name, 0, 2).load(state, 0)
    fresh = of(name, 0, 2)
    fresh.load({"position": vars(DataPosition())}, 1)  # between epochs it makes no difference
    assert len(read(fresh, 1)) == len(range(0, SAMPLES, 2))


class Numbers(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return i, float(i)


@given(
    samples=st.integers(1, 40),
    used=st.integers(0, 40),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_resume_with_any_number_of_ranks_after_any_sample(samples, used, before, after, sizes):
    """Whatever the batches of those who were there before and of those who come."""

    def resumable(rank, size, batch):
        loader = DataLoader(Numbers(samples), batch_size=batch, shuffle=True)
        return ResumableLoader(loader, seed=5, shard=RankShard(rank, size))

    order = read(resumable(0, 1, 1))
    used = min(used, samples)
    own = [len(range(rank, used, before)) for rank in range(before)]
    kind = resumable(0, 1, 1)._adapter.kind
    ends = [len(range(rank, samples, before)) for rank in range(before)]
    places = []
    for n, end in zip(own, ends, strict=True):
        inside = 0 if n == end else n % sizes[0]  # a batch of which all samples are used lies behind the position
        places.append(DataPosition(-(-(n - inside) // sizes[0]), inside, None, kind, 0, n - inside))
    there = resumable(0, before, sizes[0])
    assert there._used(places) == used
    there.seek(places[0])
    state = there.state(0) if before == 1 else {"positions": list(map(vars, places)), "samples_used": used}
    rest = []
    for rank in range(after):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "size", lambda: after)
            patch.setattr(collectives, "rank", lambda rank=rank: rank)
            other = resumable(rank, after, sizes[1] if after != before else sizes[0])
            other.load(state, 0)
            rest.append(read(other))
    assert sorted(chain(*rest)) == sorted(order[used:])
    if after != before:
        assert in_turn(rest) == order[used:]


class WorkersShare(IterableDataset):
    """Each worker has every other sample."""

    def __iter__(self):
        info = get_worker_info()
        return iter([(i, torch.zeros(())) for i in range(info.id, SAMPLES, info.num_workers)])


def test_a_stream_with_workers_is_divided_in_each_of_them():
    loader = DataLoader(WorkersShare(), batch_size=3, num_workers=2)
    shares = [read(ResumableLoader(loader, 0, shard=RankShard(rank, 2))) for rank in range(2)]
    assert sorted(number for share in shares for number, _ in share) == list(range(SAMPLES))
    assert all(len(share) >= SAMPLES // 2 - 1 for share in shares)


def test_ranks_with_samples_of_their_own_stay_as_many(monkeypatch):
    _, state, _ = used("in order", 1, 1)
    monkeypatch.setattr(collectives, "size", lambda: 2)
    monkeypatch.setattr(collectives, "rank", lambda: 0)
    with pytest.raises(CheckpointError, match=r"inside an epoch, .* must be resumed with the number of ranks it"):
        ResumableLoader(sw.already_sharded(LOADERS["in order"]()), seed=5).load(state, 0)


def test_drop_last_leaves_no_rank_with_less():
    loader = DataLoader(Samples(), batch_size=4, drop_last=True)
    shares = [read(ResumableLoader(loader, 0, shard=RankShard(rank, 2))) for rank in range(2)]
    assert [len(share) for share in shares] == [8, 8]  # as one process with batches of 8
    assert [number for number, _ in in_turn(shares)] == list(range(16))


def test_rows_of_a_share():
    share = RankShard(1, 3, start=5)  # 6, 9, 12, ...
    own = [number for place in range(0, 30, 4) for number in (place + row for row in share.rows(place, 4))]
    assert own == list(range(6, 32, 3))


def test_small_ready_made_batches_are_refused_but_for_the_last():
    divided = ShardedBatches(RankShard(1, 2))
    assert divided.part(torch.arange(2)).tolist() == [1]
    assert divided.part(torch.arange(1)) is None  # there may be no more
    message = (
        "batches that are sharded over 2 ranks must have at least one sample for each rank; found a batch of 1 sample "
        "inside an epoch. Use larger batches, or a DataLoader with batch_size."
    )
    with pytest.raises(BatchError, match=re.escape(message)):
        divided.part(torch.arange(4))


def test_batches_that_cannot_be_cut_go_to_one_rank_each():
    batches = [{"graph": object(), "number": number} for number in range(5)]
    shares = [list(ShardedBatches(RankShard(rank, 2)).select(batches)) for rank in range(2)]
    assert shares == [batches[::2], batches[1::2]]


def test_samplers_that_divide_by_themselves_are_refused():
    loader = DataLoader(Samples(), sampler=DistributedSampler(Samples(), 2, 0))
    message = (
        "a loader must yield all samples on every rank, since the trainer shards them; found a DistributedSampler, "
        "which repeats some samples to make shards equal. Remove it, or pass sw.already_sharded(loader) to keep it "
        "with the repeated samples."
    )
    with pytest.raises(BatchError, match=re.escape(message)):
        ResumableLoader(loader, 0, shard=RankShard(0, 2))
    ResumableLoader(sw.already_sharded(loader), 0, shard=RankShard(0, 2))
    split = Stream()
    split._distributed = "by node"
    message = "found a Stream that has been split by node. Pass it without the split, or pass sw.already_sharded("
    with pytest.raises(BatchError, match=re.escape(message)):
        ResumableLoader(DataLoader(split), 0, shard=RankShard(0, 2))


# ------------------------------------------------------------------------------------------------- orders that differ


class OwnOrder:
    """A sampler that draws from where nobody can seed it."""

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(collectives.rank())).tolist())

    def __len__(self):
        return SAMPLES


class OwnStream(IterableDataset):
    def __iter__(self):
        return iter([(100 * collectives.rank() + i, 0.0) for i in range(SAMPLES)])


def looked(kind):
    loader = {
        "sampler": lambda: DataLoader(Samples(), batch_size=4, sampler=OwnOrder()),
        "stream": lambda: DataLoader(OwnStream(), batch_size=4),
        "list": lambda: [(torch.arange(4) + collectives.rank(), torch.zeros(4))],
        "fine": LOADERS["shuffled"],
        "fine stream": LOADERS["a stream"],
        "fine list": ready_made,
    }[kind]()
    resumable = ResumableLoader(loader, 0, shard=RankShard(collectives.rank(), collectives.size()))
    resumable.prefetch(0)
    return read(resumable)


def test_different_orders_are_detected(two):
    message = (
        "DistributedError: every rank must iterate over the same samples in the same order, of which it takes its "
        "shard; found orders that differ between ranks. Let samplers and datasets draw random numbers from generators "
        "that are their attributes, or from the global generators of torch, Python or NumPy; or shard the data "
        "yourself and pass sw.already_sharded(loader)."
    )
    for kind in ("sampler", "stream", "list"):
        assert two.errors(looked, kind) == [message] * 2
    for kind in ("fine", "fine stream", "fine list"):
        shares = two.run(looked, kind)
        assert sorted(number for share in shares for number, _ in share) == list(range(SAMPLES))
