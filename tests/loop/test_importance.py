"""Importance sampling: draws, weights, scores, exact resume, and refusals."""

import copy
import json
import math
import pickle
import re
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

SAMPLES = 50
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X[:5] *= 8  # a few samples with large gradients
Y = torch.arange(SAMPLES) % 3
DATA = TensorDataset(X, Y)


def make_step(loss=None, lr=0.1, transforms=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    transforms = [sw.weight("importance")] if transforms is None else transforms
    return sw.Step(model, optimizer, loss or nn.CrossEntropyLoss(), transforms=transforms, **options)


def make_loader(sampler, data=DATA, **options):
    return DataLoader(sw.Indexed(data), batch_sampler=sampler, **options)


def train(sampler, step, epochs):
    sampler.listen(step)
    for _ in range(epochs):
        train_epoch(sampler, step, make_loader(sampler))


def train_epoch(sampler, step, loader):
    for update in step.over(loader):
        sampler.add(update)


def flat(batches):
    return list(chain.from_iterable(batches))


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def rows(model):
    losses = F.cross_entropy(model(X), Y, reduction="none")
    return torch.cat([g.flatten(1) for g in sw.gradients(losses, model).full().values()], 1)


@pytest.fixture
def scored():
    """A sampler with the gradient norms of a model as scores, and the rows of the gradients."""
    step = make_step(lr=0.0)
    sampler = sw.ImportanceSampler(DATA, 2, decay=0)
    train(sampler, step, 1)
    next(iter(sampler))
    return sampler, rows(step.model)


# --- draws -----------------------------------------------------------------------------------------------------------


def test_equal_scores_are_an_ordinary_shuffled_epoch():
    sampler = sw.ImportanceSampler(DATA, 10)
    draws = [list(sampler) for _ in range(2)]
    for epoch in draws:
        assert sorted(flat(epoch)) == list(range(SAMPLES))
        assert {index.weight for index in flat(epoch)} == {1.0}
    assert draws[0] != draws[1]
    assert len(sampler) == 5 and [len(batch) for batch in draws[0]] == [10] * 5


def test_probabilities_and_weights_follow_the_formula(scored):
    sampler, gradients = scored
    norms = gradients.norm(dim=1)
    expected = 0.9 * norms / norms.sum() + 0.1 / SAMPLES
    torch.testing.assert_close(sampler.probabilities, expected, rtol=1e-12, atol=0)
    for index in flat(sampler):
        assert index.weight == pytest.approx(1 / (SAMPLES * float(expected[int(index)])), rel=1e-12)


def test_estimates_are_unbiased(scored):
    sampler, gradients = scored
    full = gradients.mean(0)
    epochs = 4000  # of 25 batches: 100,000 estimates
    batches = [flat(sampler) for _ in range(epochs)]
    ids = torch.tensor([[int(index) for index in epoch] for epoch in batches])
    weights = torch.tensor([[index.weight for index in epoch] for epoch in batches], dtype=torch.float64)
    for share in (weights, torch.ones_like(weights)):
        estimates = (share[..., None] * gradients[ids]).unflatten(1, (-1, 2)).mean(2)  # (epochs, batches, parameters)
        assert estimates.shape[0] * estimates.shape[1] >= 100_000
        means = estimates.mean(1)  # epochs are independent, batches of one epoch are not
        errors = means.std(0) / math.sqrt(epochs)
        deviation = ((means.mean(0) - full).abs() / errors.clamp(min=1e-15)).max()
        assert deviation < 3 if share is weights else deviation > 30
    # Each batch alone, the first and the last of an epoch, too.
    estimates = (weights[..., None] * gradients[ids]).unflatten(1, (-1, 2)).mean(2)
    for batch in estimates.unbind(1):
        assert ((batch.mean(0) - full).abs() < 4 * batch.std(0) / math.sqrt(epochs) + 1e-15).all()


def test_variance_ratio(scored):
    """The measured ratio estimates that of the probabilities; both are far below 1 for these samples."""
    sampler, gradients = scored
    norms = gradients.norm(dim=1)
    expected = float((norms.square() / sampler.probabilities).sum() / (SAMPLES * norms.square().sum()))
    step = make_step(lr=0.0)
    train(sampler, step, 1)
    ids, _, weights, _ = torch.cat(sampler.state_dict()["visits"]).unbind(1)
    ids = ids.long()
    next(iter(sampler))
    by_hand = (weights * norms[ids]).square().sum() / (weights * norms[ids].square()).sum()
    assert sampler.variance_ratio == pytest.approx(float(by_hand), rel=1e-9)
    assert sampler.variance_ratio == pytest.approx(expected, rel=0.1) and expected < 0.6
    assert f"variance ratio {sampler.variance_ratio:.3f}" in repr(sampler)


def test_an_update_is_the_weighted_mean(scored):
    sampler, gradients = scored
    step = make_step(lr=1.0)
    sampler.listen(step)
    before = vector(step.model)
    update = next(iter(step.over(make_loader(sampler))))
    ids, weights = update.columns["id"], update.columns["importance"]
    torch.testing.assert_close(weights, 1 / (SAMPLES * sampler.probabilities[ids]))
    expected = (weights[:, None] * gradients[ids]).sum(0) / 2
    torch.testing.assert_close(before - vector(step.model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("every", ["1ep", "3up"])
def test_workers_change_nothing(every):
    def trained(**options):
        sampler = sw.ImportanceSampler(DATA, 5, every=every)
        step = make_step()
        seen = []

        class Draws:
            def on_update(self, update):
                seen.append((update.columns["id"].tolist(), update.columns["importance"].tolist()))

        trainer = sw.Trainer(step, None, [sampler, Draws()], progress=False)
        trainer.fit(make_loader(sampler, **options), epochs=3)
        return seen, vector(step.model)

    draws, parameters = trained()
    assert {weight for _, weights in draws[-10:] for weight in weights} != {1.0}
    workers = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True}
    again, others = trained(**workers)
    assert again == draws and torch.equal(others, parameters)


def test_refresh_inside_an_epoch():
    """The probabilities of block k are those of the scores at the end of block k - 2."""
    sampler = sw.ImportanceSampler(DATA, 5, every="3up", decay=0)
    step = make_step(lr=0.0)
    sampler.listen(step)
    norms = rows(step.model).norm(dim=1)
    used = []
    for number, update in enumerate(step.over(make_loader(sampler))):
        scores = torch.full((SAMPLES,), math.nan, dtype=torch.float64)
        known = torch.tensor(used[: max(0, number // 3 - 1) * 15], dtype=torch.long)
        scores[known] = norms[known]
        shares = (scores / scores.nanmean()).nan_to_num(1.0)
        expected = 1 / (0.9 * shares + 0.1) * (0.9 * shares + 0.1).mean()
        torch.testing.assert_close(update.columns["importance"], expected[update.columns["id"]])
        used += update.columns["id"].tolist()
        sampler.add(update)
    assert len(used) == 50


def test_refresh_needs_batches_that_are_not_fetched_too_early():
    sampler = sw.ImportanceSampler(DATA, 5, every=2)
    step = make_step()
    sampler.listen(step)
    message = re.escape("every 2 batches needs 2 batches in updates before batch 4 is drawn; found 0")
    with pytest.raises(sw.BatchError, match=message):
        train_epoch(sampler, step, make_loader(sampler, num_workers=1, prefetch_factor=4))
    sampler = sw.ImportanceSampler(DATA, 5, every=2)
    step = make_step(samples=30)
    sampler.listen(step)
    with pytest.raises(sw.BatchError, match=message + re.escape(". Use a larger every=: an interval must hold the")):
        train_epoch(sampler, step, make_loader(sampler))


class Augmented(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"x": torch.rand(3), "y": i % 2}


def test_a_sample_that_is_drawn_twice_is_augmented_twice():
    """A floor of 1 over four batches of three: each of six samples is drawn twice in an epoch."""
    sampler = sw.ImportanceSampler(range(6), 12)
    batches = []

    def loss_fn(model, batch):
        batches.append(batch)
        return (model(batch["x"]) ** 2).sum(1)

    model = nn.Linear(3, 1)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, transforms=[sw.weight("importance")])
    sw.Trainer(step, None, [sampler], progress=False).fit(make_loader(sampler, Augmented()), epochs=1)
    (batch,) = [batch for batch in batches if len(batch["id"]) == 12][:1]
    assert batch["id"].sort().values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len(batch["x"][:, 0].unique()) == 12
    assert batch["importance"].dtype == torch.float64


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_running_means_and_unseen_samples_have_the_mean():
    sampler = sw.ImportanceSampler(DATA, 10, decay=0.25, score="value")

    def loss_fn(model, batch):
        x, y, _, ids = batch
        return F.cross_entropy(model(x), y, reduction="none"), {"value": values[ids]}

    step = make_step(loss_fn, lr=0.0)
    values = torch.arange(SAMPLES).double()
    values[3] = math.nan
    values[4] = math.inf
    train(sampler, step, 1)
    next(iter(sampler))
    seen = torch.ones(SAMPLES, dtype=torch.bool)
    seen[3:5] = False
    torch.testing.assert_close(sampler.scores[seen], values[seen])
    assert sampler.scores[3:5].isnan().all()
    assert sampler.probabilities[3] == pytest.approx(1 / SAMPLES)  # the mean score

    for update in step.over(make_loader(sampler)):
        sampler.add(update)
        values = torch.full((SAMPLES,), 7.0, dtype=torch.float64)  # from the second update on
    visits = torch.cat(sampler.state_dict()["visits"])
    before = sampler.scores
    next(iter(sampler))
    for k in range(SAMPLES):
        of_sample = visits[(visits[:, 0] == k) & visits[:, 1].isfinite(), 1]
        if not len(of_sample):
            assert sampler.scores[k] == before[k] or (sampler.scores[k].isnan() and before[k].isnan())
        elif before[k].isnan():
            assert sampler.scores[k] == pytest.approx(float(of_sample.mean()))
        else:
            expected = 0.25 * float(before[k]) + 0.75 * float(of_sample.mean())
            assert sampler.scores[k] == pytest.approx(expected)


def test_losses_as_scores_need_no_norms():
    sampler = sw.ImportanceSampler(DATA, 10, score="losses", decay=0)
    step = make_step(lr=0.0)
    train(sampler, step, 1)
    next(iter(sampler))
    losses = F.cross_entropy(step.model(X), Y, reduction="none").detach()
    torch.testing.assert_close(sampler.scores, losses)
    with pytest.raises(sw.ParameterError, match="must be requested"):
        _ = next(iter(step.over(make_loader(sampler)))).norms


def test_columns_of_a_criterion_as_scores():
    sampler = sw.ImportanceSampler(DATA, 10, score="label", decay=0)
    train(sampler, make_step(), 1)
    next(iter(sampler))
    assert sampler.scores.tolist() == Y.tolist()


def test_a_trainer_prints_and_logs_the_variance_ratio(tmp_path, capsys):
    sampler = sw.ImportanceSampler(DATA, 10)
    sw.Trainer(make_step(), tmp_path / "run", [sampler]).fit(make_loader(sampler), epochs=2)
    shown = f"epoch 2  variance ratio {sampler.variance_ratio:.4g}"
    assert shown in capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (first, last) = [line for line in lines if line["kind"] == "importance"]
    assert first["variance_ratio"] == 1.0  # uniform draws
    assert last == {"kind": "importance", "epoch": 2, "update": 10, "variance_ratio": sampler.variance_ratio}


def test_skipped_updates_leave_scores_alone():
    sampler = sw.ImportanceSampler(DATA, 10)
    bad = X.clone()
    bad[7] = math.nan
    step = make_step(on_nonfinite="skip")
    sampler.listen(step)
    skipped = []
    for update in step.over(make_loader(sampler, TensorDataset(bad, Y))):
        sampler.add(update)
        skipped += update.columns["id"].tolist() if update.skipped else []
    next(iter(sampler))
    assert len(skipped) == 10 and 7 in skipped
    assert sampler.scores.isnan().nonzero().view(-1).tolist() == sorted(skipped)


def test_samples_that_a_guard_drops_leave_scores_alone():
    """Otherwise a sample that is dropped because of its norm would be drawn most of the time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 3, generator=generator)
    y = x.sum(1)
    y[11] = 1e7
    data = TensorDataset(x, y)

    def squares(model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    transforms = [sw.guard(), sw.weight("importance")]
    step = sw.Step(model, optimizer, squares, transforms=transforms)
    sampler = sw.ImportanceSampler(data, 20)
    loader = make_loader(sampler, data)
    sampler.listen(step)
    step.transforms.states[0].commit(torch.full((50,), 3.0))  # so that the guard drops from the first update on
    dropped = 0
    for _ in range(4):
        for update in step.over(loader):
            sampler.add(update)
            dropped += int(update.dropped.sum())
            assert set(update.columns["id"][update.dropped].tolist()) <= {11}
    assert 1 <= dropped < 12
    assert sampler.scores[11].isnan()
    assert sampler.probabilities[11] == pytest.approx(1 / 200)
    assert sampler.variance_ratio > 0.2


def test_scores_of_any_magnitude():
    sampler = sw.ImportanceSampler(DATA, 10)
    sampler.scores = torch.full((SAMPLES,), 1e308, dtype=torch.float64)
    assert (sampler.probabilities == 1 / SAMPLES).all()
    sampler.scores.zero_()
    assert (sampler.probabilities == 1 / SAMPLES).all()
    sampler.scores[0] = 5e-324
    assert sampler.probabilities[0] == pytest.approx(0.902) and sampler.probabilities[1] == pytest.approx(0.002)


# --- resume ----------------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class Kill:
    def __init__(self, update):
        self.update = update

    def on_update(self, update):
        if update.index == self.update:
            raise Killed


def fitted(run, every, workers, kill=-1, samples=None):
    sampler = sw.ImportanceSampler(DATA, 5, every=every)
    step = make_step(samples=samples)
    callbacks = [sampler, Kill(kill), ModelCheckpoint(every="3up")]
    trainer = sw.Trainer(step, run, callbacks, progress=False, seed=4)
    trainer.fit(make_loader(sampler, num_workers=workers), epochs=3, resume=True)
    return vector(step.model), sampler.scores, (run / "log.jsonl").read_text().count('"importance"')


@pytest.mark.sweep(2 / 5)
@pytest.mark.parametrize(
    ("every", "workers", "samples"),
    [("1ep", 0, None), ("1ep", 2, None), ("4up", 0, 7), ("4up", 2, None), ("2ep", 0, 3)],
)
def test_resume_is_bit_identical(every, workers, samples, tmp_path):
    parameters, scores, lines = fitted(tmp_path / "whole", every, workers, samples=samples)
    assert lines == (2 if every == "2ep" else 3)  # no refresh after the first epoch
    for update in (8,) if workers else (1, 8, 14):  # before the first checkpoint, and inside of epochs
        run = tmp_path / str(update)
        with pytest.raises(Killed):
            fitted(run, every, workers, update, samples)
        found, found_scores, found_lines = fitted(run, every, workers, samples=samples)
        assert torch.equal(found, parameters) and found_lines == lines
        assert torch.equal(found_scores.nan_to_num(-1), scores.nan_to_num(-1))


def test_two_calls_of_fit(tmp_path):
    def run(*until):
        sampler = sw.ImportanceSampler(DATA, 5, every=4)
        step = make_step()
        trainer = sw.Trainer(step, None, [sampler], progress=False)
        for updates in until:
            trainer.fit(make_loader(sampler) if updates == until[0] else trainer.loader, updates=updates)
        return vector(step.model)

    assert torch.equal(run(25), run(7, 16, 25))


@pytest.mark.parametrize("every", ["1ep", 3])
@pytest.mark.parametrize("stop", [0, 4, 9, 10, 13])
def test_custom_loop_continues_inside_a_batch(every, stop):
    """Updates of 8 samples, batches of 5."""

    def loop(sampler, step, until, draws):
        sampler.listen(step)
        loader = make_loader(sampler)
        while True:
            for update in step.over(loader):
                sampler.add(update)
                draws.append((update.columns["id"].tolist(), update.columns["importance"].tolist()))
                if len(draws) == until:
                    return

    whole = []
    loop(sw.ImportanceSampler(DATA, 5, every=every), make_step(samples=8), 20, whole)
    draws = []
    sampler, step = sw.ImportanceSampler(DATA, 5, every=every), make_step(samples=8)
    if stop:
        loop(sampler, step, stop, draws)
    state, step_state, model_state = sampler.state_dict(), step.state_dict(), step.model.state_dict()
    sampler, step = sw.ImportanceSampler(DATA, 5, every=every), make_step(samples=8)
    sampler.load_state_dict(state)
    step.load_state_dict(step_state)
    step.model.load_state_dict(model_state)
    loop(sampler, step, 20, draws)
    assert draws == whole


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("every", ["1ep", 3])
@pytest.mark.parametrize("stop", [4, 6, 7, 9, 12, 13, 20])
def test_custom_loop_continues_with_an_open_window(every, stop):
    """Updates of 8 samples, batches of 5, 50 samples in an epoch: samples of the open window are in the state of the
    step, and must not be drawn again.
    """

    def parts():
        sampler, step = sw.ImportanceSampler(DATA, 5, every=every), make_step(samples=8, tail="carry")
        sampler.listen(step)
        return sampler, step, make_loader(sampler)

    def loop(sampler, step, loader, start, until):
        updates = []
        batch = start
        while batch < until:
            for inputs in loader:
                for update in step(inputs):
                    sampler.add(update)
                    updates.append(update.columns["id"].tolist())
                batch += 1
                if batch == until:
                    break
        return updates

    whole = loop(*parts(), 0, 30)
    first = parts()
    draws = loop(*first, 0, stop)
    states = [part.state_dict() for part in (*first[:2], first[1].model)]
    second = parts()
    for part, state in zip((*second[:2], second[1].model), states, strict=True):
        part.load_state_dict(state)
    assert draws + loop(*second, stop, 30) == whole


@pytest.mark.parametrize("stop", [4, 6, 7, 10])
def test_custom_loop_continues_in_an_epoch_with_carried_samples(stop):
    """Updates of 16 samples, batches of 10, 50 samples in an epoch."""

    def parts():
        sampler, step = sw.ImportanceSampler(DATA, 10), make_step(samples=16, tail="carry")
        sampler.listen(step)
        return sampler, step, make_loader(sampler)

    def loop(sampler, step, loader, until):
        updates = []
        while True:
            for update in step.over(loader):
                sampler.add(update)
                updates.append(update.columns["id"].tolist())
                if len(updates) == until:
                    return updates

    whole = loop(*parts(), 15)
    first = parts()
    draws = loop(*first, stop)
    states = [part.state_dict() for part in (*first[:2], first[1].model)]
    second = parts()
    for part, state in zip((*second[:2], second[1].model), states, strict=True):
        part.load_state_dict(state)
    assert draws + loop(*second, 15 - stop) == whole


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_has_the_scores_and_no_step(copied):
    step, sampler = make_step(), sw.ImportanceSampler(DATA, 5)
    train(sampler, step, 2)
    other = copied(sampler)
    assert torch.equal(other.scores, sampler.scores)
    assert list(other) == list(sampler)
    assert other._step is None and sampler._step is step


def test_resume_with_other_settings():
    sampler = sw.ImportanceSampler(DATA, 5)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=r"found {'samples': 49.* instead of {'samples': 50"):
        sw.ImportanceSampler(X[:49], 5).load_state_dict(state)
    with pytest.raises(ValueError, match="must have the dataset length of its state"):
        sampler.load_state_dict({**state, "scores": state["scores"][:3]})
    sw.ImportanceSampler(DATA, 6, every=2).load_state_dict(state)  # between two epochs
    with pytest.raises(ValueError, match=re.escape("'batch_size': 6, 'every': '2up'} instead of")):
        sw.ImportanceSampler(DATA, 6, every=2).load_state_dict({**state, "used": 5})


# --- refusals --------------------------------------------------------------------------------------------------------


class Endless:
    def __getitem__(self, index):
        return index


WRONG = {
    "needs the number of samples; found Endless": lambda: sw.ImportanceSampler(Endless(), 5),
    "needs a map-style dataset, with __getitem__": lambda: sw.ImportanceSampler(iter([1]), 5),
    "needs at least one sample; found an empty list": lambda: sw.ImportanceSampler([], 5),
    "batch_size must be at least 1; found 0": lambda: sw.ImportanceSampler(DATA, 0),
    "floor must be above 0, to draw every sample, and at most 1; found 0": lambda: sw.ImportanceSampler(
        DATA, 5, floor=0
    ),
    "at most 1; found '0.1'. Pass for example 0.1": lambda: sw.ImportanceSampler(DATA, 5, floor="0.1"),
    "decay must be at least 0 and below 1; found 1": lambda: sw.ImportanceSampler(DATA, 5, decay=1),
    "decay must be at least 0 and below 1; found None": lambda: sw.ImportanceSampler(DATA, 5, decay=None),
    "score must be 'norms', 'losses' or the name of a column; found 5": lambda: sw.ImportanceSampler(DATA, 5, score=5),
    "every must be a duration such as '1ep'": lambda: sw.ImportanceSampler(DATA, 5, every="3samples"),
    "listen needs the sw.Step": lambda: sw.ImportanceSampler(DATA, 5).listen(DATA),
    "add needs an update; found int": lambda: sw.ImportanceSampler(DATA, 5).add(1),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message.replace("'1ep'", "'1ep' (epochs)"))):
        WRONG[message]()


@pytest.mark.parametrize("transforms", [[], [sw.weight("importance", renormalize=True)], [sw.clip(1.0)]])
def test_updates_without_weights_are_refused(transforms):
    with pytest.raises(sw.TransformError, match=re.escape("must be multiplied by the weights of the draws")):
        sw.ImportanceSampler(DATA, 5).listen(make_step(transforms=transforms))


def test_private_training_is_refused():
    privacy = sw.Privacy(noise_multiplier=1.0, delta=1e-5, updates=10, sample_rate=0.1, clip=1.0)
    step = make_step(transforms=[], privacy=privacy)
    with pytest.raises(sw.PrivacyError, match="must not be used with privacy="):
        sw.Trainer(step, None, [sw.ImportanceSampler(DATA, 5)], progress=False).fit(privacy.loader(DATA))


def test_sampler_and_loader_belong_together():
    sampler = sw.ImportanceSampler(DATA, 5)
    loader = make_loader(sampler)
    for given in (loader, sw.already_sharded(loader)):
        with pytest.raises(TypeError, match="must be among the callbacks"):
            sw.Trainer(make_step(), None, [], progress=False).fit(given, epochs=1)
    loader.state_dict = loader.load_state_dict = dict  # as a StatefulDataLoader
    for given in (loader, DataLoader(DATA)):
        with pytest.raises(TypeError, match="must be the batch_sampler of a DataLoader"):
            sw.Trainer(make_step(), None, [sampler], progress=False).fit(given, epochs=1)


def test_validation_with_an_importance_sampler_is_refused():
    sampler = sw.ImportanceSampler(DATA, 5)
    loader = make_loader(sampler)
    with pytest.raises(TypeError, match="validate must be a plain loader, because draws of an ImportanceSampler"):
        sw.Trainer(make_step(), None, [sampler], progress=False).fit(loader, loader, epochs=1)


def test_sampler_of_another_dataset():
    sampler = sw.ImportanceSampler(range(40), 5)
    with pytest.raises(ValueError, match="of its loader, which has 50 samples; found 40"):
        sw.Trainer(make_step(), None, [sampler], progress=False).fit(make_loader(sampler), epochs=1)


def test_datasets_without_ids():
    sampler = sw.ImportanceSampler(DATA, 5)
    step = make_step()
    sampler.listen(step)
    with pytest.raises(sw.BatchError, match=r"must hold 'id'.*sw\.Indexed"):
        step.run(DataLoader(DATA, batch_sampler=sampler))


def test_ids_below_another_wrapper():
    """A Subset passes on numbers, without the weights of the draws."""
    sampler = sw.ImportanceSampler(range(30), 5)
    sampler.listen(step := make_step())
    message = r"must hold 'importance'; found the entries 'item0', 'item1', 'id'\. .* wrap the whole dataset"
    with pytest.raises(sw.BatchError, match=message):
        step.run(DataLoader(Subset(sw.Indexed(DATA), range(30)), batch_sampler=sampler))


def test_ids_of_another_dataset():
    sampler = sw.ImportanceSampler(range(2), 2)
    sampler.listen(step := make_step())
    with pytest.raises(sw.BatchError, match=re.escape("weights and ids of its draws, from 0 to 1; found tensor(")):
        train_epoch(sampler, step, make_loader(sw.ImportanceSampler(DATA, 5)))


def test_updates_before_listen():
    sampler = sw.ImportanceSampler(DATA, 5)
    with pytest.raises(sw.BatchError, match=re.escape("found none. Call sampler.listen(step) before the first")):
        train_epoch(sampler, make_step(), make_loader(sampler))


def counted(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses, 1.0 + batch[1].double()


@pytest.mark.parametrize("aggregate", [None, sw.per("sample"), sw.per(5)])
def test_the_divisor_must_be_constant(aggregate):
    sampler = sw.ImportanceSampler(DATA, 5)
    if aggregate is None:
        with pytest.raises(sw.BatchError, match="divided by a constant or by the number of samples"):
            train(sampler, make_step(counted), 1)
    else:
        train(sampler, make_step(counted, aggregate=aggregate), 1)


def test_negative_scores():
    sampler = sw.ImportanceSampler(DATA, 5, score="losses")

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") - 10

    with pytest.raises(ValueError, match="scores must not be negative; found -"):
        train(sampler, make_step(loss_fn), 2)


def test_unknown_score():
    with pytest.raises(sw.BatchError, match="one of id, importance, epoch; found 'speed'"):
        train(sw.ImportanceSampler(DATA, 5, score="speed"), make_step(), 1)


def test_two_iterations_at_a_time():
    sampler = sw.ImportanceSampler(DATA, 5)
    first = iter(sampler)
    next(first)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="must be iterated by one loader at a time"):
        next(first)
