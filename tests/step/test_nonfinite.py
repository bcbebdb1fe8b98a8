"""NaN and infinity: an error that names them before anything is changed, or an update left out."""

import copy
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

import samplewise as sw
from samplewise.parallel.mode import Single
from samplewise.step import apply

# Bounds are small here so that every sample is clipped.
pytestmark = pytest.mark.filterwarnings("ignore:every weight of the first update")

NAN, INF = float("nan"), float("inf")
GOOD, BAD = 0.5, NAN  # targets
CHAINS = {
    "plain": (),
    "clip": [sw.clip(0.1)],
    "window": [sw.normalize("mean")],
    "group": [sw.group(lambda batch: [k // 2 for k in range(len(batch[1]))]), sw.clip(0.1)],
    "noise": [sw.clip(0.1), sw.noise(0.0)],
}
chains = pytest.mark.parametrize("transforms", CHAINS.values(), ids=CHAINS)
NUMBERS = [{}, dict(samples=8), dict(samples=8, microbatch=3), dict(microbatch=3)]
numbers = pytest.mark.parametrize("numbers", NUMBERS, ids=str)


class Model(nn.Module):
    """With a running mean of its inputs, as BatchNorm has, that samples do not interact through."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.calls += 1
        return self.f(x)


def squares(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def batch(bad=None, at=5, samples=8):
    """One that has something bad in it, in the inputs as well as in the target."""
    x, y = torch.randn(samples, 6), torch.full((samples,), GOOD)
    if bad is not None:
        x[at, 2] = y[at] = bad
    return x, y


class Training:
    """A step and all that it may change."""

    def __init__(self, loss_fn=squares, optimizer="sgd", model=Model, **options):
        torch.manual_seed(0)
        self.model = model()
        make = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
            "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        }
        self.optimizer = make[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = sw.Step(
            self.model, self.optimizer, loss_fn, scheduler=self.scheduler, **{"recheck": False} | options
        )

    def state(self):
        parts = self.model, self.optimizer, self.scheduler
        return copy.deepcopy([*(part.state_dict() for part in parts), asdict(self.step.counters)])

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def same(found, expected):
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


# ------------------------------------------------------------- "raise"


@pytest.mark.sweep(1 / 4)
@chains
@numbers
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nothing_is_changed(transforms, numbers, optimizer, bad):
    training = Training(optimizer=optimizer, transforms=transforms, **numbers)
    training.step.run([batch(), batch()])
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError, match=f"losses must be finite; found {bad}"):
        training.step.run([batch(bad)])
    assert same(training.state(), before)


@chains
@numbers
def test_training_goes_on_as_if_it_had_not_been(transforms, numbers):
    data = [batch(), batch(BAD), batch()]
    training, twin = (Training(transforms=transforms, **numbers) for _ in range(2))
    training.step.run(data[:1])
    with pytest.raises(sw.NonFiniteLossError):
        training.step.run(data[1:2])
    training.step.run(data[2:])
    for each in (data[:1], data[2:]):
        twin.step.run(each)
    assert same(training.state(), twin.state())


def test_the_very_first_update():
    training = Training()
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError):
        training.step.run([batch(BAD)])
    assert same(training.state(), before)


@chains
@numbers
def test_the_sample_is_named_by_its_place_in_the_window(transforms, numbers):
    with pytest.raises(sw.NonFiniteLossError, match="found nan at sample 5 "):
        Training(transforms=transforms, **numbers).step.run([batch(BAD, at=5)])


@chains
def test_the_remedy_is_a_steps_own(transforms):
    with pytest.raises(sw.NonFiniteLossError, match=r"Nothing was updated.*on_nonfinite='skip' skips such updates"):
        Training(transforms=transforms).step.run([batch(BAD)])


BY_LOSS = [sw.weight(lambda losses: torch.exp(-losses))]


@numbers
def test_losses_are_blamed_and_not_the_weights_computed_from_them(numbers):
    training = Training(transforms=BY_LOSS, **numbers)
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError, match="losses must be finite"):
        training.step.run([batch(BAD)])
    assert same(training.state(), before)


@numbers
def test_windows_with_weights_computed_from_bad_losses_are_skipped(numbers):
    training = Training(transforms=BY_LOSS, on_nonfinite="skip", **numbers)
    updates = list(training.step.over([batch(), batch(BAD), batch()]))
    assert [update.skipped for update in updates] == [False, True, False]


def test_how_many_samples_are_bad_is_said():
    x, y = batch(INF, at=2)
    y[[4, 6]] = NAN
    with pytest.raises(sw.NonFiniteLossError, match=r"found inf at sample 2 of the window \(3 of 8 samples\)"):
        Training().step.run([(x, y)])


def bare():
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def roots(model, batch):
    """Finite at zero; the slope is not."""
    return model(batch[0]).square().sum(1).sqrt()


def batch_with_a_zero(at=5):
    x, y = batch()
    x[at] = 0
    return x, y


@numbers
def test_a_gradient_that_is_not_finite_though_the_losses_are(numbers):
    training = Training(roots, model=bare, **numbers)
    training.step.run([batch()])
    before = training.state()
    message = (
        r"gradients must be finite; found NaN or infinity in the gradient of '0.weight' \(2 of 2 parameters\), although"
    )
    with pytest.raises(sw.NonFiniteGradientError, match=message):
        training.step.run([batch_with_a_zero()])
    assert same(training.state(), before)


@pytest.mark.parametrize("transforms", [CHAINS["clip"], CHAINS["window"], CHAINS["group"]])
@numbers
def test_a_gradient_of_one_sample_that_is_not_finite(transforms, numbers):
    training = Training(roots, model=bare, transforms=transforms, **numbers)
    training.step.run([batch()])
    before = training.state()
    with pytest.raises(sw.NonFiniteGradientError, match="gradients must be finite"):
        training.step.run([batch_with_a_zero()])
    assert same(training.state(), before)


def test_one_parameter_of_several_is_named():
    class Parted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine, self.rough = nn.Linear(6, 1), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.fine(x) + self.rough.abs().sqrt()

    with pytest.raises(sw.NonFiniteGradientError, match=r"in the gradient of 'rough' \(1 of 3 parameters\)"):
        Training(model=Parted).step.run([batch()])


def test_a_buffer_that_begins_to_change_in_the_bad_window():
    """Running statistics that were switched on after a while."""
    training = Training(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), on_nonfinite="skip")
    training.model[0].eval()
    training.step.run([batch(), batch()])
    training.model[0].train()
    training.step.run([batch(BAD)])
    assert training.model[0].running_mean.isfinite().all()


# ------------------------------------------------------------- "skip"


@pytest.mark.sweep(1 / 4)
@chains
@numbers
@pytest.mark.parametrize("at", [0, 5, 7])
def test_a_skipped_update_leaves_no_trace(transforms, numbers, at):
    """Wherever in the window it is: the others go on as if it had not been there."""
    data = [batch(), batch(BAD, at), batch(INF, at), batch()]
    training, twin = (Training(transforms=transforms, on_nonfinite="skip", **numbers) for _ in range(2))
    updates = list(training.step.over(data))
    twin.step.run([data[0], data[3]])
    assert [update.skipped for update in updates] == [False, True, True, False]
    assert [update.index for update in updates] == [0, 1, 1, 1]
    *state, counters = training.state()
    *expected, _ = twin.state()
    assert same(state, expected)
    assert (counters["updates"], counters["skipped"], counters["epochs"]) == (2, 2, 1)


@chains
@numbers
def test_a_skipped_update_counts_what_went_into_it(transforms, numbers):
    """`counters.samples` says where in the data a resumed run goes on."""
    training = Training(transforms=transforms, on_nonfinite="skip", **numbers)
    counted = []
    for update in training.step.over([batch(), batch(BAD)]):
        assert update.samples == 8
        counted.append((training.step.counters.samples, training.step.counters.microbatches))
    pieces = 3 if "microbatch" in numbers else 1
    assert counted == [(8, pieces), (16, 2 * pieces)]


@chains
def test_the_first_update_may_be_the_skipped_one(transforms):
    data = [batch(BAD), batch()]
    training, twin = (Training(transforms=transforms, on_nonfinite="skip", recheck=None) for _ in range(2))
    assert [update.skipped for update in training.step.over(data)] == [True, False]
    twin.step.run(data[1:])
    assert same(training.state()[:3], twin.state()[:3])


@numbers
@pytest.mark.parametrize("transforms", [(), CHAINS["clip"], CHAINS["window"]], ids=["plain", "clip", "window"])
def test_gradients_that_are_not_finite_are_skipped(transforms, numbers):
    data = [batch(), batch_with_a_zero(), batch()]
    training, twin = (
        Training(roots, model=bare, transforms=transforms, on_nonfinite="skip", **numbers) for _ in range(2)
    )
    assert [update.skipped for update in training.step.over(data)] == [False, True, False]
    twin.step.run(data[::2])
    assert same(training.state()[:3], twin.state()[:3])


@chains
def test_what_a_skipped_update_says_of_itself(transforms):
    training = Training(transforms=transforms, on_nonfinite="skip", samples=8)
    (update,) = training.step.over([batch(BAD)])
    assert "skipped" in repr(update)
    assert update.samples == len(update.losses) == 8
    assert update.loss != update.loss  # NaN
    assert update.lr == 0.1
    totals = training.step.run([batch(), batch(BAD), batch()])
    assert (totals.updates, totals.skipped, totals.samples) == (2, 1, 24)
    assert totals.loss == totals.loss


@pytest.mark.parametrize("transforms", [(), CHAINS["clip"]], ids=["plain", "clip"])
def test_skipping_by_hand(transforms):
    training, twin = (Training(transforms=transforms, on_nonfinite="skip", samples=8) for _ in range(2))
    halves = [batch(samples=4), batch(BAD, at=1, samples=4), batch(samples=4), batch(samples=4)]
    updates = [update for half in halves for update in training.step(half)]
    assert [update.skipped for update in updates] == [True, False]
    for half in halves[2:]:
        twin.step.accumulate(half)
    assert not twin.step.apply().skipped
    assert same(training.state()[:3], twin.state()[:3])


def test_a_window_is_bad_as_a_whole():
    """The good half of it is left out as well."""
    training = Training(on_nonfinite="skip")
    before = training.state()
    training.step.accumulate(batch())
    training.step.accumulate(batch(BAD))
    assert training.step.apply().skipped
    assert same(training.state()[:3], before[:3])


# ------------------------------------------------------------- "ignore"


def test_ignored_it_goes_through():
    training = Training(on_nonfinite="ignore")
    (update,) = training.step.over([batch(BAD)])
    assert not update.skipped
    assert update.loss != update.loss
    assert not training.model.f[0].weight.isfinite().any()


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_the_norm_is_that_before_clipping_whatever_the_policy(policy):
    training = Training(on_nonfinite=policy, max_grad_norm=0.01)
    (update,) = training.step.over([batch()])
    assert update.grad_norm > 0.1


def test_what_on_nonfinite_may_be():
    with pytest.raises(ValueError, match="on_nonfinite must be one of raise, skip, ignore; found 'warn'"):
        Training(on_nonfinite="warn")


# ------------------------------------------------------------- large is not infinite


def huge(model, batch):
    """Gradients of 1e25, whose squares float32 does not have."""
    return 1e25 * squares(model, batch)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@numbers
def test_gradients_whose_squares_overflow(policy, numbers):
    model = nn.Linear(6, 1)
    exact = copy.deepcopy(model).double()
    x, y = batch()
    (update,) = sw.Step(model, sw.sgd(1e-27), huge, on_nonfinite=policy, **numbers).over([(x, y)])
    (right,) = sw.Step(exact, sw.sgd(1e-27), huge).over([(x.double(), y.double())])
    assert not update.skipped
    assert update.grad_norm == pytest.approx(right.grad_norm, rel=1e-5)
    torch.testing.assert_close(model.weight.double(), exact.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_gradients_whose_squares_overflow_are_clipped(policy):
    model = nn.Linear(6, 1)
    exact, (x, y) = copy.deepcopy(model).double(), batch()
    (update,) = sw.Step(model, sw.sgd(0.1), huge, max_grad_norm=1.0, on_nonfinite=policy).over([(x, y)])
    (right,) = sw.Step(exact, sw.sgd(0.1), huge, max_grad_norm=1.0).over([(x.double(), y.double())])
    assert update.grad_norm == pytest.approx(right.grad_norm, rel=1e-5)
    torch.testing.assert_close(model.weight.double(), exact.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_whose_sum_overflows(dtype):
    """Each norm is finite, but their sum is beyond the range of the dtype: it is computed again, in float64."""
    large = torch.tensor([0.75 * torch.finfo(dtype).max], dtype=dtype)
    gradients = [large, large]
    norms = apply.GradNorms(gradients, [], Single())
    assert not norms.finite()
    norms.recompute(gradients)
    assert norms.norm().item() == pytest.approx(2**0.5 * large.item())


@pytest.mark.parametrize("others", [torch.float32, torch.float64])
def test_norms_of_several_dtypes_keep_the_widest(others):
    gradients = [torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.bfloat16)]
    norms = apply.GradNorms(gradients, [torch.ones(2, dtype=others)], Single())
    assert norms.finite() and norms.norm() == 5 and norms.norm().dtype is others


def test_losses_whose_squares_overflow():
    training = Training(lambda model, batch: squares(model, batch) + 1e30)
    assert not next(training.step.over([batch()])).skipped


# ------------------------------------------------------------- nothing to divide by


def counted(model, batch):
    """As with tokens to be ignored: a target of -100 counts nothing."""
    counts = (batch[1] != -100).float()
    return squares(model, batch) * counts, counts


@pytest.mark.sweep(1 / 3)
@numbers
@pytest.mark.parametrize("transforms", [(), CHAINS["clip"], CHAINS["window"]], ids=["plain", "clip", "window"])
def test_counts_that_sum_to_zero(transforms, numbers):
    empty = torch.randn(8, 6), torch.full((8,), -100.0)
    training = Training(counted, transforms=transforms, **numbers)
    training.step.run([batch()])
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError, match="counts, or the weights of its samples, sum to 0"):
        training.step.run([empty])
    assert same(training.state(), before)

    data = [batch(), empty, batch()]
    skipping, twin = (Training(counted, transforms=transforms, on_nonfinite="skip", **numbers) for _ in range(2))
    assert [update.skipped for update in skipping.step.over(data)] == [False, True, False]
    twin.step.run(data[::2])
    assert same(skipping.state()[:3], twin.state()[:3])


def test_counts_that_sum_to_zero_in_one_piece_only():
    x, y = batch()
    y[:4] = -100
    cut, whole = (Training(counted, samples=8, microbatch=size) for size in (4, None))
    for training in (cut, whole):
        training.step.run([(x, y)])
    for name, p in cut.parameters().items():
        torch.testing.assert_close(p, whole.parameters()[name])


def test_samples_that_are_all_dropped_later_on():
    """At the first update this is taken for a mistake; later a window may be empty."""
    weights = torch.ones(8)
    training = Training(transforms=[sw.weight(lambda losses: weights, renormalize=True)])
    training.step.run([batch()])
    weights.zero_()
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError, match="weights of its samples, sum to 0"):
        training.step.run([batch()])
    assert same(training.state(), before)


# ------------------------------------------------------------- left to the device


@pytest.fixture
def masked(monkeypatch):
    """As on an accelerator with a fused optimizer, which skips a non-finite update by a flag on the device."""
    monkeypatch.setattr(apply.UpdateApplier, "flags", True)

    def make(loss_fn=squares, **options):
        return Training(loss_fn, "fused", **options)

    return make


MASKED = [{}, dict(samples=8, microbatch=3), dict(transforms=[sw.noise(0.0)]), dict(max_grad_norm=0.01)]


@pytest.mark.parametrize("options", MASKED, ids=str)
def test_masked_updates_that_are_good(masked, options, monkeypatch):
    data = [batch() for _ in range(4)]
    training = masked(**options)
    found = [(update.loss, update.grad_norm) for update in training.step.over(data)]
    monkeypatch.undo()
    plain = Training(optimizer="fused", **options)
    assert found == [(update.loss, update.grad_norm) for update in plain.step.over(data)]
    assert same(training.state(), plain.state())


@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("read", ["loss", "losses", "weights", "grad_norm"])
def test_a_masked_update_that_is_bad_says_so_when_read(masked, options, read):
    training = masked(**options)
    training.step.run([batch()])
    before = training.parameters()
    (update,) = training.step.over([batch(BAD)])
    assert same(training.parameters(), before)
    for _ in range(2):  # not only the first time
        with pytest.raises(sw.NonFiniteLossError, match="found nan at sample 5 of the window"):
            getattr(update, read)


def test_a_masked_update_with_bad_gradients(masked):
    training = masked(roots, model=bare)
    training.step.run([batch()])
    before = training.parameters()
    (update,) = training.step.over([batch_with_a_zero()])
    assert same(training.parameters(), before)
    with pytest.raises(sw.NonFiniteGradientError, match="gradients must be finite; found NaN or infinity"):
        _ = update.loss


@pytest.mark.parametrize("options", MASKED, ids=str)
def test_a_masked_update_that_nobody_reads_raises_before_the_next_one(masked, options):
    training = masked(**options)
    training.step.run([batch()])
    before = training.state()
    with pytest.raises(sw.NonFiniteLossError, match="found nan at sample 5 of the window"):
        list(training.step.over([batch(BAD), batch(), batch()]))
    assert same(training.state(), before)


@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_masked_updates_are_skipped_without_a_trace(masked, options, bad):
    data = [batch() for _ in range(3)]
    data.insert(bad, batch(BAD))
    training, twin = (masked(on_nonfinite="skip", **options) for _ in range(2))
    updates = list(training.step.over(data))
    others = list(twin.step.over(data[:bad] + data[bad + 1 :]))
    assert [update.skipped for update in updates] == [k == bad for k in range(4)]
    assert [update.index for update in updates] == [k - (k > bad) for k in range(4)]
    del updates[bad]
    found, expected = ([(u.loss, u.lr, u.grad_norm) for u in each] for each in (updates, others))
    assert found == expected
    *state, counters = training.state()
    *expected_state, expected_counters = twin.state()
    assert same(state, expected_state)
    assert counters == {**expected_counters, "skipped": 1, "samples": 32, "microbatches": counters["microbatches"]}


def test_a_masked_update_is_counted_and_scheduled_until_the_flag_is_read(masked):
    """The counters and the scheduler of the step read it; those that the caller holds may be one update ahead."""
    training = masked(on_nonfinite="skip")
    rate = training.optimizer.param_groups[0]["lr"]
    list(training.step.over([batch(BAD)]))
    assert training.step._started_updates == 1
    assert (training.step.counters.updates, training.step.counters.skipped) == (0, 1)
    assert training.step._started_updates == 0
    assert training.optimizer.param_groups[0]["lr"] == rate == training.scheduler.get_last_lr()[0]


def test_totals_of_masked_updates_that_are_skipped(masked):
    training = masked(on_nonfinite="skip")
    data = [batch(), batch(BAD), batch()]
    totals = training.step.run(data)
    assert (totals.updates, totals.skipped, totals.samples) == (2, 1, 24)
    twin = masked(on_nonfinite="skip")
    assert totals.loss == twin.step.run(data[::2]).loss


def test_the_repr_of_a_masked_update_leaves_its_error_to_training(masked):
    training = masked()
    (update,) = training.step.over([batch(BAD)])
    assert repr(update) == f"Update(index=0, samples=8, skipped=True, lr={update.lr:.4g})"
    with pytest.raises(sw.NonFiniteLossError):
        training.step.run([batch()])
    totals = training.step.run([batch(), batch(BAD)])
    assert repr(totals).startswith("Totals(updates=1, skipped=1, samples=16, loss=")
    with pytest.raises(sw.NonFiniteLossError):
        _ = totals.updates


def test_the_repr_of_an_update_whose_gradients_are_cleared():
    training = Training(on_nonfinite="ignore")
    first, _ = training.step.over([batch(), batch()])
    assert repr(first) == f"Update(index=0, samples=8, loss={first.loss:.4g}, lr={first.lr:.4g})"


def test_a_learning_rate_in_a_tensor_is_restored(masked):
    training = masked(on_nonfinite="skip")
    (group,) = training.optimizer.param_groups
    group["lr"] = torch.tensor(0.1)
    list(training.step.over([batch(BAD)]))
    assert training.step.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_masked_updates_leave_buffers_alone(masked):
    training = masked()
    training.step.run([batch()])
    before = training.model.mean.clone()
    list(training.step.over([batch(BAD)]))
    assert torch.equal(training.model.mean, before)


def test_masked_updates_that_are_large_are_made(masked):
    training = masked(huge, model=lambda: nn.Linear(6, 1))
    (update,) = training.step.over([batch()])
    assert update.loss > 1e20  # not taken for infinite, though its square would be
    assert next(iter(training.optimizer.state.values()))["step"] == 1


def test_the_total_of_masked_updates_says_so_too(masked):
    training = masked(roots, model=bare)
    totals = training.step.run([batch(), batch_with_a_zero()])
    for read in ("loss", "updates", "skipped"):
        with pytest.raises(sw.NonFiniteGradientError, match=r"in the gradient of '0\.weight'"):
            getattr(totals, read)


def test_masked_counts_below_zero(masked):
    training = masked(lambda m, b: (squares(m, b), -torch.ones(8)))
    (update,) = training.step.over([batch()])
    with pytest.raises(sw.NonFiniteLossError, match="counts must be finite, and zero or positive; found -1"):
        _ = update.loss


def test_gradients_of_float64_whose_squares_overflow_are_clipped():
    model = nn.Linear(6, 1).double()
    before = model.weight.detach().clone()
    step = sw.Step(model, sw.sgd(1.0), lambda m, b: 1e200 * m(b)[:, 0], max_grad_norm=1.0)
    (update,) = step(torch.ones(4, 6).double())
    assert update.grad_norm == pytest.approx(1e200 * 7**0.5)
    torch.testing.assert_close(model.weight, before - 1 / 7**0.5)


@pytest.mark.parametrize("options", [{}, {"microbatch": 3}, {"transforms": [sw.clip(1.0)]}], ids=str)
def test_counts_below_zero(options):
    """They would climb instead of descend."""
    model = nn.Linear(6, 1)
    before = model.weight.detach().clone()
    step = sw.Step(model, sw.sgd(1.0), lambda m, b: (m(b)[:, 0].square(), -torch.ones(len(b))), **options)
    with pytest.raises(sw.LossesError, match="counts must be finite, and zero or positive; found -1"):
        step(torch.randn(8, 6))
    assert torch.equal(model.weight, before)


COUNTED_CHAINS = {
    **CHAINS,
    "per count": [sw.clip(0.1, per_count=True)],
    "renormalize": [sw.weight(lambda losses: torch.ones_like(losses), renormalize=True)],
}


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("transforms", COUNTED_CHAINS.values(), ids=COUNTED_CHAINS)
@numbers
@pytest.mark.parametrize("count", [INF, NAN, -INF], ids=str)
def test_a_count_that_is_not_finite(count, numbers, transforms):
    """An infinite count would make the update zero."""

    def counted(model, batch):
        return squares(model, batch), torch.where(batch[1] == 2.0, count, 1.0)

    torch.manual_seed(0)
    model = Model()
    before = copy.deepcopy(model.state_dict())
    step = sw.Step(model, sw.sgd(1.0), counted, transforms=transforms, **numbers)
    x, y = torch.randn(8, 6), torch.full((8,), GOOD)
    y[5] = 2.0
    with pytest.raises(sw.SamplewiseError, match=r"counts must be finite, and zero or positive; found|finite coeffi"):
        step((x, y))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("numbers", NUMBERS[:3], ids=str)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("backend")
def test_a_later_count_that_is_infinite(numbers, compile):
    """In compiled updates, too."""

    def counted(model, batch):
        return squares(model, batch), torch.where(batch[1] == 2.0, INF, 1.0)

    torch.manual_seed(0)
    step = sw.Step(Model().f, sw.sgd(0.1), counted, compile=compile, **numbers)
    x, y = torch.randn(8, 6), torch.full((8,), GOOD)
    for _ in range(5):
        step((x, y))
    before = copy.deepcopy(step.model.state_dict())
    y[5] = 2.0
    with pytest.raises(sw.NonFiniteLossError, match="counts must be finite, and zero or positive; found inf"):
        step((x, y))
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.usefixtures("backend")
def test_weights_with_a_negative_sum_cannot_be_divided_by(numbers, compile):
    """The update would ascend."""
    step = sw.Step(
        Model().f,
        sw.sgd(0.1),
        squares,
        transforms=sw.weight(lambda batch: batch[1], renormalize=True),
        compile=compile,
        **numbers,
    )
    x = torch.randn(8, 6)
    for _ in range(3):
        step((x, torch.full((8,), GOOD)))
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(sw.NonFiniteLossError, match=r"positive and finite; found .* sum to -4"):
        step((x, torch.full((8,), -GOOD)))
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


def test_counts_whose_sum_overflows():
    step = sw.Step(Model(), sw.sgd(0.1), lambda m, b: (squares(m, b), torch.full((8,), 3e38)))
    with pytest.raises(sw.NonFiniteLossError, match=r"positive and finite; found .* sum to inf"):
        step((torch.randn(8, 6), torch.full((8,), GOOD)))
