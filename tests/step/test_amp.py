"""Precision: what a forward pass is computed in; a loss scale that overflows skips the update and says so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

import samplewise as sw
from samplewise.step import forward as precision_module

N = 12
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
HUGE = 2.0**8  # times the scale, 2**16, too much for float16


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return x


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Counting(), nn.Tanh(), nn.Linear(8, 3))


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def huge(model, batch):
    return losses_of(model, batch) * HUGE


def make_step(loss_fn=losses_of, lr=0.1, **options):
    model = net()
    return model, sw.Step(model, torch.optim.SGD(model.parameters(), lr=lr), loss_fn, **options)


def vector(model):
    return parameters_to_vector(model.parameters()).detach()


def change(model):
    return vector(model) - vector(net())


def assert_same_change(found, expected, relative):
    """The distance between two updates, against their length."""
    assert change(expected).norm() > 0
    assert (change(found) - change(expected)).norm() <= relative * change(expected).norm()


def in_float32(**options):
    model, step = make_step(**options)
    step.run([(X, Y)])
    return model


@pytest.mark.parametrize(
    ("precision", "dtype"), [(None, torch.float32), ("32", torch.float32), ("bf16-mixed", torch.bfloat16)]
)
def test_what_the_forward_pass_is_computed_in(precision, dtype):
    seen = set()

    def loss_fn(model, batch):
        out = model(batch[0])
        seen.add(out.dtype)
        return F.cross_entropy(out, batch[1], reduction="none")

    model, step = make_step(loss_fn, precision=precision)
    step.run([(X, Y)])
    assert seen == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_16_mixed_is_computed_in_float16():
    seen = set()
    _, step = make_step(
        lambda model, batch: (seen.add(model(batch[0]).dtype), losses_of(model, batch))[1], precision="16-mixed"
    )
    step.run([(X, Y)])
    assert seen == {torch.float16}


@pytest.mark.parametrize(("precision", "dtype"), [(None, torch.bfloat16), ("32", torch.float32)])
def test_none_leaves_it_to_the_caller_and_32_does_not(precision, dtype):
    seen = set()
    _, step = make_step(
        lambda model, batch: (seen.add(model(batch[0]).dtype), losses_of(model, batch))[1], precision=precision
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step.run([(X, Y)])
    assert seen == {dtype}


def test_bf16_mixed_is_autocast_written_out():
    model, step = make_step(precision="bf16-mixed")
    step.run([(X, Y)])
    twin = net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses_of(twin, (X, Y)).mean()
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(vector(model), vector(twin), rtol=0, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("transforms", [(), sw.clip(0.5), sw.drop(largest=2)], ids=["plain", "clip", "drop"])
@pytest.mark.parametrize("sizes", [{}, dict(samples=N, microbatch=5)], ids=["whole", "cut"])
def test_close_to_float32(precision, transforms, sizes):
    model, step = make_step(precision=precision, transforms=transforms, max_grad_norm=0.2, **sizes)
    step._precision.scale = min(step._precision.scale, 2.0**8)  # small enough for sums over a window
    (update,) = step.over([(X, Y)])
    assert not update.skipped
    assert update.loss == pytest.approx(losses_of(net(), (X, Y)).mean().item(), rel=1e-2)
    expected = in_float32(transforms=transforms, max_grad_norm=0.2)
    assert_same_change(model, expected, relative=2e-2 if precision == "bf16-mixed" else 5e-3)


def test_norms_and_grad_norm_are_without_the_scale():
    _, step = make_step(precision="16-mixed", record=["norms"])
    (update,) = step.over([(X, Y)])
    _, plain = make_step(record=["norms"])
    (expected,) = plain.over([(X, Y)])
    torch.testing.assert_close(update.norms, expected.norms, rtol=1e-2, atol=1e-3)
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)


# --- a scale that is too large ----------------------------------------------------------------------------------------

TRANSFORMS = pytest.mark.parametrize(
    "transforms", [(), sw.clip(1e6), sw.drop(smallest=1)], ids=["plain", "clip", "drop"]
)
SIZES = pytest.mark.parametrize(
    "sizes", [{}, dict(samples=N), dict(samples=N, microbatch=5)], ids=["as it comes", "whole", "cut"]
)


@TRANSFORMS
@SIZES
def test_an_overflow_skips_the_update(transforms, sizes):
    model, step = make_step(huge, precision="16-mixed", transforms=transforms, recheck=False, **sizes)
    optimizer_before = copy.deepcopy(step.optimizer.state_dict())
    (update,) = step.over([(X, Y)])
    assert update.skipped
    assert update.index == 0
    assert update.samples == N
    assert update.grad_norm != update.grad_norm  # NaN
    assert repr(update) == f"Update(index=0, samples={N}, skipped=True, lr={update.lr:.4g})"
    assert torch.equal(vector(model), vector(net()))
    assert step.optimizer.state_dict() == optimizer_before
    assert model[1].passes == 0
    assert all(p.grad is None for p in model.parameters())
    assert (step.counters.updates, step.counters.skipped, step.counters.samples) == (0, 1, N)
    assert step._precision.scale == 2.0**15


@pytest.mark.sweep(1 / 3)
@TRANSFORMS
@SIZES
def test_recovers(transforms, sizes):
    """The scale is halved until it fits. Then the update is that of float32, and what was skipped left no trace."""
    lr = 0.1 / HUGE
    model, step = make_step(huge, lr=lr, precision="16-mixed", transforms=transforms, recheck=False, **sizes)
    updates = []
    while not updates or updates[-1].skipped:
        assert len(updates) < 16
        updates += step.over([(X, Y)])
    skipped = len(updates) - 1
    assert skipped > 0
    assert [update.index for update in updates] == [0] * len(updates)
    assert step._precision.scale == 2.0 ** (16 - skipped)
    assert (step.counters.updates, step.counters.skipped) == (1, skipped)
    assert_same_change(model, in_float32(loss_fn=huge, lr=lr, transforms=transforms), relative=5e-3)
    assert model[1].passes == (3 if "microbatch" in sizes else 1)
    (following,) = step.over([(X, Y)])
    assert following.index == 1


@TRANSFORMS
@pytest.mark.parametrize("recheck", [None, 1])
def test_an_overflow_is_no_sign_of_interaction(transforms, recheck):
    """The recheck computes with the same scale."""
    _, step = make_step(huge, lr=0.0, precision="16-mixed", transforms=transforms, recheck=recheck)
    totals = step.run([(X, Y)] * 12)
    assert totals.skipped > 0
    assert totals.updates > 0


def test_a_skipped_update_does_not_advance_the_scheduler():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / HUGE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = sw.Step(model, optimizer, huge, precision="16-mixed", scheduler=scheduler)
    updates = [update for _ in range(10) for update in step.over([(X, Y)])]
    made = [update for update in updates if not update.skipped]
    assert 0 < len(made) < 10
    assert scheduler.last_epoch == len(made)
    assert {update.lr for update in updates if update.skipped} == {0.1 / HUGE}
    assert [update.lr for update in made] == pytest.approx([0.1 / HUGE / 2**k for k in range(len(made))])


def test_totals_of_a_run_with_skipped_updates():
    _, step = make_step(lambda model, batch: losses_of(model, batch) * batch[2], lr=0.0, precision="16-mixed")
    totals = step.run([(X, Y, factor) for factor in (1.0, 2.0**20, 1.0)])
    assert (totals.updates, totals.skipped) == (2, 1)
    assert totals.samples == 3 * N
    assert totals.loss == pytest.approx(losses_of(net(), (X, Y)).mean().item(), rel=1e-2)
    assert "Totals(updates=2, skipped=1, " in repr(totals)


def test_the_scale_grows_again(monkeypatch):
    monkeypatch.setattr(precision_module, "GROWTH_INTERVAL", 3)
    _, step = make_step(lr=0.0, precision="16-mixed")
    step._precision.scale = 2.0**8
    scales = []
    for _ in step.over([(X, Y)] * 7):
        scales.append(step._precision.scale)
    assert scales == [2.0**8] * 2 + [2.0**9] * 3 + [2.0**10] * 2


def test_an_overflow_begins_the_count_anew(monkeypatch):
    monkeypatch.setattr(precision_module, "GROWTH_INTERVAL", 3)
    factor = [1.0]
    _, step = make_step(lambda model, batch: losses_of(model, batch) * factor[0], lr=0.0, precision="16-mixed")
    step._precision.scale = 2.0**8
    step.run([(X, Y)] * 2)
    factor[0] = 2.0**18
    assert next(step.over([(X, Y)])).skipped
    factor[0] = 1.0
    step.run([(X, Y)] * 2)
    assert step._precision.scale == 2.0**7
    step.run([(X, Y)])
    assert step._precision.scale == 2.0**8


@pytest.mark.parametrize("precision", [None, "32", "bf16-mixed"])
def test_there_is_a_scale_in_16_mixed_alone(precision):
    _, step = make_step(precision=precision)
    step.run([(X, Y)])
    assert step._precision.scale == 1


@TRANSFORMS
def test_a_loss_that_is_not_finite_is_no_affair_of_the_scale(transforms):
    def broken(model, batch):
        return losses_of(model, batch) / torch.zeros(len(batch[0]))

    model, step = make_step(broken, precision="16-mixed", transforms=transforms, recheck=False)
    with pytest.raises(sw.NonFiniteLossError, match="losses must be finite"):
        step.run([(X, Y)])
    assert step._precision.scale == 2.0**16
    assert torch.equal(vector(model), vector(net()))


# --- losses that are themselves in half precision ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transforms", [(), sw.clip(1e6)], ids=["plain", "clip"])
@pytest.mark.parametrize("microbatch", [None, 5])
def test_losses_in_half_precision(dtype, transforms, microbatch):
    model, step = make_step(
        lambda model, batch: losses_of(model, batch).to(dtype), samples=N, microbatch=microbatch, transforms=transforms
    )
    (update,) = step.over([(X, Y)])
    assert update.losses.dtype == dtype
    assert update.loss == pytest.approx(losses_of(net(), (X, Y)).mean().item(), rel=1e-2)
    assert_same_change(model, in_float32(), relative=1e-3)


MANY = 600  # bfloat16 cannot count further than 256 by ones


@pytest.mark.parametrize("batch", [1, 100])
def test_many_losses_in_half_precision_are_added_up_right(batch):
    def ones(model, x):
        return (model(x).flatten() * 0 + 1).to(torch.bfloat16)

    step = sw.Step(nn.Linear(2, 1), sw.sgd(0.1), ones, samples=MANY)
    (update,) = step.over(torch.ones(MANY, 2).split(batch))
    assert update.loss == pytest.approx(1, rel=1e-2)
    assert step.run(torch.ones(MANY, 2).split(batch)).loss == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("batch", [1, 100])
def test_many_counts_in_half_precision_are_added_up_right(batch):
    """The gradient is one, however the window is cut."""

    def loss_fn(model, x):
        losses = model(x).flatten().to(torch.bfloat16)
        return losses, torch.ones_like(losses)

    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    sw.Step(model, sw.sgd(1.0), loss_fn, samples=MANY).run(torch.ones(MANY, 2).split(batch))
    torch.testing.assert_close(before - model.weight.detach(), torch.ones(1, 2), rtol=1e-2, atol=0)


@pytest.mark.parametrize("transforms", [(), sw.clip(0.5)], ids=["plain", "clip"])
def test_losses_in_float16_are_scaled_in_float32(transforms):
    """The first loss scale, 2**16, is beyond the range of float16."""
    model, step = make_step(lambda model, batch: model(batch[0])[:, 0], precision="16-mixed", transforms=transforms)
    twin, other = make_step(
        lambda model, batch: model(batch[0])[:, 0].float(), precision="16-mixed", transforms=transforms
    )
    step.run([(X, Y)] * 3)
    other.run([(X, Y)] * 3)
    assert torch.equal(vector(model), vector(twin)) and not torch.equal(vector(model), vector(net()))
    assert step._precision.scale == other._precision.scale
