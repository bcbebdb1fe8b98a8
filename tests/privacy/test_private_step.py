"""Updates of a private step equal (Σ clip(g) + z) / (rate × N) by hand, whatever the microbatch, batch or interruption.

Masks and noise are computed from the key by hand, so these tests also fail if the sampler shuffles, or if noise is too
small or reused: see test_mutants.py.
"""

import pytest
import torch
import torch.nn.functional as F
from private_runs import (
    CLIP,
    RATE,
    SAMPLES,
    UPDATES,
    assert_same,
    by_hand,
    data,
    gradient,
    loss_fn,
    make,
    mask,
    net,
    of_samples,
    plan,
    train,
)
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import samplewise as sw
from samplewise.errors import PrivacyError

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

OPTIONS = {
    "flat": {},
    "automatic": {"mode": "automatic"},
    "by parameter": {"by": "parameter"},
    "secure": {"secure": True},
    "divide_by": {"divide_by": 17.0},
    "max_batch": {"max_batch": 4, "dataset_size": SAMPLES, "accountant": "pld"},
}


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("microbatch", [None, 1, 3, 7])
def test_update_identity(kind, microbatch):
    privacy = plan(**OPTIONS[kind])
    model, loader, step = make(privacy, microbatch=microbatch)
    assert train(step, loader) == UPDATES
    assert_same(model, by_hand(privacy))
    assert step.privacy.left == 0 and step.privacy.spent().epsilon == pytest.approx(privacy.epsilon)
    assert step.privacy.spent()._repr_html_().endswith("<td>0</td></tr></tbody></table>")
    assert step.counters.updates == UPDATES


def test_another_gamma_of_an_automatic_clip(monkeypatch):
    monkeypatch.setattr("private_runs.GAMMA", 0.3)
    privacy = plan(sw.clip(CLIP, mode="automatic", gamma=0.3))
    model, loader, step = make(privacy)
    train(step, loader)
    assert_same(model, by_hand(privacy))


def test_users_may_be_a_tensor():
    privacy = plan(users=torch.tensor(USERS), sample_rate=0.4)
    model, loader, step = make(privacy)
    train(step, loader)
    assert_same(model, by_hand(privacy, of_users(), units=len(set(USERS))))


@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_weight_before_the_clip(microbatch):
    def soft(losses):
        return torch.exp(-losses)

    privacy = plan()
    model, loader, step = make(privacy, microbatch=microbatch, transforms=[soft])
    train(step, loader)
    assert_same(model, by_hand(privacy, of_samples(weight=lambda loss, i: torch.exp(-loss))))


def test_a_weight_of_each_sample_of_the_data_set():
    x, y = data()
    weights = torch.linspace(0, 2, SAMPLES, dtype=torch.float64)
    privacy = plan()
    dataset = TensorDataset(x, y, torch.arange(SAMPLES))
    model, loader, step = make(privacy, dataset=dataset, transforms=[sw.weight(weights, index=2)], microbatch=3)
    train(step, loader)
    assert_same(model, by_hand(privacy, of_samples(weight=lambda loss, i: weights[i])))


USERS = [i * i % 11 for i in range(SAMPLES)]  # 0, 1, 4, 9, 5, 3, 3, ...: users are numbered as they first appear


def of_users(parts=None, finite=lambda i: True):
    first = list(dict.fromkeys(USERS))

    def gradients(model, units):
        x, y = parts or data()
        for unit in units:
            own = [i for i in range(SAMPLES) if USERS[i] == first[unit] and finite(i)]
            if own:
                yield gradient(model, loss_fn(model, (x[own], y[own])).sum())

    return gradients


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("options", [{}, {"mode": "automatic"}, {"by": "parameter"}], ids=str)
def test_users(options, microbatch):
    privacy = plan(users=USERS, sample_rate=0.4, **options)
    model, loader, step = make(privacy, microbatch=microbatch)
    train(step, loader)
    assert_same(model, by_hand(privacy, of_users(), units=len(set(USERS))))


class Views(Dataset):
    """Views that depend on their number only."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = data()
        return x[index] * (1 + 0.2 * index.view), y[index]


@pytest.mark.parametrize("microbatch", [None, 2])
def test_gradients_of_augmentations_are_averaged_before_the_clip(microbatch):
    def averaged(model, units):
        x, y = data()
        for i in units:
            views = torch.stack([x[i] * (1 + 0.2 * view) for view in range(3)])
            yield gradient(model, loss_fn(model, (views, y[i].expand(3))).mean())

    privacy = plan(augmentations=3)
    model, loader, step = make(privacy, dataset=Views(), microbatch=microbatch)
    train(step, loader)
    assert_same(model, by_hand(privacy, averaged))


def test_empty_draws_are_updates_of_noise():
    privacy = plan(sample_rate=0.02, updates=20, seed=1)
    sizes = [len(mask(privacy, t)) for t in range(20)]
    assert sizes.count(0) > 3 and sizes[0] == 0  # the first update is one of them
    model, loader, step = make(privacy)
    assert train(step, loader) == 20
    assert_same(model, by_hand(privacy))
    assert step.privacy.spent().updates == 20


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 3).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("options", [{}, {"by": "parameter"}], ids=str)
def test_parameters_without_gradient_get_noise(options):
    model = WithUnused()
    privacy = plan(**options)
    expected = by_hand(privacy, model=model)
    before = model.unused.weight.detach().clone()
    model, loader, step = make(privacy, model=model)
    train(step, loader)
    assert_same(model, expected)
    assert (model.unused.weight != before).all()


def test_frozen_parameters_get_no_noise():
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    _, loader, step = make(model=model)
    train(step, loader, 2)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("options", [{}, {"by": "parameter"}], ids=str)
def test_parameters_that_are_unfrozen_later_count_for_the_sensitivity(options):
    model = net()
    model[0].requires_grad_(False)
    _, loader, step = make(plan(**options), model=model)
    train(step, loader, 1)
    model[0].requires_grad_(True)
    train(step, loader, 1)
    assert step.config.policy.sensitivity == pytest.approx(0.5 * (2 if options else 1))


class Dicts(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x, y = data()
        return {"x": x[i], "label": y[i]}


def test_dict_batches_criteria_and_workers():
    privacy = plan()
    losses = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")  # noqa: E731
    model, loader, step = make(privacy, dataset=Dicts(), losses=losses, loader={"num_workers": 2}, microbatch=3)
    train(step, loader)
    assert_same(model, by_hand(privacy))

    privacy = plan()
    model, loader, step = make(privacy, losses=nn.CrossEntropyLoss())
    train(step, loader)
    assert_same(model, by_hand(privacy))


def test_loop_by_hand():
    privacy = plan()
    model, loader, step = make(privacy)
    made = 0
    for _ in range(2):
        for batch in loader:
            (update,) = step(batch)
            assert update.index == made
            made += 1
    assert made == UPDATES
    assert_same(model, by_hand(privacy))


# ------------------------------------------------------------------------------------------------------ non-finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308], ids=str)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_samples_that_are_not_finite_contribute_nothing(bad, microbatch):
    x, y = data()
    privacy = plan(sample_rate=0.3)
    drawn = [mask(privacy, t) for t in range(UPDATES)]
    bad_samples = {drawn[0][0], drawn[0][-1], drawn[2][1]}
    for i in bad_samples:
        x[i] = bad

    def finite(model, units):
        for found in of_samples(parts=(x, y))(model, units):
            if all(g.norm().isfinite() for g in found):
                yield found

    model, loader, step = make(privacy, dataset=TensorDataset(x, y), microbatch=microbatch)
    train(step, loader)
    assert_same(model, by_hand(privacy, finite))
    if bad != 1e308:  # of which some gradients are finite
        assert step.privacy.zeroed == sum(i in bad_samples for units in drawn for i in units)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("unit", ["sample", "user"])
def test_a_batch_that_is_changed_in_place_is_restored_before_it_is_repeated(unit, microbatch):
    x, y = data()
    x[::3] = float("nan")
    calls = []

    def in_place(model, batch):
        calls.append(len(batch[0]))
        return F.cross_entropy(model(batch[0].mul_(2)), batch[1] + 0 * len(calls), reduction="none")

    whole = (2 * x, y)
    if unit == "user":
        privacy = plan(users=USERS, sample_rate=0.5)
        expected = by_hand(privacy, of_users(whole, lambda i: i % 3), units=len(set(USERS)))
    else:
        privacy = plan(sample_rate=0.3)
        expected = by_hand(privacy, lambda model, units: of_samples(parts=whole)(model, [i for i in units if i % 3]))
    model, loader, step = make(privacy, losses=in_place, dataset=TensorDataset(x, y), microbatch=microbatch)
    train(step, loader)
    assert_same(model, expected)
    assert step.privacy.zeroed > 0


@pytest.mark.parametrize("microbatch", [None, 3])
def test_users_with_samples_that_are_not_finite(microbatch):
    x, y = data()
    x[4] = float("nan")
    privacy = plan(users=USERS, sample_rate=0.5)
    model, loader, step = make(privacy, dataset=TensorDataset(x, y), microbatch=microbatch)
    train(step, loader)
    assert_same(model, by_hand(privacy, of_users((x, y), lambda i: i != 4), units=len(set(USERS))))
    assert step.privacy.zeroed > 0


@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_user_whose_finite_gradients_overflow_in_the_sum(microbatch):
    """Each gradient is finite; their sum is not."""
    privacy = plan(users=[0] * 20 + [1] * 20, sample_rate=1.0, updates=2)

    def huge(model, batch):
        return (1 + 1e307 * (batch[1] < 20).double()) * model(batch[0])[:, 0]

    x = torch.ones(SAMPLES, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    model, loader, step = make(
        privacy, model=model, losses=huge, dataset=TensorDataset(x, torch.arange(SAMPLES)), microbatch=microbatch
    )
    assert train(step, loader) == 2
    assert model.weight.isfinite().all()


def test_draws_without_a_finite_sample():
    x, y = data()
    x[:] = float("nan")
    privacy = plan()
    model, loader, step = make(privacy, dataset=TensorDataset(x, y))
    train(step, loader)
    assert_same(model, by_hand(privacy, lambda model, units: []))


def test_all_weights_may_be_zero():
    """An error would tell that no sample of the first draw has a weight."""
    privacy = plan()
    model, loader, step = make(privacy, transforms=[lambda losses: losses * 0])
    train(step, loader)
    assert_same(model, by_hand(privacy, lambda model, units: []))


# -------------------------------------------------------------------------------------------------------- adaptive


def test_an_adaptive_bound_approaches_the_quantile():
    privacy = plan(adaptive=0.5, clip=20.0, sample_rate=0.9, updates=60)
    model, loader, step = make(privacy, lr=1e-4)
    assert step.config.policy._gradient_noise_multiplier() > privacy.noise_multiplier
    train(step, loader)
    norms = sw.gradients(loss_fn(model, data()), model).norms()
    low, high = norms.quantile(0.25), norms.quantile(0.75)
    assert low < step.config.policy.sensitivity < high
    assert step.config.policy._noise_std() == pytest.approx(
        step.config.policy._gradient_noise_multiplier() * step.config.policy.sensitivity
    )
    pays = 1 / step.config.policy._gradient_noise_multiplier() ** 2 + 1 / (2 * step.config.policy._count_noise()) ** 2
    assert pays == pytest.approx(1 / privacy.noise_multiplier**2)


# --------------------------------------------------------------------------------------------------- leaving early


def test_break_and_another_pass():
    privacy = plan(updates=14)
    model, loader, step = make(privacy, microbatch=2, loader={"num_workers": 1})
    indices = []
    for stop in (2, 3, 1, 20, 20):
        for count, update in enumerate(step.over(loader), 1):
            indices.append(update.index)
            if count == stop:
                break
    assert indices == list(range(14))
    assert_same(model, by_hand(privacy))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_errors_leave_no_contribution(error, at):
    """The draw of an update that failed is drawn again; nothing of it was released."""
    calls = []

    def failing(model, batch):
        calls.append(len(batch[1]))
        if model.training and len(calls) in (at + 6, at + 11):
            raise error("interrupted")
        return loss_fn(model, batch)

    privacy = plan()
    model, loader, step = make(privacy, losses=failing, microbatch=2)
    failed = 0
    while step.privacy.left:
        try:
            train(step, loader)
        except error:
            failed += 1
            assert all(p.grad is None for p in model.parameters())
    assert failed
    assert_same(model, by_hand(privacy))
    assert step.privacy.spent().updates == UPDATES


def test_an_abandoned_generator_leaves_no_contribution():
    privacy = plan()
    model, loader, step = make(privacy, microbatch=2)
    first = iter(step.over(loader))
    next(first)
    second = iter(step.over(loader))
    next(second)
    with pytest.raises(PrivacyError, match=r"must use the next draw, number 2; found draw 1"):
        next(first)
    train(step, loader)
    assert_same(model, by_hand(privacy))


def test_gradients_of_the_user_are_not_part_of_the_update():
    privacy = plan()
    model, loader, step = make(privacy)
    for _ in step.over(loader):
        loss_fn(model, data()).sum().backward()
    train(step, loader)
    assert_same(model, by_hand(privacy))


def test_two_steps_with_one_plan_share_its_updates():
    privacy = plan()
    _, loader, first = make(privacy)
    train(first, loader, 3)
    state = first.state_dict()
    train(first, loader, 2)
    _, _, second = make(privacy)
    assert second.privacy.spent().updates == 5
    assert second.privacy.left == UPDATES - 5
    second.load_state_dict(state)
    with pytest.raises(PrivacyError, match="update 3 must be repeated exactly, because its noise was used before"):
        train(second, loader)


def test_sizes_of_draws():
    """Draws have different sizes; the divisor is the same for all of them."""
    privacy = plan()
    sizes = {len(mask(privacy, t)) for t in range(UPDATES)}
    assert len(sizes) > 2
    _, _, step = make(privacy)
    assert step.transforms.divisor.value == pytest.approx(RATE * SAMPLES)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("options", [{}, {"observe": True}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"microbatch": 2}], ids=str)
def test_run_returns_totals_without_hidden_values(options, settings):
    privacy = plan(**options)
    model, loader, step = make(privacy, **settings)
    totals = step.run(loader)
    assert totals.updates == step.privacy.spent().updates == 7 and totals.skipped == 0 and totals.seconds > 0
    if options:
        assert totals.samples > 0 and totals.loss > 0 and "loss" in repr(totals)
    else:
        assert repr(totals).startswith("Totals(updates=7, samples=hidden, loss=hidden, ")
        for name in ("samples", "loss"):
            with pytest.raises(
                PrivacyError, match=f"totals.{name} must not be read with privacy=, because the guarantee"
            ):
                getattr(totals, name)
    assert_same(model, by_hand(privacy, updates=7))
    assert step.run(loader).updates == 1  # the last one that is paid for
