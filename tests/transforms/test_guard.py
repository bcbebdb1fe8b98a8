"""sw.guard: bounds from the norms of earlier updates; updates without the samples that are dropped."""

import copy
import pickle
from math import inf

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.core.quantiles import RunningQuantiles
from samplewise.errors import LossesError, NonFiniteGradientError, NonFiniteLossError, TransformError
from samplewise.transforms.clip import CLIP_AFTER, DROP_AFTER, REFRESH
from samplewise.transforms.stats import SampleStats

NAN = float("nan")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)).double()


def squares(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def data(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, generator=generator, dtype=torch.float64)


def make(*transforms, loss_fn=squares, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return sw.Step(model, optimizer, loss_fn, transforms=transforms, **options)


def weights(step):
    return nn.utils.parameters_to_vector(step.model.parameters()).detach()


def state_of(transform):
    return transform.state


def stats(norms, counts=None):
    norms = torch.as_tensor(norms, dtype=torch.float64)
    return SampleStats(torch.zeros_like(norms), None if counts is None else torch.as_tensor(counts), raw_norms=norms)


# --------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("clip", [0.5, 0.9, 0.99])
def test_the_bounds_are_quantiles_of_the_norms_in_the_window(clip):
    guard = sw.guard(clip=clip, drop=5.0, window="20up")
    everything = []
    generator = torch.Generator().manual_seed(0)
    for update in range(37):
        norms = torch.randn(50, generator=generator, dtype=torch.float64).exp() * 1.05**update
        everything.append(norms)
        guard.state.commit(guard.state.values(stats(norms)))
        guard.state.state_dict()  # must not change the bounds
        known = torch.cat(everything[(update + 1) // 10 * 10 - 10 if update >= 19 else 0 :])
        fresh = known[: len(known) - len(known) % 50]
        assert (guard.state.bound == inf) == (len(fresh) < CLIP_AFTER)
        assert guard.state.limit < inf  # 50 norms are enough for a median
        if len(fresh) < CLIP_AFTER:
            continue
        # The bounds are at most 1/REFRESH of the norms old, and quantiles are rounded by at most 2 %.
        low, high = (float(fresh.quantile(max(0.0, min(1.0, clip + d)))) for d in (-0.05, 0.05))
        assert low * 0.99 <= guard.state.bound <= high * 1.03
        low, high = (float(fresh.quantile(0.5 + d)) for d in (-0.06, 0.06))
        assert 5 * low * 0.98 <= guard.state.limit <= 5 * high * 1.02
    assert REFRESH == 25 > DROP_AFTER


def test_coefficients_are_those_of_the_formula():
    guard = sw.guard(clip=0.9, drop=10.0)
    guard.state.commit(guard.state.values(stats(torch.arange(1.0, 201.0))))
    bound, limit = guard.state.bound, guard.state.limit
    assert 180 <= bound <= 180 * 1.02
    assert limit == pytest.approx(1000, rel=0.01)
    norms = torch.tensor([0.0, 1.0, bound, 2 * bound, limit, limit * 1.01, 1e30], dtype=torch.float64)
    expected = torch.tensor([1, 1, 1, 0.5, bound / limit, 0, 0], dtype=torch.float64)
    assert torch.equal(guard(stats(norms)), expected)
    counts = torch.tensor([3.0, 4, 2, 5, 1, 10, 7], dtype=torch.float64)
    assert torch.allclose(guard(stats(norms * counts, counts)), expected)
    empty = stats([0.0], [0.0])  # without tokens
    assert guard(empty).tolist() == [1.0]
    before = len(guard.state._norms)
    guard.state.commit(guard.state.values(empty))
    guard.state.state_dict()
    assert len(guard.state._norms) == before


def test_only_what_is_asked_for():
    clips, drops = sw.guard(drop=None), sw.guard(clip=None, drop=2.0)
    for guard in (clips, drops):
        guard.state.commit(guard.state.values(stats(torch.arange(1.0, 201.0))))
    assert clips.state.limit == drops.state.bound == inf
    assert clips(stats([1e9])) > 0
    assert drops(stats([150.0, 250.0])).tolist() == [1.0, 0.0]


def test_zero_norms_give_no_bounds():
    guard = sw.guard()
    guard.state.commit(guard.state.values(stats(torch.zeros(500))))
    assert guard(stats([1.0, 0.0])).tolist() == [1.0, 1.0]


def test_a_window_in_samples_forgets_like_one_in_updates():
    by_updates, by_samples = sw.guard(window="10up"), sw.guard(window="400samples")
    generator = torch.Generator().manual_seed(0)
    for k in range(25):
        values = torch.rand(40, generator=generator) * (k + 1)
        for guard in (by_updates, by_samples):
            guard.state.commit(values)
    states = [guard.state.state_dict() for guard in (by_updates, by_samples)]
    assert [state.pop("settings") for state in states] == [[0.99, 50.0, 10, "up"], [0.99, 50.0, 400, "samples"]]
    assert states[0] == states[1]
    assert len(by_updates.state._norms) == 5 * 40  # the second half has just begun


def test_many_values_are_counted_as_one_by_one():
    values = torch.cat([torch.rand(300).double(), torch.tensor([0.0, 1e-13, 1e15, NAN, inf])])
    together, single = RunningQuantiles(period=None), RunningQuantiles()
    together.add_all(values)
    for value in values[:300].tolist():
        single.add(int((torch.tensor(value).double() / 1e-12).log().div(0.01980262729617973).ceil()))
    assert len(together) == 303
    for level in (0.1, 0.5, 0.9):
        assert together.quantile(level) == pytest.approx(single.quantile(level), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip": 1.0}, "clip must be a number above 0 and below 1, or None; found 1.0."),
        ({"clip": 0}, "clip must be a number above 0 and below 1, or None; found 0."),
        ({"clip": "0.9"}, "clip must be a number above 0 and below 1, or None; found '0.9'."),
        ({"drop": 1}, "drop must be a number above 1, or None; found 1."),
        ({"drop": NAN}, "drop must be a number above 1, or None; found nan."),
        ({"window": "2ep"}, "window must be a duration such as '1000up' (updates) or '50000samples'; found '2ep'."),
        ({"window": 0}, "window must be a duration such as '1000up' (updates) or '50000samples'; found 0."),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as error:
        sw.guard(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (lambda: [sw.clip(1.0), sw.guard()], "must be the first transform, because its bounds are norms before any"),
        (lambda: [sw.guard(), sw.guard()], "must be combined with transforms that give each sample one coefficient"),
        (lambda: [sw.guard(), sw.drop(1)], "without the rest of the window; found drop(largest=1)."),
        (lambda: [sw.guard(), sw.clip(1.0, by="parameter")], "found clip(1.0, by='parameter')."),
        (lambda: [sw.guard(), sw.weight(torch.ones(4))], "found weight(tensor of 4)."),
        (lambda: [sw.guard(), sw.group("user")], "found group('user')."),
        (lambda: [sw.group("user"), sw.guard()], "found group('user')."),
    ],
)
def test_chains_in_which_samples_cannot_be_dropped(transforms, message):
    with pytest.raises(TransformError) as error:
        sw.chain(*transforms())
    assert message in str(error.value)


# --------------------------------------------------------------------------------------- updates


CUTS = [{}, {"microbatch": 3}, {"samples": 8}, {"samples": 8, "microbatch": 3}, {"microbatch": "auto"}]


def run(step, x, y, rows=8):
    return [u for k in range(0, len(x), rows) for u in step((x[k : k + rows], y[k : k + rows]))]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("options", CUTS, ids=str)
@pytest.mark.parametrize("bad", [NAN, inf, "gradient"])
def test_an_update_with_a_bad_sample_is_that_of_the_others(options, bad):
    def loss_fn(model, batch):
        return squares(model, batch) + (batch[0][:, 0] - 7.0).abs().sqrt() * 0 + root(model, batch)

    def root(model, batch):  # finite with an infinite derivative at the marked sample
        return ((batch[0][:, 0] - 7.0).abs() * model[2].bias.square().clamp(min=1e-12)).sqrt() * (bad == "gradient")

    x, y = data(80)
    places = [3, 12, 13, 47]
    if bad == "gradient":
        x[places, 0] = 7.0
    else:
        x[places, 1] = bad
    step = make(sw.guard(), loss_fn=loss_fn, **options)
    others = make(sw.guard(), loss_fn=loss_fn)
    for k, update in enumerate(run(step, x, y)):
        rows = [row for row in range(8 * k, 8 * k + 8) if row not in places]
        (expected,) = others((x[rows], y[rows]))
        dropped = [row in places for row in range(8 * k, 8 * k + 8)]
        assert update.dropped.tolist() == dropped
        assert (update.weights == 0).tolist() == dropped
        assert update.samples == 8
        assert update.loss == pytest.approx(expected.loss, rel=1e-12)
        assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert torch.allclose(update.norms[~update.dropped], expected.norms, rtol=1e-12)
        assert update.norms[update.dropped].isnan().all()
    assert torch.allclose(weights(step), weights(others), rtol=1e-12, atol=0)
    recorded = (other.state_dict()["transforms"][0]["norms"]["current"] for other in (step, others))
    assert next(recorded) == next(recorded)
    assert step.counters.samples == 80


@pytest.mark.parametrize("counts", [False, True])
def test_an_outlier_is_left_out_of_denominator_and_loss(counts):
    def loss_fn(model, batch):
        losses = squares(model, batch)
        return (losses * batch[2], batch[2]) if counts else losses

    x, y = data(400)
    n = torch.arange(400).double() % 5 + 1
    y[[250, 303]] = 1e6
    step, others = make(sw.guard(), loss_fn=loss_fn), make(sw.guard(), loss_fn=loss_fn)
    for k in range(0, 400, 10):
        (update,) = step((x[k : k + 10], y[k : k + 10], n[k : k + 10]))
        rows = [row for row in range(k, k + 10) if row not in (250, 303)]
        (expected,) = others((x[rows], y[rows], n[rows]))
        assert update.dropped.tolist() == [row in (250, 303) for row in range(k, k + 10)]
        assert update.loss == pytest.approx(expected.loss, rel=1e-12)
    assert torch.allclose(weights(step), weights(others), rtol=1e-11, atol=0)
    norms = [other.state_dict()["transforms"][0]["norms"] for other in (step, others)]
    assert norms[0] == norms[1]
    totals = make(sw.guard(), loss_fn=loss_fn).run(
        [(x[k : k + 10], y[k : k + 10], n[k : k + 10]) for k in range(0, 400, 10)]
    )
    assert totals.loss < 100


def test_a_clipped_update_equals_the_plain_formula():
    step = make(sw.guard(clip=0.5), record="norms")
    x, y = data(240)
    run(step, x[:200], y[:200], 20)
    bound = step.transforms.states[0].bound
    model = copy.deepcopy(step.model)
    before = copy.deepcopy(step.optimizer.state_dict()["state"])
    total = {}
    for k in range(200, 240):
        gradient = torch.autograd.grad(squares(model, (x[k : k + 1], y[k : k + 1])).sum(), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for i, g in enumerate(gradient):
            total[i] = total.get(i, 0) + g * min(1.0, bound / float(norm))
    old = [p.detach().clone() for p in step.model.parameters()]
    (update,) = step((x[200:], y[200:]))
    assert 5 < (update.weights < 1).sum() < 35
    for i, (p, q) in enumerate(zip(step.model.parameters(), old, strict=True)):
        momentum = 0.9 * before[i]["momentum_buffer"] + total[i] / 40
        assert torch.allclose(p, q - 0.01 * momentum, rtol=1e-12)


@pytest.mark.parametrize("options", [{"microbatch": 1}, {"microbatch": 3}])
def test_updates_do_not_depend_on_the_cut(options):
    x, y = data(300)
    y[::37] *= 300
    whole, cut = (
        make(sw.guard(clip=0.8, drop=20.0, window="8up")),
        make(sw.guard(clip=0.8, drop=20.0, window="8up"), **options),
    )
    for update, other in zip(run(whole, x, y, 12), run(cut, x, y, 12), strict=True):
        assert torch.equal(update.dropped, other.dropped)
        assert torch.allclose(update.weights, other.weights, rtol=1e-12)
    assert torch.allclose(weights(whole), weights(cut), rtol=1e-10)
    assert whole.transforms.states[0]._progress == cut.transforms.states[0]._progress


def test_the_state_changes_with_updates_that_are_made():
    step = make(sw.guard())
    x, y = data(40)
    step((x[:8], y[:8]))
    before = step.state_dict()["transforms"]
    step.accumulate((x[8:16], y[8:16]))
    assert step.state_dict()["transforms"] == before
    with pytest.raises(TypeError):
        step("nothing")
    assert step.state_dict()["transforms"] == before
    step((x[16:24], y[16:24]))
    assert sum(n for _, n in step.state_dict()["transforms"][0]["norms"]["current"]) == 16


def test_an_update_of_outliers_is_skipped_and_the_guard_forgets():
    step = make(sw.guard(window="10up"))
    x, y = data(200)
    run(step, x, y, 20)
    before = weights(step)
    updates = [step((x[:20], y[:20] + 1e5))[0] for _ in range(6)]
    # The norms of half a window are left, and forgotten after another half: then the new ones count.
    assert [u.skipped for u in updates] == [True] * 5 + [False]
    assert step.counters.skipped == 5
    assert not torch.equal(weights(step), before)
    assert torch.isnan(torch.tensor(updates[0].loss))
    assert updates[0].dropped.all()


@pytest.mark.parametrize("samples", [1, 4])
def test_an_update_without_a_finite_sample_is_an_error(samples):
    x, y = data(samples)
    step = make(sw.guard())
    with pytest.raises(NonFiniteLossError, match="losses must be finite; found nan at sample 0 of the window"):
        step((x * NAN, y))
    before = weights(step)
    assert step.counters.updates == step.counters.samples == 0
    skipping = make(sw.guard(), on_nonfinite="skip")
    (update,) = skipping((x * NAN, y))
    assert update.skipped
    assert torch.equal(weights(skipping), before)
    (update,) = skipping((x, y))
    assert not update.skipped


def test_counts_of_zero_are_an_error_as_without_a_guard():
    step = make(sw.guard(), loss_fn=lambda model, batch: (squares(model, batch), torch.zeros(8)), recheck=False)
    with pytest.raises(NonFiniteLossError, match="the denominator of a window must be positive and finite"):
        step(data(8))


def test_buffers_do_not_see_the_dropped_sample():
    class Tracking(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = net()
            self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
            return self.f(x)

    x, y = data(8)
    model = Tracking()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.01), squares, transforms=[sw.guard()])
    x[2] = NAN
    step((x, y))
    assert model.largest == x[x.isfinite()].abs().max()


def test_what_cannot_be_repeated_raises():
    x, y = data(8)
    x[2] = NAN

    def scaled(model, batch):
        batch[0].mul_(0.5)
        return squares(model, batch)

    step = make(sw.guard(), loss_fn=scaled, recheck=False)
    with pytest.raises(
        LossesError, match="must leave the batch unchanged if a sample that is not finite is to be left"
    ):
        step((x.clone(), y))
    step = make(sw.guard(), interacting="allow")
    with pytest.raises(NonFiniteLossError, match="found nan at sample 2 of the window"):
        step((x, y))


def test_half_precision_overflow_skips_and_halves_the_scale():
    model = net().float()
    step = sw.Step(
        model, torch.optim.SGD(model.parameters(), 0.01), squares, transforms=[sw.guard()], precision="16-mixed"
    )
    x, y = data(8)
    step._precision.scale = 2.0**140
    (update,) = step((x.float(), y.float()))
    assert update.skipped
    assert step._precision.scale == 2.0**139


# --------------------------------------------------------------------------------------- state and other users


def test_a_resumed_step_continues_bit_by_bit():
    x, y = data(600)
    y[::41] *= 100
    x[77] = NAN
    straight, first = make(sw.guard(window="12up")), make(sw.guard(window="12up"))
    run(straight, x, y, 12)
    run(first, x[:300], y[:300], 12)
    first.accumulate((x[300:304], y[300:304]))
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.state_dict()))
    second = make(sw.guard(window="12up"))
    for part, state in zip((second.model, second.optimizer, second), saved, strict=True):
        part.load_state_dict(state)
    second.accumulate((x[304:312], y[304:312]))
    second.apply()
    run(second, x[312:], y[312:], 12)
    run_in_parts = make(sw.guard(window="12up"))
    run(run_in_parts, x[:300], y[:300], 12)
    run_in_parts.accumulate((x[300:304], y[300:304]))
    run_in_parts.accumulate((x[304:312], y[304:312]))
    run_in_parts.apply()
    run(run_in_parts, x[312:], y[312:], 12)
    assert torch.equal(weights(second), weights(run_in_parts))
    assert second.state_dict()["transforms"] == run_in_parts.state_dict()["transforms"]
    assert torch.allclose(weights(second), weights(straight), rtol=1e-9)


def test_an_open_window_keeps_its_dropped_samples():
    x, y = data(12)
    x[2] = NAN
    step, other = make(sw.guard()), make(sw.guard())
    step.accumulate((x[:1], y[:1]))
    step.accumulate((x[1:6], y[1:6]))
    state = step.state_dict()
    other.load_state_dict(state)
    for each in (step, other):
        each.accumulate((x[6:], y[6:]))
    update, restored = step.apply(), other.apply()
    assert restored.dropped.tolist() == update.dropped.tolist() == [k == 2 for k in range(12)]
    assert restored.loss == update.loss
    assert torch.equal(weights(step), weights(other))


def test_a_state_without_transforms_starts_a_new_guard():
    step = make(sw.guard())
    x, y = data(120)
    run(step, x, y, 40)
    assert step.transforms.states[0].bound < inf
    step.load_state_dict({name: value for name, value in step.state_dict().items() if name != "transforms"})
    assert step.transforms.states[0].bound == inf


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))])
def test_copies_have_a_state_of_their_own(copied):
    guard = sw.guard()
    guard.state.commit(torch.rand(500))
    other = copied(guard)
    assert other.state.state_dict() == guard.state.state_dict()
    other.state.commit(torch.rand(500) * 1e6)
    assert other.state.bound > guard.state.bound
    assert guard(stats([2.0])) < 1
    assert other(stats([2.0])) == 1


def test_sw_backward_commits_each_pass():
    x, y = data(240)
    y[200] = 1e7
    model, step = net(), make(sw.guard(clip=0.8))
    guard = sw.guard(clip=0.8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for k in range(0, 240, 20):
        optimizer.zero_grad()
        result = sw.backward(squares(model, (x[k : k + 20], y[k : k + 20])), model, transforms=guard, denominator=20)
        optimizer.step()
        (update,) = step((x[k : k + 20], y[k : k + 20]))
        assert torch.allclose(result.weights, update.weights)
        if k == 200:  # here, the sample counts in the denominator, which belongs to the loss
            assert result.weights[0] == 0
            break
        assert torch.allclose(nn.utils.parameters_to_vector(model.parameters()), weights(step))
    assert guard.state.state_dict() == step.state_dict()["transforms"][0]


def test_sw_backward_raises_for_a_sample_that_is_not_finite():
    x, y = data(8)
    x[2] = NAN
    model, guard = net(), sw.guard()
    before = guard.state.state_dict()
    with pytest.raises((NonFiniteLossError, NonFiniteGradientError)):
        sw.backward(squares(model, (x, y)), model, transforms=guard, denominator=8)
    assert guard.state.state_dict() == before


def test_what_needs_constant_transforms_is_refused(tmp_path):
    step = make(sw.guard(), compile=True)
    x, y = data(64)
    with pytest.warns(sw.TrainingWarning, match="transforms have a state, which changes with every update"):
        run(step, x, y)
    assert step.compiled == "transforms have a state, which changes with every update"
    model = net().float()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), squares, samples=1, transforms=[sw.guard()])
    step((x[:1].float(), y[:1].float()))
    with pytest.raises(sw.ExportError, match=r"cannot be exported with transforms with a state, such as chain\(guard"):
        sw.export_update(step, tmp_path / "update.pte", example=(x[:1].float(), y[:1].float()))
    with pytest.raises(TransformError, match="compares a sample with those of earlier updates"):
        _ = sw.chain(sw.guard(), sw.clip(1.0)).sensitivity
    privacy = sw.Privacy(noise_multiplier=1.0, delta=1e-5, updates=3, sample_rate=0.1, clip=1.0)
    with pytest.raises(sw.PrivacyError, match="compares a sample with those of earlier updates"):
        make(sw.guard(), privacy=privacy)
    with pytest.raises(ValueError, match="divides by the counts of whole groups; found chain"):
        make(sw.guard(), aggregate=sw.per("group", key=1))


def test_the_formula():
    assert str(sw.chain(sw.guard(), sw.clip(1.0))).splitlines()[1] == (
        "c1 = min(1, quantile 0.99/‖g‖), 0 if ‖g‖ > 50·median, 0 if not finite"
    )
    assert repr(sw.guard(window=500)) == "guard(clip=0.99, drop=50.0, window='500up')"


@pytest.mark.parametrize(
    ("options", "progress"),
    [({}, 7), ({"clip": None}, 0), ({"drop": None}, 0), ({"clip": 0.5}, 0), ({"window": "200samples"}, 0)],
    ids=str,
)
def test_a_state_of_other_settings_has_the_same_norms_and_new_bounds(options, progress):
    saved = sw.guard(window="100up").state
    for k in range(7):
        saved.commit(torch.linspace(1, 2, 30) * 1.5**k)
    guard = sw.guard(**{"window": "100up", **options})
    guard.state.load_state_dict(saved.state_dict())
    assert guard.state.state_dict()["norms"] == saved.state_dict()["norms"]
    assert guard.state.state_dict()["progress"] == progress
    large = stats([1e6])
    assert guard(stats([1.0])) == 1
    assert guard(large) == (0 if options.get("drop", 50) else guard.state.bound / 1e6)
    assert (guard.state.bound == saved.bound) == (options.get("clip", 0.99) == 0.99)
    assert (guard.state.bound == inf) == ("clip" in options and options["clip"] is None)
