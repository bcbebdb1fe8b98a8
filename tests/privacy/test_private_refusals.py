"""Everything that would void the guarantee is refused, with a sentence; values outside of it are hidden."""

import itertools
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F
from private_runs import SAMPLES, UPDATES, data, loss_fn, make, net, plan, train
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samplewise as sw
from samplewise.errors import LossesError, PrivacyError, SamplesInteractError, TransformError

pytest.importorskip("dp_accounting")


def dataset(samples=SAMPLES):
    return TensorDataset(*data(samples))


# ------------------------------------------------------------------------------------------------- 2. the sampler

MUST_COME = "batches of a private step must come from privacy.loader"


def test_foreign_loaders():
    _, _, step = make()
    with pytest.raises(PrivacyError, match=rf"{MUST_COME}.*; found list"):
        list(step.over(DataLoader(dataset(), batch_size=6)))
    with pytest.raises(PrivacyError, match=rf"{MUST_COME}.*; found tuple"):
        step(data())
    assert step.privacy.spent().updates == 0


def test_a_foreign_loader_in_fit():
    _, _, step = make()
    with pytest.raises(PrivacyError, match=rf"{MUST_COME}.*; found list. Pass that loader"):
        sw.Trainer(step, progress=False).fit(DataLoader(dataset(), batch_size=6), updates=2)


def test_batches_of_another_privacy():
    _, _, step = make()
    other = plan(seed=4).loader(dataset())
    with pytest.raises(PrivacyError, match=rf"{MUST_COME}.*; found one of another Privacy"):
        list(step.over(other))
    with pytest.raises(PrivacyError, match=rf"{MUST_COME}.*; found one of another Privacy"):
        sw.Trainer(step, progress=False).fit(other)


def test_repeated_and_skipped_draws():
    _, loader, step = make()
    first, second, third = (batch for batch, _ in zip(loader, range(3), strict=False))
    step(first)
    with pytest.raises(PrivacyError, match=r"must use the next draw, number 1; found draw 0. Iterate over the loader"):
        step(first)
    with pytest.raises(PrivacyError, match=r"must use the next draw, number 1; found draw 2"):
        step(third)
    step(second)
    step(third)
    assert step.privacy.spent().updates == 3


def test_repeated_loaders():
    _, loader, step = make()
    batches = list(loader)[:2]
    with pytest.raises(PrivacyError, match=r"must use the next draw, number 2; found draw 0"):
        list(step.over(batches * 2))


class Lines(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_data_sets_that_are_not_map_style():
    with pytest.raises(TypeError, match="needs a map-style dataset"):
        plan().loader(Lines())


@pytest.mark.parametrize("argument", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_arguments_that_determine_batches(argument):
    with pytest.raises(TypeError, match=rf"must be Poisson draws; found the argument {argument}"):
        plan().loader(dataset(), **{argument: 1})


def test_a_step_without_a_loader():
    model = net()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, privacy=plan())
    other = plan().loader(dataset())  # of the same seed, hence with the same key
    with pytest.raises(PrivacyError, match=r"divided by sample_rate × number of samples; found no number"):
        list(step.over(other))


# ------------------------------------------------------------------------------------------------ 4. settings

DEFAULT = "must have its default with privacy="
SETTINGS = {
    "samples": ({"samples": 8}, rf"samples {DEFAULT}, because an update is one draw .*; found 8"),
    "tail": ({"tail": "drop"}, rf"tail {DEFAULT}, because an update is one draw .*; found 'drop'"),
    "interacting": ({"interacting": "allow"}, rf"interacting {DEFAULT}.*must not depend on others; found 'allow'"),
    "raise": ({"on_nonfinite": "raise"}, rf"on_nonfinite {DEFAULT}.*contributes nothing; found 'raise'"),
    "skip": ({"on_nonfinite": "skip"}, rf"on_nonfinite {DEFAULT}.*contributes nothing; found 'skip'"),
    "ignore": ({"on_nonfinite": "ignore"}, rf"on_nonfinite {DEFAULT}.*contributes nothing; found 'ignore'"),
    "loss scaling": ({"precision": "16-mixed"}, "precision must not scale the loss with privacy=.*Use 'bf16-mixed'"),
    "recheck": ({"recheck": False}, "recheck must not be False with privacy="),
    "record": ({"record": "norms"}, "record must be empty with privacy=.*; found norms"),
    "drop": ({"transforms": [sw.drop(quantile=0.9)]}, "weight of a sample depends on this sample alone; found drop"),
    "mean": ({"transforms": [sw.normalize("mean")]}, r"depends on this sample alone; found normalize\('mean'\)"),
    "renormalize": (
        {"transforms": [sw.weight(lambda losses: losses, renormalize=True)]},
        "depends on this sample alone; found weight.*divides by the weights of all samples",
    ),
    "window": (
        {"transforms": [sw.weight(lambda losses: losses, window=True)]},
        "depends on this sample alone; found weight.*compares a sample with the others of its window",
    ),
    "align": ({"transforms": [sw.align(dict)]}, "found align.*a reference, which may depend on private samples"),
    "position": (
        {"transforms": [sw.weight(torch.ones(SAMPLES))]},
        "found weight.*depends on the positions of samples in the window",
    ),
    "noise": ({"transforms": [sw.noise(1.0)]}, r"must act on single samples with privacy=; found noise\(1.0\)"),
    "group": ({"transforms": [sw.group(1)]}, r"must act on single samples with privacy=; found group\(1\)"),
}


@pytest.mark.parametrize(("options", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings(options, message):
    with pytest.raises(PrivacyError, match=message):
        make(**options)


def test_privacy_must_be_a_privacy():
    with pytest.raises(TypeError, match=r"privacy must be a sw.Privacy; found float"):
        sw.Step(net(), torch.optim.SGD, loss_fn, privacy=3.0)


CLIPS = r"clip must be a number, or sw.clip\(...\) with no settings but mode=, by= and gamma="
WHOLE = r"must be used without users=, and with a clip of the whole norm such as sw.clip\(1.0\)"
PLANS = {
    "both": ({"epsilon": 3.0}, "exactly one of epsilon and noise_multiplier must be given; found both"),
    "neither": ({"noise_multiplier": None}, "exactly one of epsilon and noise_multiplier must be given; found none"),
    "both rates": ({"batch_size": 4}, "exactly one of sample_rate and batch_size must be given; found both"),
    "no rate": ({"sample_rate": None}, "exactly one of sample_rate and batch_size must be given; found none"),
    "both durations": ({"epochs": 4}, "exactly one of updates and epochs must be given; found both"),
    "no duration": ({"updates": None}, "exactly one of updates and epochs must be given; found none"),
    "epochs": ({"updates": None, "epochs": 0}, "epochs must be a positive number; found 0"),
    "rate": ({"sample_rate": 1.5}, r"sample_rate must be a number in \(0, 1\]; found 1.5"),
    "batch size": (
        {"sample_rate": None, "batch_size": 4},
        "dataset_size must be a positive integer with batch_size; f",
    ),
    "large batch": (
        {"sample_rate": None, "batch_size": 41, "dataset_size": 40},
        "batch_size must be a positive number, at most dataset_size=40; found 41",
    ),
    "clip": ({"clip": 0}, "clip must be a finite, positive number; found 0"),
    "infinite clip": ({"clip": float("inf")}, "clip must be a finite, positive number; found inf"),
    "noise": ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite, positive number; found 0.0"),
    "divisor": ({"divide_by": -1.0}, "divide_by must be a finite, positive number; found -1.0"),
    "clip of counts": ({"clip": sw.clip(0.5, per_count=True)}, f"{CLIPS}; found clip\\(0.5, per_count=True\\)"),
    "another transform": ({"clip": sw.normalize()}, f"{CLIPS}; found normalize\\(\\)"),
    "chain": ({"clip": sw.chain(sw.clip(0.5))}, f"{CLIPS}; found chain\\(clip\\(0.5\\)\\)"),
    "clip to zero": ({"clip": sw.clip(0.0)}, "max_norm of clip must be a finite, positive number; found 0.0"),
    "number of users": ({"users": 7}, "users must be a list or tensor with the user of each sample .*; found int"),
    "set of users": ({"users": set(range(40))}, "users must be a list or tensor .*; found set"),
    "augmentations": ({"augmentations": 0}, "augmentations must be a positive integer; found 0"),
    "of users": ({"augmentations": 2, "users": [1]}, "augmentations must be 1 with users="),
    "seed": ({"seed": "a"}, "seed must be None or an integer; found 'a'"),
    "adaptive": ({"adaptive": 1.5}, "adaptive must be a share between 0 and 1"),
    "adaptive by": ({"adaptive": 0.5, "by": "parameter"}, f"{WHOLE}; found clip\\(0.5, by='parameter'\\)"),
    "adaptive mode": ({"adaptive": 0.5, "mode": "automatic"}, f"{WHOLE}; found clip\\(0.5, mode='automatic'"),
    "adaptive users": ({"adaptive": 0.5, "users": [1]}, f"{WHOLE}; found users="),
}


@pytest.mark.parametrize(("options", "message"), PLANS.values(), ids=PLANS)
def test_plans(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_a_plan_by_batch_size_and_epochs():
    expected = plan(sample_rate=0.15, updates=8, dataset_size=40)
    found = plan(sample_rate=None, updates=None, batch_size=6, epochs=1.2, dataset_size=40)
    assert repr(found) == repr(expected)
    assert (found.sample_rate, found.updates) == (0.15, 8)
    assert found._settings == expected._settings
    assert plan(sample_rate=0.15, updates=None, epochs=0.01).updates == 1


@pytest.mark.parametrize("options", [{}, {"users": [k // 2 for k in range(SAMPLES)]}], ids=["samples", "users"])
def test_a_delta_that_is_too_large(options):
    units, noun = (20, "users") if options else (40, "samples")
    message = rf"delta should be below 1 / number of {noun}, .*; found 0\.05 for at least 20 {noun}\. Use a tenth of"
    with pytest.warns(sw.TrainingWarning, match=message):
        plan(delta=0.05, dataset_size=units, **options)
    privacy = plan(delta=0.05, **options)
    with pytest.warns(sw.TrainingWarning, match=message):
        privacy.loader(dataset())
    privacy.loader(dataset())  # warns once
    plan(delta=0.02, **options).loader(dataset())


def test_transforms_with_an_adaptive_bound():
    with pytest.raises(PrivacyError, match="an adaptive bound must have no other transforms"):
        make(plan(adaptive=0.5), transforms=[lambda losses: losses])


def test_transforms_that_read_the_batch_of_users():
    with pytest.raises(PrivacyError, match="must not read the batch with users="):
        make(plan(users=range(SAMPLES)), transforms=[sw.weight(1)])


def test_data_sets_of_other_sizes():
    with pytest.raises(
        ValueError, match="must have dataset_size=30 samples, the number given to the accountant; found 40"
    ):
        plan(dataset_size=30).loader(dataset())
    privacy = plan()
    privacy.loader(dataset())
    with pytest.raises(ValueError, match="must have the same dataset; found 39 samples after 40"):
        privacy.loader(dataset(39))


def test_accumulate_and_new_transforms():
    _, loader, step = make()
    with pytest.raises(PrivacyError, match="a private update is one draw; found a call of accumulate"):
        step.accumulate(next(iter(loader)))
    with pytest.raises(PrivacyError, match="the transforms of a private step must stay as they are"):
        step.transforms = []
    for name in ("samples", "tail", "max_grad_norm"):
        before = getattr(step.config, name)
        if name != "max_grad_norm":
            with pytest.raises(PrivacyError, match=rf"{name} {DEFAULT}"):
                setattr(step, name, {"samples": 4, "tail": "carry"}[name])
        assert getattr(step.config, name) == before


# ------------------------------------------------------------------------------------------ 4. models and losses


def counted(count):
    def losses(model, batch):
        found = loss_fn(model, batch)
        return found, torch.full_like(found, count)

    return losses


def test_counts():
    _, loader, step = make(losses=counted(2.0))
    with pytest.raises(LossesError, match="divides by a public constant; found counts of single samples above 1"):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    _, loader, step = make(losses=counted(1.0))
    train(step, loader, 1)


def batch_norm():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("microbatch", [None, 3])
def test_batch_norm_in_training_mode(microbatch):
    _, loader, step = make(model=batch_norm(), microbatch=microbatch)
    with pytest.raises((PrivacyError, SamplesInteractError, LossesError), match=r"BatchNorm|freeze_batchnorm"):
        train(step, loader)
    assert step.privacy.spent().updates == 0


def test_batch_norm_of_single_images():
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3)).double()
    _, loader, step = make(model=model, microbatch=1)
    with pytest.raises(PrivacyError, match="the buffers of a private model must not change in training"):
        train(step, loader)
    assert not model[1].running_mean.any()


def test_frozen_batch_norm_is_allowed():
    model, loader, step = make(model=sw.freeze_batchnorm(batch_norm()))
    train(step, loader, 2)
    assert model[1].num_batches_tracked == 0


class Counter(nn.Module):
    """Buffer that holds data of the samples."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return self.inner(x)


def test_buffers_that_change():
    model, loader, step = make(model=Counter())
    with pytest.raises(PrivacyError, match="the buffers of a private model must not change in training"):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    assert not model.seen.any()  # put back


def mixing(model, batch):
    losses = loss_fn(model, batch)
    return losses * losses.mean().detach()


@pytest.mark.parametrize("seed", range(4))
def test_interacting_samples(seed):
    """Also if the first draws have one sample only, which has nothing to interact with."""
    _, loader, step = make(plan(sample_rate=0.04, seed=seed, updates=25), losses=mixing)
    with pytest.raises(SamplesInteractError, match="samples must not depend on each other"):
        train(step, loader)


def softmax(losses):
    return losses.softmax(0)


def pairs(losses):
    return losses + losses.flip(0)[: len(losses)] * (len(losses) > 1)


def centered(norms):
    return norms - norms.mean()


def third(losses):
    return losses / losses[2]


@pytest.mark.parametrize("function", [softmax, pairs, centered, third])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_weights_that_mix_samples(function, microbatch):
    _, loader, step = make(plan(sample_rate=0.3), transforms=[function], microbatch=microbatch)
    with pytest.raises(
        PrivacyError, match=rf"must depend on this sample alone.*; found that weight\({function.__name__}"
    ):
        train(step, loader)
    assert step.privacy.spent().updates == 0


@pytest.mark.parametrize("seed", range(4))
def test_weights_that_mix_samples_after_draws_of_one_sample(seed):
    _, loader, step = make(plan(sample_rate=0.04, seed=seed, updates=25), transforms=[softmax])
    with pytest.raises(PrivacyError, match="must depend on this sample alone"):
        train(step, loader)


def test_users_and_weights_that_mix_samples():
    privacy = plan(users=[i // 4 for i in range(SAMPLES)], sample_rate=0.5)
    _, loader, step = make(privacy, transforms=[softmax])
    with pytest.raises(PrivacyError, match="must depend on this sample alone"):
        train(step, loader)


def test_parameters_trained_outside_of_the_step():
    model = net()
    privacy = plan()
    loader = privacy.loader(dataset())
    step = sw.Step(model, torch.optim.SGD(model[2].parameters(), lr=0.1), loss_fn, privacy=privacy)
    with pytest.raises(PrivacyError, match=r"parameters that the optimizer does not have: 0.weight, 0.bias"):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    model[0].requires_grad_(False)
    train(step, loader, 1)


# --------------------------------------------------------------------------------------------- 4. more updates

PAID = f"at most the {UPDATES} updates that are paid for"


def test_more_updates_than_paid_for():
    _, loader, step = make()
    batches = list(loader)
    train(step, loader)
    assert list(step.over(loader)) == []  # the loader has no more draws
    with pytest.raises(PrivacyError, match=r"must use the next draw"):
        step(batches[0])
    further = make(plan(updates=UPDATES + 1))[1]  # the same key; it has one more draw
    step.privacy.plan._state.update = further.batch_sampler.state.update = UPDATES
    with pytest.raises(PrivacyError, match=rf"a private step must make {PAID}; found that they are made"):
        list(step.over(further))


@pytest.mark.parametrize(("length", "found"), [({"updates": 9}, 9), ({"epochs": 2}, 14)], ids=str)
def test_longer_trainings(length, found):
    _, loader, step = make()
    with pytest.raises(PrivacyError, match=rf"a private training run must make {PAID}; found {found}"):
        sw.Trainer(step, progress=False).fit(loader, **length)
    assert step.privacy.spent().updates == 0


def test_fit_makes_the_updates_that_are_paid_for():
    _, loader, step = make()
    sw.Trainer(step, progress=False).fit(loader)
    assert step.privacy.left == 0 and step.counters.updates == UPDATES
    with pytest.raises(PrivacyError, match=PAID):
        sw.Trainer(step, progress=False).fit(loader, updates=UPDATES + 1)


# ------------------------------------------------------------------------------------------------ 8. side channels

HIDDEN = ["loss", "losses", "norms", "samples", "local_samples", "weights", "counts"]


def test_values_of_updates_are_hidden():
    _, loader, step = make()
    (update,) = step(next(iter(loader)))
    for name in HIDDEN:
        if hasattr(type(update), name):
            with pytest.raises(PrivacyError, match=r"must not be read with privacy=.*sw.Privacy\(observe=True\)"):
                getattr(update, name)
    shown = f"index=0, samples=hidden, loss=hidden, grad_norm={update.grad_norm:.4g}, lr={update.lr:.4g}"
    assert repr(update) == f"Update({shown})"
    assert step.counters.samples == 0 and step.counters.microbatches == 0
    public = {"index", "skipped", "phases", "lr", "grad_norm", "seconds"}
    for name in dir(update):
        if not name.startswith("_") and name not in public and not callable(getattr(type(update), name, None)):
            with pytest.raises(PrivacyError, match="must not be read"):
                getattr(update, name)
    assert update.grad_norm > 0  # of the noisy gradient


def test_observed_values_are_shown():
    privacy = plan(observe=True)
    assert "observed: losses, norms and batch sizes are shown, outside of the guarantee" in repr(privacy)
    _, loader, step = make(privacy, record="norms")
    for update in step.over(loader):
        if update.samples:
            assert len(update.norms) == len(update.losses) == update.samples and update.loss > 0
            assert f"samples={update.samples}, loss={update.loss:.4g}" in repr(update)
    assert step.counters.samples > 0
    assert "observed: losses" in repr(step.privacy)


def test_ledger_and_noise_scale(tmp_path):
    message = "values of single samples must not be recorded with privacy="
    _, loader, step = make(dataset=TensorDataset(*data(), torch.arange(SAMPLES)))
    with pytest.raises(PrivacyError, match=message):
        step.require(norms=True)
    with pytest.raises(PrivacyError, match=message):
        step.require(columns={"id": 2})
    noise_scale = sw.NoiseScale(), "the noise scale needs updates that weigh each sample by itself"
    refused = [(sw.Ledger(), message), (sw.Ledger(norms=False), message), noise_scale]
    for k, (callback, why) in enumerate(refused):
        _, loader, step = make(dataset=sw.Indexed(dataset()))
        with pytest.raises(ValueError, match=why):
            sw.Trainer(step, tmp_path / str(k), [callback], progress=False).fit(loader)
        assert step.privacy.spent().updates == 0


def test_reprs():
    privacy = plan(seed=None, clip=1)
    assert repr(privacy).splitlines() == [
        f"({privacy.epsilon:.6g}, 0.001)-DP for adding or removing one sample, RDP accountant;",
        "8 updates of Poisson samples, rate 0.15; clip(1.0); Gaussian noise 1 × 1.0",
    ]
    text = repr(plan(seed=None, users=range(SAMPLES), mode="automatic", by="parameter", observe=True))
    assert "for adding or removing all samples of one user, RDP accountant;\n" in text
    assert "clip(0.5, by='parameter', mode='automatic', gamma=0.01); Gaussian noise 1 × 0.5 × √parameters" in text
    assert text.endswith(";\nobserved: losses, norms and batch sizes are shown, outside of the guarantee")
    text = repr(plan(seed=None, adaptive=0.5, max_batch=9, dataset_size=SAMPLES, accountant="pld"))
    assert text.endswith("rate 0.15, at most 9; clip(0.5, adaptive=0.5); Gaussian noise 1 × bound")


def test_plans_are_frozen():
    with pytest.raises(FrozenInstanceError):
        plan().epsilon = 1.0


def test_seeds_are_announced():
    assert "reproducible, not private: seed given" in repr(plan())
    assert "reproducible" not in repr(plan(seed=None))
    assert repr(plan(seed=None)._state.secret).startswith("Secret(")


def test_sequence_losses_have_counts():
    """A criterion with targets per token returns counts above 1."""
    x = torch.randn(SAMPLES, 5, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES, 5))

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x).transpose(1, 2)

    _, loader, step = make(model=Tokens(), losses=nn.CrossEntropyLoss(), dataset=TensorDataset(x, y))
    with pytest.raises(LossesError, match="Return one mean loss per sample, without counts"):
        train(step, loader)

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").mean(1)

    _, loader, step = make(model=Tokens(), losses=mean, dataset=TensorDataset(x, y))
    train(step, loader, 1)


def test_sensitivity_errors_are_privacy_errors():
    assert not issubclass(TransformError, PrivacyError)
    with pytest.raises(PrivacyError, match="only if the weight of a sample depends on this sample alone") as caught:
        make(transforms=[sw.drop(largest=1)])
    assert isinstance(caught.value.__cause__, TransformError)


# ----------------------------------------------------------------------------- entries and values that no recheck sees


def test_entries_that_are_kept_whole():
    model = net()
    whole = sw.batch_constants(1)(loss_fn)
    with pytest.raises(PrivacyError, match=r"one row per sample of its draw.*found a loss function with @sw\.batch"):
        sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), whole, privacy=plan())


@pytest.mark.parametrize("values", [itertools.count(1), (k for k in range(1, 99)), zip(range(99))], ids=type)
def test_iterators_that_a_recheck_would_consume(values):
    def decayed(model, batch):
        return loss_fn(model, batch) / float(torch.as_tensor(next(values)))

    model = net()
    before = [p.clone() for p in model.parameters()]
    privacy = plan()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), decayed, privacy=privacy)
    with pytest.raises(PrivacyError, match=r"must be rechecked.*can read an iterator \(\w+\).*Compute the values"):
        next(iter(step.over(privacy.loader(dataset()))))
    assert step.privacy.spent().updates == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
