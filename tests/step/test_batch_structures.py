"""Batches of any structure are cut into updates; those that cannot be cut are taken whole."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

import samplewise as sw

N = 12
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    source: str = "train"


@dataclasses.dataclass(frozen=True)
class Frozen:
    pair: Pair
    scale: torch.Tensor


@dataclasses.dataclass
class Bytes:
    """Makes numbers of its bytes, once."""

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self):
        self.x = self.x / 255


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def losses_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def numbered(texts):
    """Samples by their numbers in texts, for batches that hold no tensor."""
    places = [int(text.split()[-1]) for text in texts]
    return X[places], Y[places]


def named(i):
    return [f"sample {k}" for k in i]


# name: (the batch of samples i, what a loss function reads from it)
KINDS = {
    "tensor": (lambda i: torch.cat([X[i], Y[i, None]], 1), lambda b: (b[:, :5], b[:, 5].long())),
    "tuple": (lambda i: (X[i], Y[i]), lambda b: b),
    "list": (lambda i: [X[i], Y[i]], lambda b: b),
    "dict": (lambda i: {"x": X[i], "y": Y[i]}, lambda b: (b["x"], b["y"])),
    "ordered dict": (lambda i: OrderedDict(x=X[i], y=Y[i]), lambda b: (b["x"], b["y"])),
    "default dict": (lambda i: defaultdict(list, x=X[i], y=Y[i]), lambda b: (b["x"], b["y"])),
    "nested": (lambda i: {"in": {"x": [X[i]]}, "out": (Y[i], None)}, lambda b: (b["in"]["x"][0], b["out"][0])),
    "dataclass": (lambda i: Record(X[i], Y[i]), lambda b: (b.x, b.y)),
    "frozen dataclass": (
        lambda i: Frozen(Pair(X[i], Y[i]), torch.tensor(1.0)),
        lambda b: (b.pair.x * b.scale.double(), b.pair.y),
    ),
    "dataclass that prepares itself": (lambda i: Bytes(X[i] * 255, Y[i]), lambda b: (b.x, b.y)),
    "named tuple": (lambda i: Pair(X[i], Y[i]), lambda b: (b.x, b.y)),
    "encoding": (lambda i: transformers.BatchEncoding({"x": X[i], "y": Y[i]}), lambda b: (b["x"], b.y)),
    "texts beside a tensor": (lambda i: (X[i], named(i)), lambda b: (b[0], numbered(b[1])[1])),
    "a tuple of texts beside a tensor": (lambda i: (X[i], tuple(named(i))), lambda b: (b[0], numbered(b[1])[1])),
    "texts alone": (named, numbered),
    "lists alone": (lambda i: {"text": named(i), "label": Y[i].tolist()}, lambda b: numbered(b["text"])),
    "labels in a list": (lambda i: (named(i), Y[i].tolist()), lambda b: (numbered(b[0])[0], torch.tensor(b[1]))),
}


def updated_by_hand(*updates):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in updates:
        optimizer.zero_grad()
        losses_of(model, X[window], Y[window]).mean().backward()
        optimizer.step()
    return model


def assert_same(found, expected):
    torch.testing.assert_close(
        parameters_to_vector(found.parameters()), parameters_to_vector(expected.parameters()), rtol=0, atol=1e-10
    )


def make_step(loss_fn, model=None, **options):
    model = model or net()
    return model, sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn, **options)


SIZES = [
    dict(samples=4, microbatch=3),
    dict(samples=None, microbatch=5),
    dict(samples=10),
    dict(samples=4, microbatch=3, transforms=sw.weight(lambda losses: torch.ones_like(losses), window=True)),
]


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("sizes", SIZES, ids=["cut twice", "microbatches", "across batches", "as one window"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_structure(kind, sizes):
    make, read = KINDS[kind]
    model, step = make_step(lambda model, batch: losses_of(model, *read(batch)), **sizes)
    step.run([make(list(range(6))), make(list(range(6, 12)))])
    size = sizes["samples"] or 6
    assert_same(model, updated_by_hand(*(list(range(k, min(k + size, N))) for k in range(0, N, size))))
    assert step.counters.samples == N


def test_texts_from_a_data_loader():
    """Its own collation makes a tuple of the texts."""
    loader = DataLoader([(X[k], f"sample {k}") for k in range(N)], batch_size=6)
    model, step = make_step(lambda model, batch: losses_of(model, batch[0], numbered(batch[1])[1]), samples=4)
    step.run(loader)
    assert_same(model, updated_by_hand(range(4), range(4, 8), range(8, 12)))


def test_the_type_of_a_batch_stays():
    seen = []

    def loss_fn(model, batch):
        seen.append(type(batch))
        return losses_of(model, batch.x, batch.y)

    for make in (KINDS["dataclass"][0], KINDS["named tuple"][0], KINDS["encoding"][0]):
        make_step(loss_fn, samples=2)[1].run([make(list(range(4)))])
    assert set(seen) == {Record, Pair, transformers.BatchEncoding}


# --- batches that cannot be cut ---------------------------------------------------------------------------------------


class Graphs:
    """Several graphs in one: nodes of graph k are the rows where owner == k."""

    def __init__(self, places):
        sizes = [place % 3 + 1 for place in places]
        self.count, self.labels = len(places), Y[places]
        self.owner = torch.arange(self.count).repeat_interleave(torch.tensor(sizes))
        self.nodes = torch.cat([X[place].repeat(size, 1) for place, size in zip(places, sizes, strict=True)])


@dataclasses.dataclass
class GraphTensors:
    """The same, as tensors of different lengths."""

    nodes: torch.Tensor
    owner: torch.Tensor
    labels: torch.Tensor


def as_tensors(places):
    graphs = Graphs(places)
    return GraphTensors(graphs.nodes, graphs.owner, graphs.labels)


def as_namespace(places):
    return SimpleNamespace(**vars(Graphs(places)))


def of_graphs(model, graphs):
    """One loss per graph, of the mean over its nodes."""
    sums = torch.zeros(len(graphs.labels), 5).double().index_add(0, graphs.owner, graphs.nodes)
    return losses_of(model, sums / graphs.owner.bincount()[:, None], graphs.labels)


WHOLE = pytest.mark.parametrize("make", [Graphs, as_tensors, as_namespace])


@WHOLE
@pytest.mark.parametrize("transforms", [(), sw.clip(1e6)], ids=["plain", "clip"])
def test_taken_whole(make, transforms):
    updates = [[0, 1, 2], [3, 4, 5, 6], [7]]
    model, step = make_step(of_graphs, transforms=transforms)
    assert [update.samples for update in step.over(map(make, updates))] == [3, 4, 1]
    assert step.counters.samples == 8
    assert_same(model, updated_by_hand(*updates))


@WHOLE
def test_taken_whole_by_a_transform_of_the_window(make):
    model, step = make_step(of_graphs, transforms=sw.drop(largest=1, score="losses"))
    (update,) = step.over([make([0, 1, 2, 3])])
    assert update.samples == 4
    largest = int(update.losses.argmax())
    assert_same(model, updated_by_hand([k for k in range(4) if k != largest]))


@WHOLE
def test_met_exactly_by_luck(make):
    model, step = make_step(of_graphs, samples=4)
    found = list(step.over(map(make, [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10]])))
    assert [update.samples for update in found] == [4, 4, 3]
    assert_same(model, updated_by_hand(range(4), range(4, 8), [8, 9, 10]))


@WHOLE
def test_not_met_is_an_error_and_changes_nothing(make):
    model, step = make_step(of_graphs, samples=4)
    with pytest.raises(
        sw.BatchError, match=r"exactly samples=4 samples; found 6 samples after a batch that cannot be cut"
    ):
        step.run(map(make, [[0, 1, 2], [3, 4, 5]]))
    assert_same(model, net())
    assert all(p.grad is None for p in model.parameters())
    assert step.counters.updates == step.counters.samples == step.counters.microbatches == 0
    step.run([make([0, 1, 2, 3])])  # the window was given up
    assert_same(model, updated_by_hand(range(4)))


@WHOLE
def test_microbatches_of_what_cannot_be_cut_are_the_batches(make):
    model, step = make_step(of_graphs, microbatch=2)
    step.run([make([0, 1, 2])])
    assert step.counters.microbatches == 1
    assert_same(model, updated_by_hand([0, 1, 2]))


@WHOLE
def test_accumulated_whole(make):
    model, step = make_step(of_graphs)
    step.accumulate(make([0, 1, 2]))
    step.accumulate(make([3, 4]))
    assert step.apply().samples == 5
    assert_same(model, updated_by_hand(range(5)))


@WHOLE
def test_a_window_to_be_seen_as_one_needs_batches_that_can_be_cut(make):
    _, step = make_step(of_graphs, samples=4, transforms=sw.drop(largest=1))
    with pytest.raises(
        sw.BatchError, match="each update must have exactly samples=4 samples; found batches that cannot be cut"
    ):
        step.run([make([0, 1, 2, 3])])


# --- another number of losses than rows -------------------------------------------------------------------------------


def packed(model, batch):
    """Two documents in every row, one loss each."""
    x, y = batch
    return losses_of(model, x.reshape(-1, 5), y.flatten())


PACKED = (X.view(6, 10), Y.view(6, 2))


@pytest.mark.parametrize(
    "transforms", [(), sw.clip(1e6), sw.weight(lambda losses: torch.ones_like(losses), window=True)]
)
def test_several_losses_in_a_row(transforms):
    model, step = make_step(packed, transforms=transforms)
    (update,) = step.over([PACKED])
    assert update.samples == N == step.counters.samples
    assert len(update.losses) == N
    assert_same(model, updated_by_hand(range(N)))


@pytest.mark.parametrize("sizes", [dict(microbatch=3), dict(samples=4), dict(samples=6)])
def test_several_losses_in_a_row_cannot_be_cut(sizes):
    model, step = make_step(packed, **sizes)
    with pytest.raises(sw.LossesError, match=r"found \d+ losses for \d samples. Use samples=None and microbatch=None"):
        step.run([PACKED])
    assert_same(model, net())
    assert (step.counters.samples, step.counters.microbatches) == (0, 0)


def test_one_loss_for_several_rows():
    def pairs(model, batch):
        return losses_of(model, *batch).view(-1, 2).mean(1)

    model, step = make_step(pairs)
    (update,) = step.over([(X, Y)])
    assert update.samples == 6
    assert_same(model, updated_by_hand(range(N)))


def test_the_mean_of_a_batch_is_no_loss_per_sample():
    _, step = make_step(lambda model, batch: losses_of(model, *batch).mean())
    with pytest.raises(sw.LossesError, match=r"losses must be 1-D.*found shape \(\)\. Use reduction='none'"):
        step.run([(X, Y)])
