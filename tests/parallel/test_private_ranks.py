"""Private updates on two ranks: one Poisson draw, one noise, the parameters of one process, also for empty draws."""

import json
import math
from unittest import mock

import pytest
import torch
from spread_models import flat, loss_fn, net, wrapped
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.errors import PrivacyError
from samplewise.parallel import collectives
from samplewise.privacy.private_update import PrivateUpdate
from samplewise.privacy.rng import stream

pytest.importorskip("dp_accounting")

SAMPLES = 30
UPDATES = 12
PLANS = {
    "flat": {},
    "automatic": {"clip": sw.clip(0.5, mode="automatic")},
    "by parameter": {"clip": sw.clip(0.5, by="parameter")},
    "users": {"users": [i % 9 for i in range(SAMPLES)], "sample_rate": 0.3},
    "small": {"sample_rate": 0.04, "updates": 25},  # draws are empty on one rank, or on both
    "adaptive": {"adaptive": 0.5},
    "max_batch": {"max_batch": 3, "dataset_size": SAMPLES, "accountant": "pld"},
}


def dataset(bad=()):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64) * torch.linspace(0.2, 3, SAMPLES)[:, None]
    x[list(bad)] = math.nan
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=g))


def plan(**options):
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "updates": UPDATES, "sample_rate": 0.15, "clip": 0.5}
    return sw.Privacy(**{**settings, "accountant": "rdp", "seed": 3, **options})


def make(kind="flat", how="plain", bad=(), microbatch=2, precision=None, **options):
    privacy = plan(**PLANS[kind], **options)
    loader = privacy.loader(dataset(bad))
    model, parallel = wrapped(net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    settings = {"parallel": parallel, "microbatch": microbatch, "precision": precision}
    step = sw.Step(model, optimizer, loss_fn, privacy=privacy, **settings)
    return getattr(model, "module", model), loader, step


def run(kind="flat", how="plain", bad=(), **options):
    """Parameters, spending, bound and the number of zeroed samples after all updates."""
    model, loader, step = make(kind, how, bad, **options)
    while step.privacy.left:
        for _ in step.over(loader):
            pass
    (zeroed,) = collectives.all_reduce_scalars(step.privacy.zeroed)
    return flat(model), step.privacy.spent(), step.config.policy.sensitivity, zeroed


def assert_same(found, expected):
    for one in found:
        assert (one[0] - expected[0]).abs().max() <= 1e-12
        assert one[1] == expected[1]
        assert one[2] == pytest.approx(expected[2], rel=1e-12)
        assert one[3] == expected[3]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("how", ["plain", "ddp", "sharded"])
@pytest.mark.parametrize("kind", ["flat", "small"])
def test_two_ranks_make_the_updates_of_one_process(two, kind, how):
    assert_same(two.run(run, kind, how), run(kind))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "sharded"])
@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind not in ("flat", "small")])
def test_all_plans(two, kind, how):
    assert_same(two.run(run, kind, how), run(kind))


def refused_precision():
    with pytest.raises(PrivacyError, match=r"must have the precision of float32.*found precision='bf16-mixed'"):
        make(how="sharded", precision="bf16-mixed")
    return run("flat", "ddp", precision="bf16-mixed")


def test_sharded_sums_in_half_precision_are_refused(two):
    found = two.run(refused_precision)
    assert (found[0][0] - run(precision="bf16-mixed")[0]).abs().max() <= 1e-2


@pytest.mark.parametrize("kind", ["users"])
def test_users_stay_on_one_rank(two, kind):
    assert_same(two.run(run, kind, "ddp"), run(kind))


def test_draws_are_empty_on_one_rank_and_on_both():
    privacy = plan(**PLANS["small"])
    sampler = privacy.loader(dataset()).batch_sampler
    sizes = [len(sampler.draw_units(t, 0)) for t in range(privacy.updates)]
    assert {0, 1} <= set(sizes) and max(sizes) > 1


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("how", ["plain", "ddp"])
@pytest.mark.parametrize("bad", [(4,), (4, 5, 6, 7), tuple(range(SAMPLES))], ids=len)
def test_samples_that_are_not_finite(two, bad, how):
    """Also with gradients that are summed during the last backward pass."""
    expected = run(bad=bad)
    assert expected[3] > 0
    assert_same(two.run(run, "flat", how, bad), expected)


def fail_with_a_bad_sample(how, kind):
    make_all = run(kind, how, (4, 5, 6, 7, 8, 9))
    return make_all[3]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("sharded", "flat"), ("ddp", "users")])
def test_collective_passes_stop_at_samples_that_are_not_finite(two, how, kind):
    """A rank cannot repeat a pass alone: the training stops, and no rank waits."""
    for error in two.errors(fail_with_a_bad_sample, how, kind):
        assert "NonFinite" in error or "finite" in error


# -------------------------------------------------------------------------------------------------- noise and key


def noise_of_one_update(how, mutated=False):
    """Sum of an update of an empty draw: only noise. `mutated`: noise that each rank divides by the number of ranks."""
    exact = PrivateUpdate._noise_std

    def wrong(self):
        return exact(self) / collectives.size()

    with mock.patch.object(PrivateUpdate, "_noise_std", wrong if mutated else exact):
        model, parallel = wrapped(net(), how)
        privacy = plan(sample_rate=1e-9, divide_by=1.0)
        loader = privacy.loader(dataset())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = flat(getattr(model, "module", model))
        if how == "plain":
            before = flat(net())
        step = sw.Step(model, optimizer, loss_fn, privacy=privacy, parallel=parallel)
        next(iter(step.over(loader)))
        return before - flat(getattr(model, "module", model)), privacy._state.secret.bytes


def check_noise(found):
    secret = plan()._state.secret
    expected = stream(secret, "noise", 0, 0)
    noise = torch.cat([expected.normal(p.shape, torch.float64).flatten() for p in net().parameters()]) * 0.5
    for one, _ in found:
        assert (one - noise).abs().max() <= 1e-12


@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_one_noise_per_update(two, how):
    check_noise(two.run(noise_of_one_update, how))


@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_noise_divided_by_the_number_of_ranks_is_found(two, how):
    """Mutant: see tests/privacy/test_mutants.py."""
    with pytest.raises(AssertionError):
        check_noise(two.run(noise_of_one_update, how, True))


def keys(directory):
    """Public id of the key on each rank, with OS entropy; parameters and spending."""
    model, loader, step = make(seed=None)
    before = step.privacy.plan._state.secret.public_id
    sw.Trainer(step, directory, progress=False).fit(loader)
    return before, step.privacy.plan._state.secret.public_id, flat(model), step.privacy.spent()


def test_all_ranks_use_the_key_of_rank_0(two, tmp_path):
    first, second = two.run(keys, tmp_path / "run")
    assert first[:2] == second[:2] and first[0] == first[1]
    assert torch.equal(first[2], second[2]) and first[3] == second[3]
    assert first[3].updates == UPDATES
    lines = [json.loads(line) for line in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines[1:]] == list(range(UPDATES))  # written once
    assert not (tmp_path / "run" / "privacy.key").exists()


class Interrupt:
    def on_update(self, update):
        if update.index == 6:
            raise RuntimeError("interrupted")


def interrupted_and_resumed(directory):
    _, loader, step = make(seed=None)
    callbacks = [sw.callbacks.ModelCheckpoint(every="4up"), Interrupt()]
    with pytest.raises(RuntimeError, match="interrupted"):
        sw.Trainer(step, directory, callbacks, progress=False).fit(loader)
    made = step.privacy.spent().updates
    key = step.privacy.plan._state.secret.public_id
    model, loader, step = make(seed=None)
    sw.Trainer(step, directory, progress=False).fit(loader, resume=True)
    assert step.privacy.plan._state.secret.public_id == key
    return made, step.privacy.spent().updates, flat(model)


def test_resumed_ranks(two, tmp_path):
    first, second = two.run(interrupted_and_resumed, tmp_path / "run")
    assert first[:2] == second[:2] == (7, UPDATES)
    assert torch.equal(first[2], second[2])


# ------------------------------------------------------------------------------------------ rows, terms and directories

TOKENS = 6
ROW = 14  # the sample that cancels


def sum_of(how, left_out=None):
    """Sum without noise of samples of tokens, of which one has huge tokens of opposite sign; and the sensitivity."""
    x = torch.randn(1, TOKENS, 5, generator=torch.Generator().manual_seed(0)).repeat(SAMPLES, 1, 1)
    x[ROW, 1::2] = -1e12 * x[ROW, 0::2]
    x[ROW, 0::2] *= 1e12
    rows = [k for k in range(SAMPLES) if k != left_out]
    privacy = plan(sample_rate=1.0, updates=1, divide_by=1.0)
    loader = privacy.loader(TensorDataset(x[rows]))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 64), torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(64, 2)]
    model, parallel = wrapped(torch.nn.Sequential(*layers), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def losses(model, batch):
        return model(batch[0].flatten(0, 1)).unflatten(0, (-1, TOKENS)).sum((1, 2))  # FSDP2 warns about views

    step = sw.Step(model, optimizer, losses, privacy=privacy, parallel=parallel, microbatch=None)
    step.config.policy._noise_std = lambda: 0.0
    before = flat(getattr(model, "module", model)).clone()
    next(iter(step.over(loader)))
    return before - flat(getattr(model, "module", model)), step.config.policy.sensitivity


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("how", ["plain", "ddp", "sharded"])
def test_a_sample_that_cancels(two, how):
    """Added alone; with sharded parameters, where a rank cannot repeat a pass, it contributes nothing."""
    whole, without = two.run(sum_of, how), two.run(sum_of, how, ROW)
    for (total, bound), (rest, _) in zip(whole, without, strict=True):
        assert total.norm() > (SAMPLES - 2) * 0.9 * bound
        assert (total - rest).norm() <= bound * 1.01


def of_one_rank(samples):
    columns = torch.utils.data.default_collate(samples)
    return [column.repeat_interleave(3, 0) for column in columns] if collectives.rank() else columns


def rows_of_one_rank():
    privacy = plan(sample_rate=1.0)
    loader = privacy.loader(dataset(), collate_fn=of_one_rank)
    model, parallel = wrapped(net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = sw.Step(model, optimizer, loss_fn, privacy=privacy, parallel=parallel)
    next(iter(step.over(loader)))


def test_rows_of_one_rank(two):
    for error in two.errors(rows_of_one_rank):
        assert "one row per sample of its draw" in error and "45 rows for 15 samples" in error


def second_directory(directory):
    _, loader, step = make(seed=None)
    step.privacy.open(directory / "a")
    for _ in zip(step.over(loader), range(2), strict=False):
        pass
    step.privacy.close()
    step.privacy.open(directory / "b")


def test_a_second_directory(two, tmp_path):
    for error in two.errors(second_directory, tmp_path):
        assert "must be recorded in one directory" in error
