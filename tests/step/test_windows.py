"""What one update is: any loader batch, `samples`, `microbatch` and tail give the textbook loop over windows."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.step.update import Totals

N = 23
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y, COUNTS = torch.arange(N) % 3, (torch.arange(N) % 4 + 1).double()
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def losses_and_counts(model, batch):
    return losses_of(model, batch) * batch[2], batch[2]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader(batch, n=N):
    return DataLoader(TensorDataset(X[:n], Y[:n], COUNTS[:n]), batch_size=batch)


def rows(start, stop):
    return X[start:stop], Y[start:stop], COUNTS[start:stop]


def windows(n, size, tail, epochs):
    """The samples of each update."""
    found, window = [], []
    for _ in range(epochs):
        for i in range(n):
            window.append(i)
            if len(window) == size:
                found.append(window)
                window = []
        if window and tail == "update":
            found.append(window)
        window = window if tail == "carry" else []
    return found


def textbook(model, optimizer, updates, counts=False):
    for window in updates:
        optimizer.zero_grad()
        losses = losses_of(model, (X[window], Y[window]))
        loss = (losses * COUNTS[window]).sum() / COUNTS[window].sum() if counts else losses.mean()
        loss.backward()
        optimizer.step()
    return model


def assert_same(found, expected, tolerance=1e-10):
    found, expected = parameters_to_vector(found.parameters()), parameters_to_vector(expected.parameters())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def compare_with_textbook(n, batch, samples, microbatch, tail, optimizer, counts, epochs):
    model, twin = net(), net()
    loss_fn = losses_and_counts if counts else losses_of
    step = sw.Step(
        model, OPTIMIZERS[optimizer](model.parameters()), loss_fn, samples=samples, microbatch=microbatch, tail=tail
    )
    found = [update.samples for _ in range(epochs) for update in step.over(loader(batch, n))]
    expected = windows(n, samples or batch, tail if samples else "update", epochs)
    assert found == [len(window) for window in expected]
    assert step.counters.updates == len(expected)
    assert step.counters.epochs == epochs
    assert_same(model, textbook(twin, OPTIMIZERS[optimizer](twin.parameters()), expected, counts))


# --- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
@pytest.mark.parametrize("microbatch", [None, 1, 3, 50])
@pytest.mark.parametrize("samples", [None, 1, 4, 10, 30])
@pytest.mark.parametrize("batch", [4, 7, 23])
def test_any_combination_is_the_textbook_loop(batch, samples, microbatch, tail):
    compare_with_textbook(N, batch, samples, microbatch, tail, "momentum", counts=False, epochs=2)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
def test_optimizers_and_counts(optimizer, counts, tail):
    compare_with_textbook(N, 4, 10, 3, tail, optimizer, counts, epochs=3)
    compare_with_textbook(N, 10, None, 3, tail, optimizer, counts, epochs=3)


@given(
    n=st.integers(1, N),
    batch=st.integers(1, 12),
    samples=st.none() | st.integers(1, 30),
    microbatch=st.none() | st.integers(1, 8),
    tail=st.sampled_from(["update", "drop", "carry"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    counts=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_any_sizes(n, batch, samples, microbatch, tail, optimizer, counts, epochs):
    compare_with_textbook(n, batch, samples, microbatch, tail, optimizer, counts, epochs)


def test_float32_differs_by_rounding():
    model, twin = net().float(), net()
    step = sw.Step(model, sgd(model), lambda m, b: losses_of(m, (b[0].float(), b[1])), samples=10, microbatch=3)
    step.run(loader(4))
    textbook(twin, sgd(twin), windows(N, 10, "update", 1))
    assert_same(model.double(), twin, tolerance=1e-6)


def test_fewer_samples_than_an_update_needs():
    model, step = make_step(samples=30, tail="drop")
    assert list(step.over(loader(4))) == []
    assert_same(model, net())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
def test_buffers_advance_with_every_update(tail):
    """Those of a window that is dropped are brought back, and no others."""
    model = dropout_net()
    step = sw.Step(model, sgd(model), losses_of, samples=10, tail=tail)
    step.run([rows(0, 10), rows(10, 20)])
    assert model[1].passes == 2
    step.run([rows(20, 23)])
    assert model[1].passes == (2 if tail == "drop" else 3)


def test_what_is_carried_over_fills_the_next_window():
    _, step = make_step(samples=10, tail="carry")
    first, second = list(step.over(loader(4))), list(step.over(loader(4)))
    assert [len(first), len(second)] == [2, 2]  # 23 = 10 + 10 + 3, then 3 + 7 and 10
    expected = losses_of(net_after(windows(N, 10, "drop", 1)), (torch.cat([X[20:], X[:7]]), torch.cat([Y[20:], Y[:7]])))
    torch.testing.assert_close(second[0].losses, expected.detach())


# --- the ways to drive it ---------------------------------------------------------------------------------------------


def make_step(loss_fn=losses_of, **options):
    model = net()
    return model, sw.Step(model, sgd(model), loss_fn, **options)


def net_after(updates):
    model = net()
    return textbook(model, sgd(model), updates)


def by_over(step, batches):
    return list(step.over(batches))


def by_call(step, batches):
    updates = [update for batch in batches for update in step(batch)]
    last = step.flush()
    return updates + [last] * (last is not None)


def by_hand(step, batches):
    """Two batches of five make an update of ten."""
    updates = []
    for k, batch in enumerate(batches):
        step.accumulate(batch)
        if k % 2 == 1 or k == len(batches) - 1:
            updates.append(step.apply())
    return updates


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("drive", [by_over, by_call, by_hand])
def test_all_ways_give_the_same(drive, microbatch):
    model, step = make_step(losses_and_counts, samples=10, microbatch=microbatch)
    updates = drive(step, loader(5))
    assert [update.samples for update in updates] == [10, 10, 3]
    assert [update.index for update in updates] == [0, 1, 2]
    counters = step.counters
    assert (counters.samples, counters.updates, counters.skipped) == (N, 3, 0)
    assert counters.microbatches == {None: 5, 2: 4 * 3 + 2}[microbatch]
    assert counters.epochs == (drive is by_over)
    twin = net()
    assert_same(model, textbook(twin, sgd(twin), windows(N, 10, "update", 1), counts=True))


@pytest.mark.parametrize("samples", [None, 1, 4, 10])
def test_run_adds_up(samples, monkeypatch):
    monkeypatch.setattr(Totals, "KEPT", 2)
    _, step = make_step(losses_and_counts, samples=samples)
    updates = list(step.over(loader(6)))
    twin, again = make_step(losses_and_counts, samples=samples)
    totals = again.run(loader(6))
    assert totals.updates == len(updates)
    assert totals.samples == N
    assert totals.skipped == 0
    assert totals.seconds >= 0
    losses = torch.cat([update.losses for update in updates])
    assert totals.loss == pytest.approx((losses.sum() / COUNTS.sum()).item(), rel=1e-12)
    assert_same(twin, step.model, tolerance=0)
    assert f"Totals(updates={len(updates)}, samples={N}, " in repr(totals)


def test_run_over_nothing():
    _, step = make_step(samples=4)
    totals = step.run([])
    assert (totals.updates, totals.samples) == (0, 0)
    assert totals.loss != totals.loss  # NaN
    assert step.counters.epochs == 1


def test_a_batch_completes_no_update_or_several():
    model, step = make_step(samples=4)
    assert [len(step(rows(start, stop))) for start, stop in [(0, 3), (3, 14), (14, 15), (15, 16)]] == [0, 3, 0, 1]
    assert step.flush() is None
    assert_same(model, net_after([range(k, k + 4) for k in range(0, 16, 4)]))


def seeing(seen):
    """Notes which samples are computed: rows of X are numbered by `by`."""

    def loss_fn(model, batch):
        x, y, number = batch
        seen.extend(number.tolist())
        return losses_of(model, (x, y))

    return loss_fn


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_breaking_out_loses_nothing_and_sees_nothing_twice(stop_after, microbatch):
    seen = []
    model, step = make_step(seeing(seen), samples=3, microbatch=microbatch, recheck=False)
    batches = iter(DataLoader(TensorDataset(X, Y, torch.arange(N)), batch_size=10))
    for k, _ in enumerate(step.over(batches), start=1):
        if k == stop_after:
            break
    assert seen == list(range(3 * stop_after))
    assert step.counters.samples == 3 * stop_after
    assert step.counters.epochs == 0
    rest = list(step.over(batches))
    assert seen == list(range(N))
    assert rest[0].index == stop_after
    assert (step.counters.samples, step.counters.updates, step.counters.epochs) == (N, 8, 1)
    assert_same(model, net_after(windows(N, 3, "update", 1)))


def test_breaking_out_of_a_loader_that_starts_again():
    """The unused samples of the last batch come first."""
    seen = []
    _, step = make_step(seeing(seen), samples=3, recheck=False)
    batches = DataLoader(TensorDataset(X, Y, torch.arange(N)), batch_size=10)
    for _ in step.over(batches):
        break
    list(step.over(batches))
    assert seen == [*range(10), *range(N)]


def test_ways_mixed():
    model, step = make_step(samples=4)
    for _ in step.over([rows(0, 6)]):
        break  # 0..4; 4 and 5 are left
    assert len(step(rows(6, 9))) == 1  # 4..8; 8 is in the window
    step.accumulate(rows(9, 11))
    assert step.apply().samples == 3  # 8..11
    assert step.run([rows(11, 20)]).updates == 3  # 11..15, 15..19, 19
    step.accumulate(rows(20, 22))
    step.accumulate(rows(22, 23))
    assert step.flush().index == 6
    limits = [0, 4, 8, 11, 15, 19, 20, 23]
    assert_same(model, net_after([range(a, b) for a, b in itertools.pairwise(limits)]))
    assert step.counters.samples == N


def test_accumulating_more_than_an_update_needs_and_going_on():
    """accumulate() takes any number of samples; a step that then gets a batch must not cut it at a negative place."""
    model, step = make_step(samples=4)
    step.accumulate(rows(0, 6))
    updates = step(rows(6, 10))
    assert sum(update.samples for update in updates) == 10
    assert [update.samples for update in updates] == [6, 4]
    assert_same(model, net_after([range(6), range(6, 10)]))


def test_accumulating_exactly_what_an_update_needs_and_going_on():
    model, step = make_step(samples=4)
    step.accumulate(rows(0, 4))
    assert [update.samples for update in step(rows(4, 8))] == [4, 4]
    assert_same(model, net_after([range(4), range(4, 8)]))


def test_nothing_to_apply():
    _, step = make_step()
    with pytest.raises(sw.BatchError, match=r"found none accumulated\. Call accumulate\(batch\) first"):
        step.apply()
    assert step.flush() is None


@pytest.mark.parametrize("transforms", [(), [sw.drop(smallest=1)]], ids=["plain", "of the window"])
def test_dropped_samples_count_the_same_whatever_the_transforms(transforms):
    """3 of 23 are dropped at the end: counters must not depend on whether they had been computed already."""
    _, step = make_step(samples=10, tail="drop", transforms=transforms)
    step.run(loader(5))
    _, plain = make_step(samples=10, tail="drop")
    plain.run(loader(5))
    assert step.counters.samples == plain.counters.samples


# --- what an update knows ---------------------------------------------------------------------------------------------


def test_fields():
    _, step = make_step(losses_and_counts, samples=10, microbatch=3)
    model = net()
    for k, update in enumerate(step.over(loader(4))):
        window = windows(N, 10, "update", 1)[k]
        losses, counts = losses_and_counts(model, rows(window[0], window[-1] + 1))
        gradient = torch.autograd.grad(losses.sum() / counts.sum(), list(model.parameters()))
        assert (update.index, update.samples, update.skipped, update.lr) == (k, len(window), False, 0.1)
        assert update.loss == pytest.approx((losses.sum() / counts.sum()).item(), rel=1e-12)
        torch.testing.assert_close(update.losses, losses.detach(), rtol=1e-12, atol=0)
        assert not update.losses.requires_grad
        assert torch.equal(update.weights, torch.ones(len(window)).double())
        norm = parameters_to_vector(gradient).norm().item()
        assert update.grad_norm == pytest.approx(norm, rel=1e-12)
        assert update.seconds >= 0
        shown = f"index={k}, samples={len(window)}, loss={update.loss:.4g}, grad_norm={norm:.4g}, lr=0.1"
        assert repr(update) == f"Update({shown})"
        model = copy.deepcopy(step.model)
    assert k == 2


@pytest.mark.parametrize("batch", [4, 10])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip", "ignore"])
def test_max_grad_norm(batch, on_nonfinite):
    model, step = make_step(samples=10, max_grad_norm=0.05, on_nonfinite=on_nonfinite)
    twin = net()
    optimizer = sgd(twin)
    for update, window in zip(step.over(loader(batch)), windows(N, 10, "update", 1), strict=True):
        optimizer.zero_grad()
        losses_of(twin, (X[window], Y[window])).mean().backward()
        norm = clip_grad_norm_(twin.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
        assert update.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        assert_same(model, twin)


def test_a_large_max_grad_norm_changes_nothing():
    model, step = make_step(samples=10, max_grad_norm=1e6)
    step.run(loader(4))
    assert_same(model, net_after(windows(N, 10, "update", 1)))


def test_grad_norm_of_updates_that_are_not_checked_must_be_read_in_time():
    _, step = make_step(samples=10, on_nonfinite="ignore")
    first, *_, last = step.over(loader(4))
    assert last.grad_norm > 0
    with pytest.raises(sw.ParameterError, match="must be read before the next update begins"):
        _ = first.grad_norm


def test_the_scheduler_steps_once_per_update():
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    step = sw.Step(model, optimizer, losses_of, samples=5, microbatch=2, scheduler=scheduler)
    rates = [update.lr for update in step.over(loader(7))]
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025]
    twin = net()
    optimizer = sgd(twin)
    for rate, window in zip(rates, windows(N, 5, "update", 1), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        textbook(twin, optimizer, [window])
    assert_same(model, twin)


# --- norms ------------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that changes with every pass, on which the result depends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.passes += 1
        return x * self.passes


def dropout_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Counting(), nn.Dropout(), nn.Linear(8, 3)).double()


def norms_by_loop(model, batch):
    return torch.stack(
        [
            parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)).norm()
            for loss in losses_of(model, batch)
        ]
    )


@pytest.mark.parametrize("microbatch", [None, 3])
def test_norms_recorded(microbatch):
    _, step = make_step(samples=10, microbatch=microbatch, record=["norms"])
    model = net()
    for update, window in zip(step.over(loader(4)), windows(N, 10, "update", 1), strict=True):
        torch.testing.assert_close(update.norms, norms_by_loop(model, (X[window], Y[window])), rtol=1e-10, atol=0)
        model = copy.deepcopy(step.model)
    assert_same(step.model, net_after(windows(N, 10, "update", 1)))


def test_reading_norms_that_were_not_requested_changes_nothing():
    model, step = make_step(samples=5)
    for update in step.over(loader(10)):
        with pytest.raises(sw.ParameterError, match=f"found no request for update {update.index}.*record="):
            _ = update.norms
    assert not step._windows.record_norms
    assert_same(model, net_after(windows(N, 5, "update", 1)))


def test_required_norms_are_known_from_the_next_window_on():
    model, step = make_step(samples=5)
    updates = step.over(loader(10))
    first = next(updates)
    step.require(norms=True)
    with pytest.raises(sw.ParameterError, match="found no request for update 0"):
        _ = first.norms
    before = copy.deepcopy(model)
    torch.testing.assert_close(next(updates).norms, norms_by_loop(before, rows(5, 10)), rtol=1e-10, atol=0)
    for update in updates:
        assert update.norms.shape == (update.samples,)
    assert_same(model, net_after(windows(N, 5, "update", 1)))


def test_norms_required_inside_a_window_are_known_from_the_next_one_on():
    _, step = make_step(samples=5)
    assert step(rows(0, 3)) == []
    step.require(norms=True)
    (first,) = step(rows(3, 6))
    with pytest.raises(sw.ParameterError, match="found no request for update 0"):
        _ = first.norms
    before = copy.deepcopy(step.model)
    torch.testing.assert_close(step(rows(6, 10))[0].norms, norms_by_loop(before, rows(5, 10)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("transforms", [(), [sw.drop(largest=1)]])
def test_required_columns(transforms):
    _, step = make_step(samples=10, transforms=transforms)
    step.require(columns={"label": 1})
    step.require(columns={"first": 0})
    for update, window in zip(step.over(loader(4)), windows(N, 10, "update", 1), strict=True):
        assert list(update.columns) == ["label", "first", "epoch"]
        assert torch.equal(update.columns["label"], Y[window])
        assert torch.equal(update.columns["first"], X[window])
        assert update.columns["epoch"].tolist() == [0] * len(update.losses)


# --- what is trained --------------------------------------------------------------------------------------------------


def test_sgd_without_an_optimizer():
    model, twin = net(), net()
    step = sw.Step(model, sw.sgd(0.1), losses_of, samples=10, microbatch=3)
    updates = list(step.over(loader(4)))
    assert [update.lr for update in updates] == [0.1] * 3
    assert_same(model, textbook(twin, torch.optim.SGD(twin.parameters(), lr=0.1), windows(N, 10, "update", 1)))


def test_a_rule_of_ones_own():
    def signs(params, gradients):
        for p, g in zip(params, gradients, strict=True):
            p -= 0.01 * g.sign()

    model, twin = net(), net()
    step = sw.Step(model, signs, losses_of, samples=10)
    update = next(step.over(loader(10)))
    for p, g in zip(
        twin.parameters(), torch.autograd.grad(losses_of(twin, rows(0, 10)).mean(), twin.parameters()), strict=True
    ):
        p.data -= 0.01 * g.sign()
    assert_same(model, twin)
    assert update.lr != update.lr  # NaN: nobody knows it


class Weighed(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, model, batch):
        return losses_of(model, batch) * torch.exp(-self.log_scale) + self.log_scale


@pytest.mark.parametrize("by_rule", [False, True])
def test_parameters_of_a_loss_module(by_rule):
    model, loss, twin, twin_loss = net(), Weighed(), net(), Weighed()
    both = [*model.parameters(), *loss.parameters()]
    step = sw.Step(model, sw.sgd(0.1) if by_rule else torch.optim.SGD(both, lr=0.1), loss, samples=10, microbatch=3)
    step.run(loader(4))
    optimizer = torch.optim.SGD([*twin.parameters(), *twin_loss.parameters()], lr=0.1)
    for window in windows(N, 10, "update", 1):
        optimizer.zero_grad()
        twin_loss(twin, (X[window], Y[window])).mean().backward()
        optimizer.step()
    assert_same(model, twin)
    assert_same(loss, twin_loss)
    assert loss.log_scale != 0


def test_several_groups():
    def grouped(model):
        return torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])

    model, twin = net(), net()
    step = sw.Step(model, grouped(model), losses_of, samples=10, microbatch=4)
    assert [update.lr for update in step.over(loader(4))] == [(0.1, 0.001)] * 3
    assert_same(model, textbook(twin, grouped(twin), windows(N, 10, "update", 1)))


def freeze(module, frozen=True):
    for p in module.parameters():
        p.requires_grad_(not frozen)


def test_a_group_added_on_the_way():
    def half_trained():
        model = net()
        freeze(model[0])
        return model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def thaw(model, optimizer):
        freeze(model[0], False)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})

    model, optimizer = half_trained()
    step = sw.Step(model, optimizer, losses_of, samples=5, microbatch=2)
    twin, other = half_trained()
    step.run([rows(0, 10)])
    textbook(twin, other, [range(5), range(5, 10)])
    thaw(model, optimizer), thaw(twin, other)
    updates = list(step.over([rows(10, 20)]))
    textbook(twin, other, [range(10, 15), range(15, 20)])
    assert updates[0].lr == (0.1, 0.01)
    assert_same(model, twin)
    assert not torch.equal(model[0].weight, net()[0].weight)


@pytest.mark.parametrize("transforms", [(), sw.clip(0.5)], ids=["plain", "clip"])
def test_frozen_parameters_and_those_thawed_on_the_way(transforms):
    model, step = make_step(samples=5, transforms=transforms)
    freeze(model[0])
    step.run([rows(0, 10)])
    assert torch.equal(model[0].weight, net()[0].weight)
    assert model[0].weight.grad is None
    assert not torch.equal(model[2].weight, net()[2].weight)
    if not transforms:
        twin = net()
        freeze(twin[0])
        optimizer = sgd(twin)
        textbook(twin, optimizer, [range(5), range(5, 10)])
        freeze(twin[0], False)
        textbook(twin, optimizer, [range(10, 15), range(15, 20)])
    freeze(model[0], False)
    step.run([rows(10, 20)])
    assert not torch.equal(model[0].weight, net()[0].weight)
    if not transforms:
        assert_same(model, twin)


def test_parameters_frozen_on_the_way_stay_where_they_are():
    model, step = make_step(samples=5)
    step.run([rows(0, 10)])
    freeze(model[0])
    before = copy.deepcopy(model[0])
    step.run([rows(10, 20)])
    assert_same(model[0], before, tolerance=0)


def test_a_rule_trains_what_is_thawed_on_the_way():
    model = net()
    freeze(model[0])
    step = sw.Step(model, sw.sgd(0.1), losses_of, samples=5)
    step.run([rows(0, 5)])
    freeze(model[0], False)
    step.run([rows(5, 10)])
    assert not torch.equal(model[0].weight, net()[0].weight)


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4, sparse=sparse, dtype=torch.float64)

    def forward(self, ids):
        return self.embed(ids).sum(1).tanh().sum(1)


IDS = (torch.arange(N * 4) * 7 % 5).view(N, 4)  # words come again within a sample and across samples


def of_words(model, batch):
    return (model(batch[0]) - batch[1]).square()


def words_after(updates, max_grad_norm=None):
    """With a dense embedding, whose gradient torch can measure."""
    model, norms = Words(sparse=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in updates:
        optimizer.zero_grad()
        of_words(model, (IDS[window], Y[window])).mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")).item())
        optimizer.step()
    return model, norms


def word_batches(batch):
    return DataLoader(TensorDataset(IDS, Y), batch_size=batch)


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("batch", [4, 10])
def test_sparse_gradients(batch, microbatch):
    model = Words(sparse=True)
    step = sw.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), of_words, samples=10, microbatch=microbatch, recheck=False
    )
    step.run(word_batches(batch))
    assert model.embed.weight.grad.is_sparse
    assert_same(model, words_after(windows(N, 10, "update", 1))[0])


@pytest.mark.parametrize("before", [(), (sw.clip(1.0),)], ids=str)
def test_noise_is_also_on_rows_that_no_sample_has(before):
    """Else they would tell who was there."""
    dense, sparse = Words(sparse=False), Words(sparse=True)
    for model in (dense, sparse):
        noise = sw.noise(0.5, generator=torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.Step(model, optimizer, of_words, samples=10, transforms=[*before, noise]).run(word_batches(4))
    assert_same(sparse, dense)


def test_sparse_gradients_with_the_recheck():
    model = Words(sparse=True)
    sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), of_words, samples=10, recheck=1).run(word_batches(4))
    assert_same(model, words_after(windows(N, 10, "update", 1))[0])


def test_the_norm_of_sparse_gradients():
    """Rows that come several times are one row of the gradient."""
    model = Words(sparse=True)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), of_words, samples=10, microbatch=3)
    updates = list(step.over(word_batches(4)))
    _, norms = words_after(windows(N, 10, "update", 1))
    assert [update.grad_norm for update in updates] == pytest.approx(norms, rel=1e-10)


def test_max_grad_norm_of_sparse_gradients():
    model = Words(sparse=True)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), of_words, samples=10, max_grad_norm=0.1)
    step.run(word_batches(4))
    assert_same(model, words_after(windows(N, 10, "update", 1), max_grad_norm=0.1)[0])


def test_sparse_adam():
    model, twin = Words(sparse=True), Words(sparse=True)
    step = sw.Step(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), of_words, samples=10, microbatch=3)
    step.run(word_batches(4))
    optimizer = torch.optim.SparseAdam(twin.parameters(), lr=0.1)
    for window in windows(N, 10, "update", 1):
        optimizer.zero_grad()
        of_words(twin, (IDS[window], Y[window])).mean().backward()
        optimizer.step()
    assert_same(model, twin)


# --- what a step refuses to be built of -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            (dict(samples=bad), "samples must be a positive integer, or None")
            for bad in (0, -1, 2.5, "10", True, float("nan"))
        ],
        *[
            (dict(microbatch=bad), r"microbatch must be a positive integer, None, 'auto' or sw.auto\(memory\)")
            for bad in (0, -1, 2.5, "big", True)
        ],
        *[(dict(tail=bad), "tail must be one of update, drop, carry; found") for bad in ("keep", None)],
        (dict(on_nonfinite="warn"), "on_nonfinite must be one of raise, skip, ignore; found 'warn'"),
        *[(dict(max_grad_norm=bad), "max_grad_norm must be positive; found") for bad in (0, -1.0, float("nan"))],
        *[
            (dict(precision=bad), "precision must be one of None, '32', 'bf16-mixed', '16-mixed'; found")
            for bad in ("16", 32)
        ],
        *[
            (dict(recheck=bad), "recheck must be a positive number of updates, None or False; found")
            for bad in (0, -3, True, 1.5, "always")
        ],
        *[
            (dict(record=bad), r"record must be 'norms', or a collection with this name; found ['\[]")
            for bad in ("losses", ["losses"], ["norms", "dots"])
        ],
        (dict(record=None), "record must be 'norms', or a collection with this name; found None"),
        (dict(transforms=3), "a transform must be one of clip"),
        (dict(transforms=[sw.noise(1.0), sw.clip(1.0)]), "must come before the sum"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_step(**options)


@pytest.mark.parametrize("memory", [0, -1, float("nan")])
def test_bad_memory(memory):
    with pytest.raises(ValueError, match="memory must be a positive number of bytes"):
        sw.auto(memory)


@pytest.mark.parametrize("lr", [-0.1, float("nan")])
def test_bad_rate(lr):
    with pytest.raises(ValueError, match="lr must be zero or positive"):
        sw.sgd(lr)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda model: torch.optim.SGD, r"found the class SGD\. Write torch\.optim\.SGD\(model\.parameters\(\), lr="),
        (lambda model: None, r"found NoneType\. Write torch\.optim\.SGD"),
        (lambda model: 0.1, r"found float\. Write torch\.optim\.SGD"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "found LBFGS, which calls the loss function itself"),
    ],
)
def test_bad_optimizers(optimizer, message):
    model = net()
    with pytest.raises(TypeError, match=message):
        sw.Step(model, optimizer(model), losses_of)


def test_nothing_to_train():
    with pytest.raises(sw.ParameterError, match="the optimizer must have at least one parameter; found none"):
        sw.Step(nn.Tanh(), sw.sgd(0.1), losses_of)


@pytest.mark.parametrize("optimizer", [sgd, lambda model: sw.sgd(0.1)], ids=["optimizer", "rule"])
def test_everything_frozen(optimizer):
    model = net()
    freeze(model)
    step = sw.Step(model, optimizer(model), losses_of)
    with pytest.raises(sw.LossesError, match="from parameters that require gradients"):
        step.run(loader(4))


def test_schedulers_that_need_a_metric():
    model = net()
    optimizer = sgd(model)
    with pytest.raises(TypeError, match=r"found ReduceLROnPlateau\. Call its step\(metric\) yourself"):
        sw.Step(model, optimizer, losses_of, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize("scheduler", [torch.optim.lr_scheduler.StepLR, 0.9])
def test_what_is_no_scheduler(scheduler):
    with pytest.raises(TypeError, match="scheduler must"):
        make_step(scheduler=scheduler)


@pytest.mark.parametrize("loss_fn", [None, "cross_entropy", nn.TripletMarginLoss(), nn.Linear(2, 2)])
def test_bad_loss_functions(loss_fn):
    with pytest.raises(TypeError, match=r"loss_fn must be a function \(model, batch\) -> losses"):
        make_step(loss_fn)


@pytest.mark.parametrize("first", [{"a": 1.0}, {}])
def test_columns_that_change_within_a_window_are_refused(first):
    returned = iter([first, {"b": 2.0}])

    def loss_fn(model, batch):
        losses = model(batch[0]).squeeze(1)
        return losses, {name: torch.full_like(losses, value) for name, value in next(returned).items()}

    step = sw.Step(nn.Linear(2, 1), sw.sgd(0.1), loss_fn, samples=4, microbatch=2, recheck=False)
    (update,) = step((torch.ones(4, 2),))
    with pytest.raises(
        sw.LossesError,
        match=r"same columns for every microbatch of a window; found (a|none) and b\. Return every column",
    ):
        _ = update.columns


@pytest.mark.parametrize("record", ["norms", {"norms"}, ("norms",)])
def test_one_name_may_be_recorded_without_a_set(record):
    _, step = make_step(record=record)
    (update,) = step((X, Y))
    assert update.norms.shape == (len(Y),)


def test_totals_are_shown():
    _, step = make_step(recheck=False)
    totals = step.run([(X[:1], Y[:1]), (X, Y)])
    shown = f"updates=2, samples={1 + len(Y)}, loss={totals.loss:.4g}, seconds={totals.seconds:.2f}"
    assert repr(totals) == f"Totals({shown})"
