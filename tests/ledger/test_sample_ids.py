"""sw.Indexed: samples with their index; and ids that are hidden from the collate_fn and the loss."""

import pickle
from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samplewise as sw
from samplewise.ledger.sample_ids import IdCollator, NumberedDataset, numbered, split_entries, without_id

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3


def batch_of(items, **options):
    return next(iter(DataLoader(sw.Indexed(items), batch_size=4, **options)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pair_becomes_a_triple_with_the_id(workers):
    x, y, ids = batch = batch_of(TensorDataset(X, Y), num_workers=workers)
    assert torch.equal(x, X[:4]) and torch.equal(y, Y[:4]) and torch.equal(ids, torch.arange(4))
    assert batch.id is ids


def test_a_dict_gets_a_key():
    batch = batch_of([{"x": x} for x in X])
    assert batch.keys() == {"x", "id"} and batch["id"].tolist() == [0, 1, 2, 3]


def test_a_single_item_becomes_a_pair_with_the_id():
    x, ids = batch_of(X)
    assert torch.equal(x, X[:4]) and ids.tolist() == [0, 1, 2, 3]


def test_items_can_be_pickled():
    item = sw.Indexed(TensorDataset(X, Y))[3]
    again = pickle.loads(pickle.dumps(item))
    assert again.id == 3 and torch.equal(again[0], X[3]) and len(again) == 3


def test_items_look_like_named_tuples():
    """Lightning and Accelerate recognize named tuples by these two attributes, and call the class with the entries."""
    item = sw.Indexed(TensorDataset(X, Y))[3]
    assert item._fields == ("item0", "item1", "id")
    assert list(item._asdict()) == ["item0", "item1", "id"] and item._asdict()["id"] == 3
    assert type(item)(*item).id == 3


def test_a_criterion_ignores_the_id():
    def trained(data):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), samples=3)
        step.run(DataLoader(data, batch_size=4))
        return model.weight.detach()

    assert torch.equal(trained(TensorDataset(X, Y)), trained(sw.Indexed(TensorDataset(X, Y))))


def test_ids_index_a_tensor_of_weights():
    model, weights = nn.Linear(4, 3), torch.rand(10)
    transform = sw.weight(weights, index="id")
    step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), samples=5, transforms=[transform], recheck=False)
    updates = list(step.over(DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=4)))
    assert torch.equal(torch.cat([update.weights for update in updates]), weights)


class Endless(IterableDataset):
    def __iter__(self):
        yield from X


def test_iterable_datasets_are_refused():
    with pytest.raises(TypeError, match=r"Indexed needs a map-style dataset, with __getitem__; found Endless"):
        sw.Indexed(Endless())


def test_loaders_and_indexed_datasets_are_refused():
    data = TensorDataset(X, Y)
    with pytest.raises(TypeError, match=r"found a DataLoader\. Wrap the dataset of the loader: DataLoader\(sw.Indexed"):
        sw.Indexed(DataLoader(data))
    with pytest.raises(TypeError, match=r"found one that is Indexed already\. Use it as it is"):
        sw.Indexed(sw.Indexed(data))


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("item", "found"),
    [({"id": 1}, "a dict that has an id"), (Pair(1, 2), "the named tuple Pair")],
    ids=["dict", "named"],
)
def test_samples_that_cannot_get_an_id_are_refused(item, found):
    with pytest.raises(TypeError, match=rf"must be able to add an id to a sample; found {found}\. Remove Indexed"):
        sw.Indexed([item])[0]


# --- ids that are hidden from the collate_fn and the loss ------------------------------------------------------------


class Opaque:
    def __init__(self, samples):
        self.samples = samples


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "collate",
    [list, tuple, lambda samples: {"x": samples, "n": len(samples)}, Opaque, lambda samples: Pair(samples, 1)],
    ids=["list", "tuple", "dict", "object", "named"],
)
def test_a_collate_fn_gets_samples_without_ids(collate, workers):
    """The loss gets what the collate_fn has made, and the ids are those of the dataset."""
    samples = [Pair(float(k), str(k)) for k in range(10)]
    loader = DataLoader(
        NumberedDataset(samples),
        batch_size=4,
        collate_fn=IdCollator(collate, tuple, numbered),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    for batch, start in zip(loader, (0, 4, 8), strict=True):
        ids = batch["id"] if isinstance(batch, dict) else batch.id
        assert ids.tolist() == list(range(start, min(start + 4, 10)))
        plain, wanted = without_id(batch), collate(samples[start : start + 4])
        if isinstance(wanted, Opaque):
            plain, wanted = plain.samples, wanted.samples
        assert plain == (list(wanted) if type(wanted) is tuple else wanted)


def test_indices_of_a_numbered_batch_do_not_count_the_ids():
    batch = numbered((X, Y), {"id": torch.arange(10)})
    assert batch[-1] is Y and batch[1] is Y and batch.id.tolist() == list(range(10))


def test_ids_of_users_stay_in_the_batch():
    batch = batch_of(TensorDataset(X, Y))
    assert without_id(batch) is batch
    entries = {"id": torch.arange(4)}
    assert without_id(entries) is entries


@pytest.mark.parametrize(
    ("ids", "kind"),
    [([3, 5], torch.int64), ([0.5, 1], torch.float64), ([torch.tensor(3), 5], torch.int64), (["a", "b"], None)],
    ids=str,
)
def test_columns_of_dicts(ids, kind):
    """Numbers become a tensor; entries that the collate_fn does not get are in the batch."""
    samples = [{"x": k, "id": key} for k, key in enumerate(ids)]
    joined = IdCollator(
        lambda items: {"x": [item["x"] for item in items], "keys": set(items[0])},
        lambda sample: split_entries(sample, ["id", "missing"]),
        lambda batch, columns: {**batch, **columns},
    )(samples)
    assert joined["keys"] == {"x"} and joined["x"] == [0, 1]
    assert getattr(joined["id"], "dtype", None) == kind
    assert list(joined["id"]) == ids
    assert samples[0] == {"x": 0, "id": ids[0]}


class Collator:
    label_columns = ("label",)

    def __call__(self, samples):
        return samples


def test_attributes_of_the_other_collate_fn_are_kept():
    collator = pickle.loads(pickle.dumps(IdCollator(Collator(), tuple, numbered)))
    assert collator.label_columns == ("label",) and isinstance(collator.collate, Collator)
    with pytest.raises(AttributeError, match="'Collator' object has no attribute 'missing'"):
        _ = collator.missing


def test_entries_of_a_mapping_are_split_without_changing_it():
    class Encoding(UserDict):
        pass

    batch = Encoding({"x": 1, "id": 2})
    others, columns = split_entries(batch, ["id"])
    assert type(others) is Encoding and others.data == {"x": 1} and columns == {"id": 2} and batch["id"] == 2
    assert split_entries(MappingProxyType({"x": 1, "id": 2}), ["id"]) == ({"x": 1}, {"id": 2})
    assert split_entries(X, ["id"]) == (X, {})
