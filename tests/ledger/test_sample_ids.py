"""sw.Indexed: samples with their index."""

import pickle
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samplewise as sw

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
