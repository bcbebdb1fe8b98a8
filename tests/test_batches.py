"""Cutting batches of any structure."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
import transformers

from samplewise.batches import cut, length

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
