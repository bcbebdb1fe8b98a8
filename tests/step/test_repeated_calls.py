"""Windows and checks that call the loss function more than once: as if it were called once."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import io
import itertools
import random
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.errors import LossesError, TrainingWarning

ROWS = 8
PER_MICROBATCH = 3
GLOBAL = types.SimpleNamespace(generator=torch.Generator(), calls=0)


def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3).double()
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.layer(x)


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


# Each case makes a loss function with a state of its own.


def noise_of(draw):
    def loss_fn(model, batch):
        x, y, _ = batch
        return plain(model, (x + draw(x), y))

    return loss_fn


def torch_generator():
    generator = torch.Generator().manual_seed(1)
    return noise_of(lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype))


def generator_of_the_model():
    def loss_fn(model, batch):
        x, y, _ = batch
        return plain(model, (x + torch.randn(x.shape, generator=model.generator, dtype=x.dtype), y))

    return loss_fn


def global_generator():
    GLOBAL.generator.manual_seed(1)
    return noise_of(lambda x: torch.randn(x.shape, generator=GLOBAL.generator, dtype=x.dtype))


def generator_in_a_list():
    generators = [{"a": torch.Generator().manual_seed(1)}]
    return noise_of(lambda x: torch.randn(x.shape, generator=generators[0]["a"], dtype=x.dtype))


def numpy_generator():
    generator = np.random.default_rng(0)
    return noise_of(lambda x: torch.from_numpy(generator.normal(size=x.shape)))


def old_numpy_generator():
    generator = np.random.RandomState(0)
    return noise_of(lambda x: torch.from_numpy(generator.normal(size=x.shape)))


def python_generator():
    generator = random.Random(0)
    return noise_of(lambda x: generator.uniform(0, 2))


def bound_draw():
    draw = random.Random(0).random
    return noise_of(lambda x: draw())


def global_random():
    random.seed(0)
    return noise_of(lambda x: random.random())


def counter():
    calls = 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        return plain(model, batch) / calls

    return loss_fn


def counter_of_the_function():
    def loss_fn(model, batch):
        loss_fn.calls += 1
        return plain(model, batch) / loss_fn.calls

    loss_fn.calls = 0
    return loss_fn


def counter_of_the_model():
    def loss_fn(model, batch):
        model.calls += 1
        return plain(model, batch) / model.calls

    return loss_fn


def counter_of_a_module():
    GLOBAL.calls = 0

    def loss_fn(model, batch):
        GLOBAL.calls += 1
        return plain(model, batch) / GLOBAL.calls

    return loss_fn


def counter_of_an_object():
    class Loss:
        def __init__(self):
            self.calls = 0

        def __call__(self, model, batch):
            self.calls += 1
            return plain(model, batch) / self.calls

    return Loss()


def list_of_losses():
    losses = []

    def loss_fn(model, batch):
        losses.append(1.0)
        return plain(model, batch) / len(losses)

    return loss_fn


def order_of_a_dict():
    values = collections.OrderedDict(a=0.5, b=1.5, c=2.5)

    def loss_fn(model, batch):
        first = next(iter(values))
        values.move_to_end(first)
        values[f"new {len(values)}"] = 1.0
        return plain(model, batch) * values[first]

    return loss_fn


def context_variable():
    calls = contextvars.ContextVar("calls", default=0)

    def loss_fn(model, batch):
        calls.set(calls.get() + 1)
        return plain(model, batch) / calls.get()

    return loss_fn


def late_buffer():
    def loss_fn(model, batch):
        if not hasattr(model, "late"):
            model.register_buffer("late", torch.ones((), dtype=torch.float64), persistent=False)
        model.late += 1
        return plain(model, batch) / model.late

    return loss_fn


def mutable_default():
    def loss_fn(model, batch, calls=None):
        calls[0] += 1
        return plain(model, batch) / calls[0]

    loss_fn.__defaults__ = ([0],)
    return loss_fn


def array_counter():
    calls = np.zeros(2)

    def loss_fn(model, batch):
        calls[1] += 1
        return plain(model, batch) / calls[1]

    return loss_fn


def running_tensor():
    mean = torch.ones((), dtype=torch.float64)

    def loss_fn(model, batch):
        losses = plain(model, batch) / mean.clone()
        mean.mul_(0.5).add_(0.5 * losses.detach().mean())
        return losses

    return loss_fn


def batch_in_place():
    def loss_fn(model, batch):
        return plain(model, (batch[0].div_(2), batch[1]))

    return loss_fn


def labels_in_place():
    def loss_fn(model, batch):
        return plain(model, (batch[0], batch[1].add_(1).remainder_(3)))

    return loss_fn


def batch_by_numpy():
    def loss_fn(model, batch):
        values = batch[0].numpy()
        values /= 2
        return plain(model, batch)

    return loss_fn


def batch_normalized():
    def loss_fn(model, batch):
        x, y, _ = batch
        x -= 1.0
        x[:, 0] = 0.5
        return plain(model, (x, y))

    return loss_fn


STATES = [
    torch_generator, generator_of_the_model, global_generator, generator_in_a_list, numpy_generator,
    old_numpy_generator, python_generator, bound_draw, global_random, counter, counter_of_the_function,
    counter_of_the_model, counter_of_a_module, counter_of_an_object, list_of_losses, mutable_default, array_counter,
    order_of_a_dict, context_variable, late_buffer, running_tensor, batch_in_place, labels_in_place, batch_by_numpy,
    batch_normalized,
]  # fmt: skip


def dropped(losses, rows):
    coefficients = torch.ones_like(losses)
    coefficients[rows.norm(dim=1).argmax()] = 0
    return coefficients, coefficients.sum()


def mean_norms(losses, rows):
    norms = rows.norm(dim=1)
    return norms.mean() / norms, len(losses)


def ranked(losses, rows):
    return (losses - losses.mean()).exp(), len(losses)


def in_groups(losses, rows):
    """Groups of even and odd rows, clipped to norm 0.1; counts are the group's samples."""
    coefficients = torch.ones_like(losses)
    for k in (0, 1):
        norm = rows[k::2].sum(0).norm()
        coefficients[k::2] = (0.1 / norm).clamp(max=1)
    return coefficients, len(losses)


CHAINS = {
    "drop": (lambda: [sw.drop(largest=1)], dropped),
    "normalize": (lambda: [sw.normalize("mean")], mean_norms),
    "weight": (lambda: [sw.weight(lambda losses: (losses - losses.mean()).exp(), window=True)], ranked),
    "group": (lambda: [sw.weight(lambda losses: torch.ones_like(losses)), sw.group(2), sw.clip(0.1)], in_groups),
}


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def one_call_per_microbatch(make, windows, formula):
    """Parameters after SGD updates with one call of the loss function per microbatch: one backward per sample."""
    model = Net()
    loss_fn = make()
    for _ in range(windows):
        batch = (*data(), torch.arange(ROWS) % 2)
        losses = []
        rows = []
        for start in range(0, ROWS, PER_MICROBATCH):
            part = loss_fn(model, tuple(t[start : start + PER_MICROBATCH] for t in batch))
            rows += [flat(torch.autograd.grad(loss, model.parameters(), retain_graph=True)) for loss in part]
            losses.append(part.detach())
        coefficients, divisor = formula(torch.cat(losses), torch.stack(rows))
        update = coefficients @ torch.stack(rows) / divisor
        with torch.no_grad():
            vector = flat(model.parameters()) - 0.1 * update
            nn.utils.vector_to_parameters(vector, model.parameters())
    return flat(model.parameters()).detach()


def trained(make, windows, transforms, **options):
    model = Net()
    step = sw.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), make(), transforms=transforms,
        microbatch=PER_MICROBATCH, interacting="allow", **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        for _ in range(windows):
            step((*data(), torch.arange(ROWS) % 2))
    return flat(model.parameters()).detach()


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("recheck", [False, None])
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_a_window_in_two_passes(make, recheck):
    """Every window-wise transform and each state, over three windows, with and without the recheck of the first."""
    for name, (transforms, formula) in CHAINS.items():
        if name == "group" and make is not batch_in_place:
            continue  # a group has microbatches of its own
        expected = one_call_per_microbatch(make, 3, formula)
        torch.testing.assert_close(trained(make, 3, transforms(), recheck=recheck), expected, rtol=1e-11, atol=1e-11)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def popped(batch):
    y = batch.pop("y")
    batch["x"] = batch["x"] / 2
    return batch["x"], y


def popped_from_a_list(batch):
    y = batch.pop()
    batch[0] = batch[0] / 2
    return batch[0], y


def inner(batch):
    batch["inputs"]["x"] = batch["inputs"]["x"] / 2
    return batch["inputs"].pop("x"), batch["y"]


def field(batch):
    batch.x = batch.x / 2
    batch.halved = True
    return batch.x, batch.y


def emptied(batch):
    x, y = batch["x"], batch["y"]
    batch.clear()
    return x / 2, y


STRUCTURES = {
    "dict": (popped, lambda x, y: {"x": x, "y": y}),
    "user's dict": (popped, lambda x, y: collections.UserDict(x=x, y=y)),
    "list": (popped_from_a_list, lambda x, y: [x, y]),
    "nested": (inner, lambda x, y: {"inputs": {"x": x}, "y": y}),
    "record": (field, Record),
    "emptied": (emptied, lambda x, y: collections.OrderedDict(x=x, y=y)),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("recheck", [False, None])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_entries_that_are_taken_out_of_the_batch(structure, recheck):
    """As `inputs.pop("labels")` does; the microbatch of the second pass has them again."""
    read, make = STRUCTURES[structure]

    def after(loss_fn, make, transforms):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.Step(model, optimizer, loss_fn, transforms=transforms, microbatch=PER_MICROBATCH, recheck=recheck)
        for _ in range(3):
            step(make(*data()))
        return flat(model.parameters()).detach()

    for transforms in (sw.drop(largest=1), sw.normalize("mean"), sw.clip(0.3)):
        found = after(lambda model, batch: plain(model, read(batch)), make, transforms)
        expected = after(lambda model, batch: plain(model, (batch[0] / 2, batch[1])), lambda *xy: xy, transforms)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- what cannot be restored is refused ------------------------------------------------------------------------------


def iterator():
    values = itertools.count(1)
    return lambda model, batch: plain(model, batch) / next(values)


def generator_function():
    def numbers():
        yield from itertools.count(1)

    values = numbers()
    return lambda model, batch: plain(model, batch) / next(values)


def stream():
    lines = io.StringIO("".join(f"{k}\n" for k in range(1, 100)))
    return lambda model, batch: plain(model, batch) / float(lines.readline())


def clock():
    return lambda model, batch: plain(model, batch) / (1 + time.perf_counter() % 1)


@pytest.mark.parametrize("make", [iterator, generator_function, stream, clock], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["drop", "normalize", "weight"])
def test_losses_that_differ_in_the_second_pass(make, name):
    model = Net()
    before = flat(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(model, optimizer, make(), transforms=CHAINS[name][0](), microbatch=PER_MICROBATCH, recheck=False)
    with pytest.raises(LossesError, match=r"must return the same losses both times; found the loss .* for sample"):
        step(data())
    assert torch.equal(flat(model.parameters()), before)
    assert all(p.grad is None for p in model.parameters())


def test_an_iterator_that_does_not_change_the_losses():
    numbers = itertools.count()

    def make():
        return lambda model, batch: (next(numbers), plain(model, batch))[1]

    expected = one_call_per_microbatch(make, 2, dropped)
    found = trained(make, 2, [sw.drop(largest=1)], recheck=False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def wide_data():
    return torch.randn(4, 10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 3


def wide_losses(in_place):
    def loss_fn(model, batch):
        x = batch[0]
        x = x.div_(2) if in_place[0] else x / 2
        return F.cross_entropy(model(x), batch[1], reduction="none")

    return loss_fn


def wide_step(in_place):
    torch.manual_seed(0)
    model = nn.Linear(10_000, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.Step(
        model, optimizer, wide_losses(in_place), transforms=[sw.drop(largest=1)], microbatch=2, recheck=False
    )  # fmt: skip


def test_large_batches_changed_in_place():
    """Large tensors are copied from the first window on as long as they change."""
    steps = [wide_step([False]), wide_step([True])]
    for step in steps:
        for _ in range(3):
            step(wide_data())
    torch.testing.assert_close(*(step.model.weight for step in steps), rtol=1e-12, atol=1e-12)


def test_a_large_batch_that_changes_for_the_first_time():
    in_place = [False]
    step = wide_step(in_place)
    step(wide_data())
    in_place[0] = True
    before = step.model.weight.detach().clone()
    with pytest.raises(LossesError, match=r"changed a tensor of shape \(2, 10000\) in place\. .* Change a copy"):
        step(wide_data())
    assert torch.equal(step.model.weight, before)


# --- other repeated calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_the_recheck_of_the_first_update(make):
    """One microbatch per update: only the recheck calls the loss function again."""
    results = []
    for recheck in (False, None, 2):
        model = Net()
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), make(), recheck=recheck)
        for _ in range(3):
            batch = (*data(), torch.arange(ROWS) % 2)
            step(batch)
        results.append((flat(model.parameters()).detach(), flat([t.double() for t in batch])))
    for parameters, batch in results[1:]:
        assert torch.equal(parameters, results[0][0])
        assert torch.equal(batch, results[0][1])


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_check_restores_what_the_loss_function_changes(make):
    """Losses after sw.check as without it; the batch is not changed."""
    results = []
    for checks in (False, True):
        model = Net()
        loss_fn = make()
        batch = (*data(), torch.arange(ROWS) % 2)
        before = flat([t.double() for t in batch])
        if checks:
            assert sw.check(model, loss_fn, batch).ok
        assert torch.equal(flat([t.double() for t in batch]), before)
        results.append(loss_fn(model, batch).detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_scan_in_smaller_pieces_after_running_out_of_memory(make):
    results = []
    for wrapped, microbatch in ((make, 4), (lambda: out_of_memory(make(), 4), "auto")):
        scanned = sw.scan(Net(), wrapped(), [(*data(), torch.arange(ROWS) % 2)], microbatch=microbatch)
        results.append(flat([g.norms() for _, g in scanned]))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("make", [iterator, generator_function], ids=lambda make: make.__name__)
def test_the_recheck_does_not_consume_an_iterator(make):
    results = []
    for recheck in (False, None):
        model = Net()
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), make(), recheck=recheck)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(data())
        results.append(flat(model.parameters()).detach())
    assert torch.equal(*results)
    assert [str(w.message).partition(":")[0] for w in caught] == ["the update is not rechecked"]


def out_of_memory(loss_fn, rows):
    """Loss function that fails with more than `rows` samples, after it has changed its state."""

    def failing(model, batch):
        losses = loss_fn(model, batch)
        if len(losses) > rows:
            raise torch.OutOfMemoryError("out of memory")
        return losses

    return failing


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_microbatches_halved_after_running_out_of_memory(make):
    results = []
    for wrapped, microbatch in ((make, 4), (lambda: out_of_memory(make(), 4), "auto")):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.Step(model, optimizer, wrapped(), microbatch=microbatch, recheck=False, interacting="allow")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)
            for _ in range(2):
                step((*data(), torch.arange(ROWS) % 2))
        results.append(flat(model.parameters()).detach())
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
