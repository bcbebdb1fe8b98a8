"""state_dict: a step that is loaded goes on, bit for bit, as the one that was saved would have."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

import samplewise as sw
from samplewise.core import microbatch
from samplewise.step.window import Counters

N = 32
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 5, generator=GENERATOR), torch.arange(N) % 3
COUNTS = 0.1 + torch.rand(N, generator=GENERATOR)  # whose sum depends on the order they are added up in


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def losses_and_counts(model, batch):
    return losses_of(model, batch) * batch[2], batch[2]


def rows(start, stop):
    return X[start:stop], Y[start:stop], COUNTS[start:stop]


def fours(start, stop=N):
    return [rows(k, k + 4) for k in range(start, stop, 4)]


class Run:
    """A model, its optimizer, scheduler and step: everything that has a state."""

    def __init__(self, loss_fn=losses_of, seed=0, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = sw.Step(self.model, self.optimizer, loss_fn, scheduler=self.scheduler, **options)

    def save(self):
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.scheduler, self.step)
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        return file

    def load(self, file):
        for part, state in zip((self.model, self.optimizer, self.scheduler, self.step), torch.load(file), strict=True):
            part.load_state_dict(state)
        return self

    def feed(self, batches):
        updates = [update for batch in batches for update in self.step(batch)]
        last = self.step.flush()
        return updates + [last] * (last is not None)


def assert_identical(run, other):
    assert torch.equal(parameters_to_vector(run.model.parameters()), parameters_to_vector(other.model.parameters()))
    assert run.step.counters == other.step.counters
    assert run.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


OPTIONS = {
    "plain": {},
    "counts": dict(loss_fn=losses_and_counts),
    "microbatches": dict(microbatch=3),
    "clip": dict(transforms=sw.clip(0.5)),
    "clip by parameter": dict(transforms=sw.clip(0.5, by="parameter")),
    "renormalized weights": dict(transforms=sw.weight(lambda losses: losses, renormalize=True)),
    "norms": dict(record=["norms"]),
    "bounded": dict(max_grad_norm=0.1),
    "half": dict(precision="bf16-mixed"),
    "scaled": dict(precision="16-mixed"),
    "auto": dict(microbatch="auto"),
}


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("fed", [4, 8, 12, 20])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_goes_on_in_the_middle_of_a_window(options, fed):
    """Windows of ten, batches of four."""
    run = Run(samples=10, **options)
    for batch in fours(0, fed):
        run.step(batch)
    other = Run(samples=10, seed=1, **options).load(run.save())
    assert other.step.counters == run.step.counters
    assert other.step.counters.samples == fed
    found, expected = other.feed(fours(fed)), run.feed(fours(fed))
    assert_identical(other, run)
    assert [update.index for update in found] == [update.index for update in expected]
    for update, twin in zip(found, expected, strict=True):
        assert torch.equal(update.losses, twin.losses)
        assert update.loss == pytest.approx(twin.loss, rel=1e-6)
        assert update.grad_norm == pytest.approx(twin.grad_norm, rel=0, abs=0, nan_ok=True)
    if "record" in options:
        assert all(torch.equal(update.norms, twin.norms) for update, twin in zip(found, expected, strict=True))


def test_goes_on_with_what_was_carried_over():
    run = Run(samples=10, tail="carry")
    run.step.run(fours(0, 24))
    other = Run(samples=10, tail="carry", seed=1).load(run.save())
    run.step.run(fours(0))
    other.step.run(fours(0))
    assert_identical(other, run)
    assert other.step.counters == Counters(samples=56, microbatches=17, updates=5, epochs=2)


def test_samples_that_wait_for_a_transform_of_the_window_come_again():
    """The first sample that is not in the state is number `counters.samples`."""
    run = Run(samples=10, transforms=sw.drop(largest=2))
    for batch in fours(0, 16):
        run.step(batch)
    other = Run(samples=10, transforms=sw.drop(largest=2), seed=1).load(run.save())
    assert other.step.counters.samples == 10
    run.step(rows(16, 20))
    other.step(rows(other.step.counters.samples, 20))
    assert other.step.counters.samples == run.step.counters.samples == 20
    found, expected = (parameters_to_vector(each.model.parameters()) for each in (other, run))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # they were cut at other places


def test_counters_say_where_a_broken_loop_goes_on():
    run = Run(samples=3)
    for update in run.step.over(fours(0)):
        if update.index == 1:
            break
    other = Run(samples=3, seed=1).load(run.save())
    assert other.step.counters.samples == 6
    run.step.run(fours(8))
    other.step.run([rows(6, 8), *fours(8)])
    assert_identical(other, run)


def test_goes_on_after_a_whole_epoch_too():
    run = Run(samples=10, tail="drop")
    run.step.run(fours(0))
    other = Run(samples=10, tail="drop", seed=1).load(run.save())
    run.step.run(fours(0))
    other.step.run(fours(0))
    assert_identical(other, run)
    assert other.step.counters.epochs == 2


def test_a_state_is_a_copy():
    run = Run(samples=10)
    run.step(rows(0, 4))
    file, state = run.save(), run.step.state_dict()
    run.feed(fours(4))
    for _ in range(2):  # the state that is loaded is not used up
        other = Run(samples=10).load(file)
        file.seek(0)
        other.step.load_state_dict(state)
        other.feed(fours(4))
        assert_identical(other, run)


def test_loading_gives_up_the_open_window():
    fresh = Run(samples=10)
    file = fresh.save()
    run = Run(samples=10)
    run.step(rows(0, 12))
    run.step(rows(12, 16))
    run.load(file)
    assert all(p.grad is None for p in run.model.parameters())
    run.feed(fours(0))
    fresh.feed(fours(0))
    assert_identical(run, fresh)


def test_the_loss_scale():
    def huge(model, batch):
        return losses_of(model, batch) * 2.0**8

    run = Run(huge, precision="16-mixed")
    for batch in fours(0):
        run.step(batch)
    scale, counters = run.step._precision.scale, run.step.counters
    assert scale < 2.0**16
    other = Run(huge, precision="16-mixed", seed=1).load(run.save())
    assert other.step._precision.scale == scale
    assert other.step.counters.skipped == counters.skipped > 0
    run.feed(fours(0)), other.feed(fours(0))
    assert_identical(other, run)
    assert other.step._precision.state_dict() == run.step._precision.state_dict()


def test_a_window_that_will_be_skipped():
    """Its first samples have overflowed already."""

    def huge_at_first(model, batch):
        return losses_of(model, batch) * (2.0**20 if torch.equal(batch[0], X[:4]) else 1)

    options = dict(samples=8, precision="16-mixed", transforms=sw.clip(1.0), recheck=False)
    run = Run(huge_at_first, **options)
    run.step(rows(0, 4))
    other = Run(huge_at_first, seed=1, **options).load(run.save())
    assert [update.skipped for update in run.step(rows(4, 8))] == [True]
    assert [update.skipped for update in other.step(rows(4, 8))] == [True]
    assert_identical(other, run)


def limited(model, batch):
    if len(batch[0]) > 3:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return losses_of(model, batch)


def test_the_size_that_was_found():
    run = Run(limited, samples=8, microbatch="auto")
    run.step(rows(0, 8))
    state = run.step.state_dict()
    assert state["microbatch"] == 2
    other = Run(limited, samples=8, microbatch=sw.auto(10**9), seed=1).load(run.save())
    assert other.step.state_dict()["microbatch"] == 2
    other.step(rows(8, 16))
    assert other.step.counters.microbatches == 8


@pytest.mark.parametrize(("free", "budget"), [(4000, 500), (1000, 500), (600, 500), (400, 200)])
def test_the_memory_budget_that_was_measured(monkeypatch, free, budget):
    """Microbatches are cut as before, unless there is less memory than the budget."""
    monkeypatch.setattr(microbatch, "free_memory", lambda model: 1000)
    run = Run(samples=8, microbatch="auto")
    monkeypatch.setattr(microbatch, "free_memory", lambda model: free)
    other = Run(samples=8, microbatch="auto").load(run.save())
    assert other.step.state_dict()["memory"] == other.step._evaluator.budget == budget
    given = Run(samples=8, microbatch=sw.auto(700)).load(run.save())
    assert given.step._evaluator.budget == 700


def test_a_size_that_was_given_stays():
    run = Run(limited, samples=8, microbatch="auto")
    run.step(rows(0, 8))
    other = Run(samples=8, microbatch=3).load(run.save())
    other.step(rows(8, 16))
    assert other.step.counters.microbatches == 4 + 3


def test_a_new_step_has_a_state_too():
    state = Run(samples=10).step.state_dict()
    assert state["counters"] == dict(samples=0, microbatches=0, updates=0, skipped=0, epochs=0)
    other = Run(samples=10)
    other.step.load_state_dict(state)
    assert other.step.flush() is None


def test_sparse_sums():
    def step_of(model):
        return sw.Step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, ids: m(ids).square().sum((1, 2)), samples=6
        )

    torch.manual_seed(0)
    ids = torch.arange(12).view(6, 2) % 5
    model, twin = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
    step, other = step_of(model), step_of(twin)
    step(ids[:4])
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(step.state_dict())
    assert len(step(ids[4:])) == len(other(ids[4:])) == 1
    assert torch.equal(model.weight, twin.weight)


def test_a_window_that_will_be_skipped_can_be_saved_whatever_was_known_before():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    options = dict(samples=6, on_nonfinite="skip", recheck=False)
    step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), transforms=[sw.clip(1.0)], **options)
    good, bad, target = torch.randn(2, 3), torch.full((2, 3), torch.nan), torch.tensor([0, 1])
    assert step((good, target)) == step((bad, target)) == []
    again = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), **options)
    again.load_state_dict(step.state_dict())
    (update,) = again((good, target))
    assert update.skipped and update.losses.isnan().tolist() == [False, False, True, True, True, True]
