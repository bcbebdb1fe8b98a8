"""Poisson sampling: distribution of the draws, position after a restart, ranks, workers, users, views, refusals."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from samplewise.core.batches import map_leaves, to_device
from samplewise.errors import BatchError
from samplewise.loop.data.rng import seed_samples
from samplewise.privacy import sampling
from samplewise.privacy.rng import Secret
from samplewise.privacy.sampling import Draw, DrawnBatch, DrawnDataset, DrawState, PoissonSampler, Users, make_loader

pytest.importorskip("numpy")
pytest.importorskip("cryptography")
stats = pytest.importorskip("scipy.stats")

UNITS = 40
RATE = 0.1
DRAWS = 20_000


def state(update=0, branch=0, seed=19):
    return DrawState(Secret.from_seed(seed), branch, update)


def sampler(units=UNITS, rate=RATE, updates=1000, at=None, **options):
    return PoissonSampler(units, rate, updates, at or state(), **options)


def numbers(n=100):
    """Dataset whose sample i is (i as a float, i as an int)."""
    return TensorDataset(torch.arange(float(n)), torch.arange(n))


def loader(dataset=None, at=None, rate=RATE, updates=1000, secure=False, **options):
    return make_loader(
        numbers() if dataset is None else dataset,
        sample_rate=rate,
        updates=updates,
        state=at or state(),
        secure=secure,
        **options,
    )


def rows(drawn):
    """Indices of the samples of a batch of `numbers`."""
    return [] if drawn.batch is None else drawn.batch[1].tolist()


# ------------------------------------------------------------------------------- distribution


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["philox", "chacha20"])
def drawn(request):
    """Matrix (draws, units) of zeros and ones."""
    drawing = sampler(secure=request.param)
    matrix = torch.zeros(DRAWS, UNITS, dtype=torch.float64)
    for number in range(DRAWS):
        matrix[number, drawing.draw(number, 0)] = 1
    return matrix


def test_inclusion_frequencies(drawn):
    deviation = (RATE * (1 - RATE) / DRAWS) ** 0.5
    assert (drawn.mean(0) - RATE).abs().max().item() < 4.5 * deviation


def test_sizes_are_binomial(drawn):
    counts = torch.bincount(drawn.sum(1).long(), minlength=UNITS + 1).tolist()
    expected = (DRAWS * stats.binom.pmf(range(UNITS + 1), UNITS, RATE)).tolist()
    last = max(size for size in range(UNITS + 1) if sum(expected[size:]) >= 10)  # larger sizes are one class
    observed = [*counts[:last], sum(counts[last:])]
    assert stats.chisquare(observed, [*expected[:last], sum(expected[last:])]).pvalue > 0.001


def test_pairs_are_independent(drawn):
    both = (drawn.T @ drawn / DRAWS)[*torch.triu_indices(UNITS, UNITS, 1)]
    chance = RATE**2
    assert (both - chance).abs().max().item() < 4.5 * (chance * (1 - chance) / DRAWS) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 10])
def test_draws_are_independent(drawn, lag):
    """A unit that was drawn is as likely as before in later draws; so are all other units."""
    again = drawn[:-lag].T @ drawn[lag:] / (DRAWS - lag)
    chance = RATE**2
    assert (again - chance).abs().max().item() < 4.5 * (chance * (1 - chance) / (DRAWS - lag)) ** 0.5


@pytest.mark.parametrize("secure", [False, True])
def test_rate_one_draws_all(secure):
    assert sampler(rate=1.0, secure=secure).draw(3, 0) == list(range(UNITS))


def test_large_populations_are_drawn_in_blocks(monkeypatch):
    whole = sampler(1000).draw(0, 0)
    monkeypatch.setattr(sampling, "BLOCK", 64)
    assert sampler(1000).draw(0, 0) == whole


def test_branches_and_secrets_have_their_own_draws():
    one = sampler(1000)
    draws = [one.draw(0, 0), one.draw(1, 0), one.draw(0, 1), sampler(1000, at=state(seed=3)).draw(0, 0)]
    assert len({tuple(draw) for draw in draws}) == 4


# ---------------------------------------------------------------------------- truncated draws


def test_truncated_draws_have_at_most_max_batch():
    plain = sampler()
    truncated = sampler(max_batch=4)
    for number in range(300):
        full, part = plain.draw(number, 0), truncated.draw(number, 0)
        assert part == full if len(full) <= 4 else len(part) == 4 and set(part) < set(full)
        assert part == sorted(part)


def test_truncation_keeps_a_uniform_subset():
    """All subsets of two of the five units of a full draw are equally frequent."""
    truncated = sampler(5, rate=1.0, max_batch=2)
    counts = torch.zeros(5, 5)
    for number in range(4000):
        first, second = truncated.draw(number, 0)
        counts[first, second] += 1
    assert stats.chisquare(counts[*torch.triu_indices(5, 5, 1)].numpy()).pvalue > 0.001


# ----------------------------------------------------------------------- position in the run


def test_restart_gives_the_same_sequence():
    first = list(sampler())
    for update in (0, 1, 7, 9):
        assert list(sampler(at=state(update))) == first[update:]
    assert [draw.number for draw in first] == list(range(10))
    assert all(draw.branch == 0 and draw.source == Secret.from_seed(19).public_id for draw in first)


def test_passes_end_at_multiples_of_their_length():
    at = state()
    one = sampler(updates=25, at=at)
    assert len(one) == one.per_pass == 10
    passes = []
    for _ in range(4):
        passes.append([draw.number for draw in one])
        at.update += len(passes[-1])
    assert passes == [list(range(10)), list(range(10, 20)), list(range(20, 25)), []]


@pytest.mark.parametrize(("rate", "per_pass"), [(1.0, 1), (0.7, 1), (0.4, 2), (2048 / 60_000, 29), (1 / 93, 93)])
def test_length_of_a_pass(rate, per_pass):
    assert len(sampler(rate=rate)) == len(list(sampler(rate=rate))) == per_pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_was_left_continues(workers):
    """Batches that workers had prefetched are drawn again."""
    at = state()
    one = loader(at=at, num_workers=workers, persistent_workers=workers > 0)
    seen = []
    for drawn in one:
        seen.append(drawn)
        at.update += 1
        if at.update == 4:
            break
    for drawn in one:
        seen.append(drawn)
        at.update += 1
    assert [drawn.draw for drawn in seen] == list(range(10))
    assert [rows(drawn) for drawn in seen] == [list(draw) for draw in sampler(100)]


def test_the_branch_is_read_at_the_start_of_a_pass():
    at = state()
    one = sampler(at=at)
    draws = iter(one)
    next(draws)
    at.branch = 1
    assert next(draws).branch == 0
    assert next(iter(one)).branch == 1


# ------------------------------------------------------------------------ workers and batches


@pytest.mark.parametrize("secure", [False, True])
def test_workers_do_not_change_the_sequence(secure):
    here, there = (list(loader(num_workers=workers, secure=secure)) for workers in (0, 2))
    assert [rows(drawn) for drawn in here] == [rows(drawn) for drawn in there]
    assert [drawn.draw for drawn in there] == list(range(10))


class AsDict(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "id": index, "name": f"sample {index}"}


@dataclass
class Sample:
    x: torch.Tensor
    y: int


class AsDataclass(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return Sample(torch.full((3,), float(index)), index)


def collate_samples(samples):
    y = torch.stack([torch.as_tensor(sample.y) for sample in samples])
    return Sample(torch.stack([sample.x for sample in samples]), y)


@pytest.mark.parametrize("workers", [0, 2])
def test_dict_batches(workers):
    for drawn, expected in zip(loader(AsDict(), num_workers=workers), sampler(100), strict=True):
        assert drawn.batch["id"].tolist() == expected
        assert drawn.batch["x"].shape == (len(expected), 3)
        assert drawn.batch["name"] == [f"sample {index}" for index in expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_dataclass_batches_of_a_collate_fn(workers):
    batches = loader(AsDataclass(), collate_fn=collate_samples, num_workers=workers)
    for drawn, expected in zip(batches, sampler(100), strict=True):
        assert isinstance(drawn.batch, Sample)
        assert drawn.batch.y.tolist() == expected


def collate_some(samples):
    assert samples
    return torch.stack([x for x, _ in samples])


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_draws_are_yielded(workers):
    """Five samples at rate 0.1: more than half of the draws are empty. The collate_fn is not called for them."""
    batches = list(loader(numbers(5), collate_fn=collate_some, num_workers=workers))
    assert [drawn.draw for drawn in batches] == list(range(10))
    empty = [drawn for drawn in batches if drawn.batch is None]
    assert 0 < len(empty) < 10
    assert all(drawn.owners is None for drawn in empty)


class Several(Dataset):
    """Dataset with its own __getitems__."""

    def __init__(self, n=100, lose=0):
        self.n = n
        self.lose = lose
        self.calls = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor(float(index)), int(index)

    def __getitems__(self, indices):
        assert type(indices) is list and indices
        self.calls.append(indices)
        return [self[index] for index in indices][self.lose :]


def test_getitems_of_the_data_set_is_used():
    dataset = Several()
    assert [rows(drawn) for drawn in loader(dataset)] == [list(draw) for draw in sampler(100)]
    assert dataset.calls == [list(draw) for draw in sampler(100) if draw]
    dataset = Several(3)
    assert any(drawn.batch is None for drawn in loader(dataset))


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_in_memory_are_collated_as_by_default_collate(workers):
    """They are indexed once per draw, instead of sample by sample."""
    images = torch.randn(100, 2, 3, 3).to(memory_format=torch.channels_last)
    dataset = TensorDataset(images, torch.rand(3, 100).T, torch.arange(100))

    class OneByOne(TensorDataset):
        pass

    plain = loader(OneByOne(*dataset.tensors), rate=0.03, num_workers=workers)
    assert loader(dataset, rate=0.03).dataset.__getitems__(Draw([1, 5], 0, 0, "", None)).collated
    assert not loader(dataset, rate=0.03, collate_fn=list).dataset.__getitems__(Draw([1, 5], 0, 0, "", None)).collated
    for fast, slow in zip(loader(dataset, rate=0.03, num_workers=workers), plain, strict=True):
        assert (fast.draw, fast.samples, type(fast.batch)) == (slow.draw, slow.samples, type(slow.batch))
        for a, b in zip(fast.batch or [], slow.batch or [], strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


def test_getitems_must_return_all_samples():
    with pytest.raises(BatchError, match=r"__getitems__ of Several must return one sample per index; found 9 samples"):
        list(loader(Several(10, lose=1), rate=1.0))


@pytest.mark.parametrize("workers", [0, 2])
def test_subsets(workers):
    """torch's Subset has __getitems__, and calls the one of its dataset."""
    part = Subset(numbers(), range(99, -1, -1))
    for drawn, draw in zip(loader(part, num_workers=workers), sampler(100), strict=True):
        assert rows(drawn) == [99 - index for index in draw]


def test_only_the_main_process_has_the_secret():
    key = state().secret.bytes
    one = loader(num_workers=2)
    sent = (one.dataset, one.collate_fn, one.worker_init_fn, next(iter(one.batch_sampler)))
    assert all(key not in pickle.dumps(part) for part in sent)
    with pytest.raises(TypeError, match="a Secret must stay in the process that made it"):
        pickle.dumps(one.batch_sampler)
    assert key.hex() not in repr(one.batch_sampler.state)


@pytest.mark.slow
def test_spawned_workers():
    """Everything that a worker needs can be pickled."""
    one = loader(num_workers=1, multiprocessing_context="spawn", updates=2)
    assert [rows(drawn) for drawn in one] == [list(draw) for draw in sampler(100, updates=2)]


class KnowsItsWorker(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return int(isinstance(get_worker_info().dataset, KnowsItsWorker)), get_worker_info().dataset.mark


def mark_dataset(worker):
    get_worker_info().dataset.mark = 17


def test_worker_init_fn_gets_the_data_set_of_the_user():
    drawn = next(iter(loader(KnowsItsWorker(), rate=1.0, num_workers=1, worker_init_fn=mark_dataset)))
    assert drawn.batch[0].tolist() == [1] * 10
    assert drawn.batch[1].tolist() == [17] * 10


def test_draws_survive_pickle_and_copy():
    draw = Draw([3, 5], 7, 1, "abc", [0, 0])
    for same in (pickle.loads(pickle.dumps(draw)), copy.copy(draw), copy.deepcopy(draw)):
        assert same == draw and vars(same) == vars(draw)


# -------------------------------------------------------------------------------- DrawnBatch


def test_drawn_batches_are_moved_and_mapped():
    drawn = DrawnBatch((torch.zeros(2, 3), ["a", "b"]), torch.tensor([0, 1]), 4, 1, "abc", 2)
    moved = to_device(drawn, torch.device("meta"))
    assert isinstance(moved, DrawnBatch)
    assert moved.batch[0].is_meta and moved.owners.is_meta and moved.batch[1] == ["a", "b"]
    assert (moved.draw, moved.branch, moved.source) == (4, 1, "abc")
    doubled = map_leaves(drawn, lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf)
    assert doubled.batch[0].eq(1).all() and doubled.owners.tolist() == [1, 2] and doubled.draw == 4
    empty = to_device(DrawnBatch(None, None, 4, 1, "abc", 0), torch.device("meta"))
    assert empty == DrawnBatch(None, None, 4, 1, "abc", 0)


def test_drawn_batches_are_pinned():
    class Pinnable:
        pinned = False

        def pin_memory(self):
            new = Pinnable()
            new.pinned = True
            return new

    drawn = DrawnBatch({"x": Pinnable(), "name": ["a"]}, Pinnable(), 4, 1, "abc", 1).pin_memory()
    assert drawn.batch["x"].pinned and drawn.owners.pinned and drawn.batch["name"] == ["a"]
    assert DrawnBatch(None, None, 4, 1, "abc", 0).pin_memory() == DrawnBatch(None, None, 4, 1, "abc", 0)


# -------------------------------------------------------------------------------------- ranks


def on_rank(monkeypatch, rank, size):
    monkeypatch.setattr(sampling.collectives, "rank", lambda: rank)
    monkeypatch.setattr(sampling.collectives, "size", lambda: size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"max_batch": 5}], ids=["all", "truncated"])
def test_ranks_share_one_draw(monkeypatch, size, options):
    whole = list(sampler(**options))
    parts = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        parts.append(list(sampler(**options)))
    for draw, *shares in zip(whole, *parts, strict=True):
        assert sorted(index for share in shares for index in share) == list(draw)  # a union without repetitions
        assert {share.number for share in shares} == {draw.number}
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_without_samples_takes_part(monkeypatch):
    on_rank(monkeypatch, 1, 2)
    batches = list(loader(numbers(4)))
    assert len(batches) == 10
    assert sum(drawn.batch is None for drawn in batches) > 5


def test_a_user_is_on_one_rank(monkeypatch):
    owners = []
    for rank in range(2):
        on_rank(monkeypatch, rank, 2)
        one = loader(rate=0.5, users=[index % 10 for index in range(100)])
        owners.append([set(drawn.owners.tolist()) for drawn in one])
    assert all(not (first & second) for first, second in zip(*owners, strict=True))


# -------------------------------------------------------------------------------------- users

NAMES = ["eve", "bob", "eve", "ann", "bob", "eve", "zoe", "dan"]


def test_users_are_numbered_by_first_appearance():
    assert Users.of(NAMES).samples == [[0, 2, 5], [1, 4], [3], [6], [7]]
    assert len(Users.of(NAMES)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_all_samples_of_a_drawn_user_and_only_these(workers):
    order = ["eve", "bob", "ann", "zoe", "dan"]
    one = loader(numbers(8), users=NAMES, rate=0.4, at=state(update=4), num_workers=workers)
    assert one.batch_sampler.units == 5
    for drawn in one:
        users = sampler(5, rate=0.4).draw_units(drawn.draw, 0).tolist()
        assert sorted(rows(drawn)) == [i for i, name in enumerate(NAMES) if order.index(name) in users]
        assert [order[owner] for owner in drawn.owners.tolist()] == [NAMES[i] for i in rows(drawn)]
        assert drawn.owners.dtype == torch.int64


def test_an_empty_draw_of_users_has_no_owners():
    empty = [drawn for drawn in loader(numbers(8), users=NAMES) if drawn.batch is None]
    assert empty and all(drawn.owners.shape == (0,) for drawn in empty)


def test_max_batch_counts_users():
    for drawn in loader(numbers(8), users=NAMES, rate=1.0, updates=20, max_batch=2):
        assert len(set(drawn.owners.tolist())) == 2


@pytest.mark.parametrize("ids", [torch.tensor([4, 4, 9]), torch.tensor([4, 4, 9]).numpy(), (4, 4, 9), iter([4, 4, 9])])
def test_users_of_any_sequence(ids):
    assert loader(numbers(3), users=ids).batch_sampler.users == Users([[0, 1], [2]])


# -------------------------------------------------------------------------------------- views


class Noisy(Dataset):
    """Dataset with random augmentation."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index + torch.rand(3), int(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeded", [False, True])
def test_views_of_a_sample_differ(workers, seeded):
    dataset = seed_samples(Noisy(), 0) if seeded else Noisy()
    for drawn, draw in zip(loader(dataset, augmentations=4, num_workers=workers), sampler(50), strict=True):
        if not draw:
            continue
        x, y = drawn.batch
        assert x.shape == (len(draw), 4, 3) and y.shape == (len(draw), 4)
        assert x.floor().eq(torch.tensor(draw).view(-1, 1, 1)).all() and y.eq(torch.tensor(draw).view(-1, 1)).all()
        assert all(len(set(map(tuple, views))) == 4 for views in x.tolist())


def test_seeded_views_are_reproducible_and_differ_between_draws():
    dataset = DrawnDataset(Noisy(), 3).over(seed_samples(Noisy(), 0))
    assert dataset.augmentations == 3
    first, again, later = (dataset.__getitems__(Draw([7], number, 0, "", None)).samples[0][0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not first.eq(later).any()


def test_views_of_dicts_and_dataclasses():
    drawn = next(iter(loader(AsDict(), augmentations=2, rate=1.0)))
    assert drawn.batch["x"].shape == (100, 2, 3) and drawn.batch["id"].shape == (100, 2)
    drawn = next(iter(loader(AsDataclass(), augmentations=2, rate=1.0, collate_fn=collate_samples)))
    assert drawn.batch.x.shape == (100, 2, 3) and drawn.batch.y.shape == (100, 2)


def test_views_do_not_use_getitems():
    dataset = Several()
    drawn = next(iter(loader(dataset, augmentations=2, rate=1.0)))
    assert drawn.batch[1].shape == (100, 2) and not dataset.calls


def test_indices_of_views_are_ordinary_integers():
    assert isinstance(loader(list(range(10)), augmentations=2, rate=1.0).dataset, DrawnDataset)
    drawn = next(iter(loader([torch.tensor(i) for i in range(10)], augmentations=2, rate=1.0)))
    assert drawn.batch.tolist() == [[i, i] for i in range(10)]
    view = sampling.View(3, 1, 2)
    assert f"{view}" == str(view) == "3" and view == 3 and pickle.loads(pickle.dumps(view)).view == 2


class Ragged(Noisy):
    def __getitem__(self, index):
        return torch.rand(int(torch.randint(1, 1000, ())))


def test_views_of_different_sizes_are_refused():
    with pytest.raises(BatchError, match=r"the 4 views of a sample must be .* of equal sizes.*found for sample 0:"):
        list(loader(Ragged(), augmentations=4, rate=1.0))


# ----------------------------------------------------------------------------------- refusals


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(10)


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


class Items:
    def __len__(self):
        return 3


@pytest.mark.parametrize("dataset", [Endless(), Items()])
def test_data_sets_without_indices_are_refused(dataset):
    name = type(dataset).__name__
    with pytest.raises(TypeError, match=rf"needs a map-style dataset, .*; found {name}, .* Store its samples"):
        loader(dataset)


def test_data_sets_without_length_are_refused():
    with pytest.raises(TypeError, match=r"needs the number of samples; found Unsized without __len__. Add __len__"):
        loader(Unsized())


def test_empty_data_sets_are_refused():
    with pytest.raises(ValueError, match=r"needs at least one sample; found an empty TensorDataset. Pass the training"):
        loader(numbers(0))


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
@pytest.mark.parametrize("value", [None, True, 4])
def test_arguments_that_determine_batches_are_refused(name, value):
    with pytest.raises(TypeError, match=f"must be Poisson draws; found the argument {name}. Omit it"):
        loader(**{name: value})


def test_batches_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"must arrive in the order of their draws; found in_order=False. Omit it"):
        loader(in_order=False, num_workers=2)


@pytest.mark.parametrize("rate", [0, -0.1, 1.01, 64, float("nan")])
def test_rates_outside_of_the_unit_interval_are_refused(rate):
    with pytest.raises(ValueError, match=rf"sample_rate must be above 0 and at most 1; found {rate}. It is"):
        loader(rate=rate)


@pytest.mark.parametrize("name", ["updates", "max_batch", "augmentations"])
def test_counts_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; found 0. Pass a positive number"):
        loader(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be a whole number; found 2.5. Pass an int"):
        loader(**{name: 2.5})
    with pytest.raises(TypeError, match=f"{name} must be a whole number; found True"):
        loader(**{name: True})


def test_users_must_be_one_id_per_sample():
    with pytest.raises(ValueError, match=r"must have one id per sample; found 8 ids for 100 samples. Pass the user"):
        loader(users=NAMES)


@pytest.mark.parametrize("user", [[1], torch.tensor(1)], ids=["list", "tensor"])
def test_ids_must_be_hashable_by_value(user):
    with pytest.raises(TypeError, match=rf"must be hashable values .* found {type(user).__name__} for sample 1"):
        loader(numbers(2), users=[0, user])


def test_missing_ids_are_refused():
    """NaN differs from itself: each sample would be a user of its own."""
    with pytest.raises(ValueError, match=r"every sample must have a user; found NaN for sample 1. Give all samples"):
        loader(numbers(3), users=torch.tensor([0.0, float("nan"), float("nan")]))
