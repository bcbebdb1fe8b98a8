"""Cutting, concatenating and moving batches of any structure."""

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping

import pytest
import torch
import transformers

from samplewise.core.batches import concat, cut, length, pick, take, to_device
from samplewise.errors import BatchError

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: list[str]


X, Y = torch.arange(12).view(6, 2), torch.arange(6)


@pytest.mark.parametrize(
    ("batch", "piece"),
    [
        (X, X[2:4]),
        ((X, Y), (X[2:4], Y[2:4])),
        ([X, Y], [X[2:4], Y[2:4]]),
        ({"x": X, "y": (Y, X)}, {"x": X[2:4], "y": (Y[2:4], X[2:4])}),
        (OrderedDict(x=X), OrderedDict(x=X[2:4])),
        (Pair(X, Y), Pair(X[2:4], Y[2:4])),
        ((X, list("abcdef")), (X[2:4], ["c", "d"])),
        ((X, torch.tensor(0.5), "train"), (X[2:4], torch.tensor(0.5), "train")),
    ],
)
def test_cut(batch, piece):
    assert length(batch) == 6
    found = cut(batch, 2, 4)
    assert type(found) is type(piece)
    assert repr(found) == repr(piece)


def test_dataclass():
    found = cut(Record(X, list("abcdef")), 1, 3)
    assert isinstance(found, Record)
    assert found.name == ["b", "c"]
    assert torch.equal(found.x, X[1:3])


def test_hugging_face_encodings():
    found = cut(transformers.BatchEncoding({"input_ids": X, "labels": Y}), 1, 3)
    assert isinstance(found, transformers.BatchEncoding)
    assert torch.equal(found["input_ids"], X[1:3])


def test_what_cannot_be_cut_has_no_length():
    assert length((X, torch.zeros(4))) is None
    assert length((X, object())) is None
    assert length("text") is None


@pytest.mark.parametrize(
    ("batch", "piece"),
    [
        (list("abcdef"), ["c", "d"]),
        ({"text": list("abcdef"), "label": [0, 1, 2, 3, 4, 5]}, {"text": ["c", "d"], "label": [2, 3]}),
        ((list("abcdef"), "train", None), (["c", "d"], "train", None)),
    ],
)
def test_lists_only(batch, piece):
    assert length(batch) == 6
    assert cut(batch, 2, 4) == piece


def test_lists_of_different_lengths_cannot_be_cut():
    assert length((list("abc"), list("ab"))) is None


def test_beside_tensors_a_list_of_another_length_stays():
    batch = {"x": X, "classes": ["cat", "dog"]}
    assert length(batch) == 6
    assert cut(batch, 0, 1)["classes"] == ["cat", "dog"]


def test_a_tuple_of_texts_is_cut_like_a_list():
    """What a DataLoader makes of datasets that return (x, text)."""
    assert tuple(cut((X, tuple("abcdef")), 2, 4)[1]) == ("c", "d")


def test_default_dicts():
    assert torch.equal(cut(defaultdict(list, x=X), 1, 3)["x"], X[1:3])


class Columns(MutableMapping):
    """A mapping that keeps its entries in a dict of its own."""

    def __init__(self, entries):
        self.entries = dict(entries)

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


def test_custom_mappings():
    batch = Columns({"x": X, "y": Y})
    assert length(batch) == 6
    found = cut(batch, 1, 3)
    assert isinstance(found, Columns)
    assert torch.equal(found["y"], Y[1:3])
    assert batch["x"] is X  # the batch itself is as it was
    assert torch.equal(cut(batch, 4, 6)["y"], Y[4:6])


def test_a_dataclass_prepares_itself_once():
    @dataclasses.dataclass
    class Doubled:
        x: torch.Tensor

        def __post_init__(self):
            self.x = self.x * 2

    batch = Doubled(X)
    assert length(batch) == 6
    assert torch.equal(cut(batch, 1, 3).x, 2 * X[1:3])


def test_cutting_leaves_the_batch_as_it_is():
    batch = {"x": X, "names": list("abcdef")}
    cut(batch, 1, 3)
    take(batch, [0])
    assert batch["x"] is X
    assert batch["names"] == list("abcdef")


@pytest.mark.parametrize("places", [[4], [5, 0, 3], [2, 2]])
def test_take(places):
    batch = {"x": X, "more": Pair(Y, [str(k) for k in range(6)]), "scale": torch.tensor(0.5), "classes": ["a", "b"]}
    found = take(batch, places)
    assert torch.equal(found["x"], X[places])
    assert torch.equal(found["more"].x, Y[places])
    assert found["more"].y == [str(k) for k in places]
    assert found["scale"] == 0.5
    assert found["classes"] == ["a", "b"]


def test_take_of_lists_only():
    assert take((list("abcdef"), [0, 1, 2, 3, 4, 5]), [5, 1]) == (["f", "b"], [5, 1])


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((X, Y), 1),
        ([X, Y], -1),
        ({"y": Y}, "y"),
        ({7: Y}, 7),
        (Pair(X, Y), "y"),
        (Pair(X, Y), 1),
        (Record(X, Y), "name"),
        (types.SimpleNamespace(y=Y), "y"),
        (transformers.BatchEncoding({"y": Y}), "y"),
    ],
)
def test_pick(batch, key):
    assert pick(batch, key) is Y


@pytest.mark.parametrize(
    ("batch", "key", "found"),
    [
        ({"x": X, "y": Y}, "user", "found keys 'x', 'y'"),
        ((X, Y), 2, "found a tuple of 2 entries. Return it from the dataset"),
        ((X,), "user", "found a tuple of 1 entry"),
        (Record(X, Y), "user", "found Record"),
        (Pair(X, Y), "user", "found the entries 'x', 'y'"),
        ({}, "user", "found no keys"),
        ((X, Y), "id", r"found .*\. Wrap the dataset, DataLoader\(sw.Indexed\(dataset\), .* sw.Ledger\(id=2\)"),
    ],
)
def test_what_is_not_there_cannot_be_picked(batch, key, found):
    with pytest.raises(BatchError, match=f"the batch must hold {key!r}; {found}"):
        pick(batch, key)


class Graph:
    """With a `to` of its own, as those of graph libraries."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


def test_batches_of_any_structure_are_moved():
    x = torch.zeros(2)
    batch = {"a": [x, (x, "text")], "b": Pair(x, 3), "c": Record(x, ["u", "v"]), "d": UserDict(e=x), "g": Graph(x)}
    found = to_device(batch, torch.device("meta"))
    tensors = [found["a"][0], found["a"][1][0], found["b"].x, found["c"].x, found["d"]["e"], found["g"].x]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert found["a"][1][1] == "text" and found["b"].y == 3 and found["c"].name == ["u", "v"]
    assert type(found["d"]) is UserDict


def test_a_batch_that_is_on_the_device_is_not_copied():
    batch = [X, Y]
    assert to_device(batch, torch.device("cpu")) is batch


def test_batches_are_concatenated_element_by_element():
    first, second = Pair(X[:2], {"y": Y[:2], "mean": Y[0]}), Pair(X[2:], {"y": Y[2:], "mean": Y[2]})
    found = concat([first, second])
    assert type(found) is Pair and torch.equal(found.x, X) and torch.equal(found.y["y"], Y)
    assert found.y["mean"].tolist() == [0, 2] and concat(["a", "b"]) == ["a", "b"]
