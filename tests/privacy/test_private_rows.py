"""Rows of a private batch are the samples of its draw, and losses are its rows; everything else is refused."""

import pytest
import torch
import torch.nn.functional as F
from leave_one_out import moved
from private_runs import SAMPLES, data, loss_fn, make, net, plan, train
from torch.utils.data import TensorDataset, default_collate

import samplewise as sw
from samplewise.errors import LossesError, PrivacyError

pytest.importorskip("dp_accounting")

ROWS = r"a private batch must have one row per sample of its draw.*; found "
LOSSES = r"a private loss function must return one loss per sample.*; found "
ALL = {"sample_rate": 1.0, "updates": 2}


def repeated(samples):
    return [column.repeat_interleave(50, 0) for column in default_collate(samples)]


def keys(samples):
    x, y = repeated(samples)
    return {"x": x, "y": y}


def with_a_copy(samples):
    x, y = default_collate(samples)
    return torch.cat([x, x[:1]]), torch.cat([y, y[:1]])


def pairs_of_rows(samples):
    x, y = default_collate(samples)
    return (x[:-1] + x[1:]) / 2, y[1:]


def without_the_last(samples):
    return default_collate(samples[:-1])


def of_two_lengths(samples):
    x, y = default_collate(samples)
    return x, y, torch.zeros(7)


def as_objects(samples):
    return [object() for _ in samples]


def nothing(samples):
    return None


def mean_of_all(samples):
    """The loss of each row can then depend on all samples, and stays the same if the batch is cut."""
    x, y = default_collate(samples)
    return x, y, x.mean()


def number_of_all(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y, "scale": float(x.std())}


def numbers_of_all(samples):
    x, y = default_collate(samples)
    return x, y, [float(x.min()), float(x.max())]


def name_of_all(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y, "bucket": "long" if len(x) > 30 else "short"}


COLLATES = {
    "50 rows per sample": (repeated, "2,000 rows for 40 samples"),
    "in a dict": (keys, "2,000 rows for 40 samples"),
    "one sample twice": (with_a_copy, "41 rows for 40 samples"),
    "pairs": (pairs_of_rows, "39 rows for 40 samples"),
    "a sample is missing": (without_the_last, "39 rows for 40 samples"),
    "two lengths": (of_two_lengths, "a batch that cannot be cut into rows for 40 samples"),
    "objects": (as_objects, "a batch that cannot be cut into rows for 40 samples"),
    "nothing": (nothing, "0 rows for 40 samples"),
    "a scalar": (mean_of_all, r"batch\[2\], of shape \(\), for 40 samples"),
    "a number": (number_of_all, r"batch\['scale'\], of float, for 40 samples"),
    "some numbers": (numbers_of_all, r"batch\[2\], of list, for 40 samples"),
    "a string": (name_of_all, r"batch\['bucket'\], of str, for 40 samples"),
}


@pytest.mark.parametrize(("collate", "found"), COLLATES.values(), ids=COLLATES)
@pytest.mark.parametrize("microbatch", [None, 7])
def test_rows_of_a_batch(collate, found, microbatch):
    model, loader, step = make(plan(**ALL), loader={"collate_fn": collate}, microbatch=microbatch)
    with pytest.raises(PrivacyError, match=f"{ROWS}{found}. Return one row per sample"):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), net().parameters(), strict=True))


def test_rows_of_users():
    users = {"users": [i // 4 for i in range(SAMPLES)]}
    _, loader, step = make(plan(**ALL, **users), loader={"collate_fn": repeated})
    with pytest.raises(PrivacyError, match=f"{ROWS}2,000 rows for 40 samples"):
        train(step, loader)
    _, loader, step = make(plan(**ALL, **users))
    assert train(step, loader) == 2


def test_rows_of_workers():
    _, loader, step = make(plan(**ALL), loader={"collate_fn": repeated, "num_workers": 1})
    with pytest.raises(PrivacyError, match=f"{ROWS}2,000 rows for 40 samples"):
        train(step, loader)


# ------------------------------------------------------------------------------------------------------------ losses


def tokens(model, batch):
    return loss_fn(model, batch).repeat_interleave(3) * torch.arange(1, 4).repeat(len(batch[1]))


def mean(model, batch):
    return loss_fn(model, batch).mean()[None]


def pairs(model, batch):
    losses = loss_fn(model, batch)
    return losses[:-1] + losses[1:]


def all_pairs(model, batch):
    losses = loss_fn(model, batch)
    return (losses[:, None] * losses.detach()).flatten()


def some(model, batch):
    losses = loss_fn(model, batch)
    return losses[losses > losses.median()]


def with_columns(model, batch):
    losses = tokens(model, batch)
    return losses, {"index": torch.arange(len(losses))}


BAD_LOSSES = [tokens, mean, pairs, all_pairs, some, with_columns]


@pytest.mark.parametrize("losses", BAD_LOSSES)
@pytest.mark.parametrize("microbatch", [None, 8])
def test_losses_of_a_batch(losses, microbatch):
    _, loader, step = make(plan(**ALL), losses=losses, microbatch=microbatch)
    with pytest.raises(PrivacyError, match=rf"{LOSSES}.*for {microbatch or SAMPLES} samples"):
        train(step, loader)
    assert step.privacy.spent().updates == 0


@pytest.mark.parametrize("microbatch", [None, 8])
def test_token_losses_with_a_weight_of_the_batch(microbatch):
    """The weight has one value per token, as the losses have."""
    x, y = data()
    dataset = TensorDataset(x, y, torch.rand(SAMPLES, 3, dtype=torch.float64))
    weight = sw.weight(lambda batch: batch[2].flatten())
    _, loader, step = make(plan(**ALL), losses=tokens, dataset=dataset, transforms=[weight], microbatch=microbatch)
    with pytest.raises(PrivacyError, match=LOSSES):
        train(step, loader)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda losses: None, "found NoneType"),
        (lambda losses: (), "found a tuple of 0"),
        (list, "found list"),
        (lambda losses: losses[:, None], r"found shape \(40, 1\)"),
    ],
)
def test_results_that_are_no_losses(result, found):
    _, loader, step = make(plan(**ALL), losses=lambda model, batch: result(loss_fn(model, batch)))
    with pytest.raises(LossesError, match=found):
        train(step, loader)


def test_an_entry_without_value():
    def losses(model, batch):
        return loss_fn(model, (batch["x"], batch["y"]))

    def collate(samples):
        return {**dict(zip("xy", default_collate(samples), strict=True)), "mask": None}

    _, loader, step = make(plan(**ALL), losses=losses, loader={"collate_fn": collate})
    assert train(step, loader) == 2


def later(losses, microbatch):
    """Loss function that is right until the last microbatch of the first update."""
    calls = []

    def switched(model, batch):
        calls.append(len(batch[1]))
        return (losses if len(batch[1]) == SAMPLES % microbatch else loss_fn)(model, batch)

    return switched


@pytest.mark.parametrize("losses", [tokens, pairs, mean])
def test_the_losses_of_every_microbatch_are_counted(losses):
    model, loader, step = make(plan(**ALL), losses=later(losses, 36), microbatch=36)
    with pytest.raises(PrivacyError, match=rf"{LOSSES}.*for 4 samples"):
        train(step, loader)
    assert step.privacy.spent().updates == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("losses", BAD_LOSSES)
def test_losses_of_users(losses):
    users = {"users": [i // 4 for i in range(SAMPLES)]}
    _, loader, step = make(plan(**ALL, **users), losses=losses)
    with pytest.raises(PrivacyError, match=LOSSES):
        train(step, loader)


# ------------------------------------------------------------------------------------------------------------- views


def more_views(samples):
    x, y = default_collate(samples)
    return x.repeat(1, 5, 1), y.repeat(1, 5)


def views_as_rows(samples):
    return [column.flatten(0, 1) for column in default_collate(samples)]


def test_views():
    _, loader, step = make(plan(**ALL, augmentations=3))
    assert train(step, loader) == 2
    _, loader, step = make(plan(**ALL, augmentations=3), loader={"collate_fn": more_views})
    with pytest.raises(
        PrivacyError, match=r"must have shape \(samples, 3, ...\) with augmentations=3; found \(40, 15, 6\)"
    ):
        train(step, loader)
    _, loader, step = make(plan(**ALL, augmentations=3), loader={"collate_fn": views_as_rows})
    with pytest.raises(PrivacyError, match=f"{ROWS}120 rows for 40 samples"):
        train(step, loader)


@pytest.mark.parametrize("losses", BAD_LOSSES)
def test_losses_of_views(losses):
    _, loader, step = make(plan(**ALL, augmentations=3), losses=losses)
    with pytest.raises(PrivacyError, match=rf"{LOSSES}.*and 3 views of each"):
        train(step, loader)


# ------------------------------------------------------------------------------------------------------ what is right


def test_empty_draws_and_dicts():
    x, y = data()
    batches = [{"x": row, "y": label} for row, label in zip(x, y, strict=True)]

    def losses(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    _, loader, step = make(plan(sample_rate=0.02, updates=20), dataset=batches, losses=losses, microbatch=1)
    assert train(step, loader) == 20


@pytest.mark.parametrize("row", range(0, SAMPLES, 13))
def test_leaving_out_a_sample_moves_the_sum_by_at_most_the_bound(row):
    ratio, size = moved(net, loss_fn, data(), {row}, microbatch=7)
    assert ratio <= 1 + 1e-12 and size > 2
