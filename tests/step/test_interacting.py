"""Samples that interact: refused with a remedy, or, with interacting="allow", weighed by rows of the Jacobian."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import samplewise as sw

CLIP = [sw.clip(0.5)]
LR = 0.1


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()


def with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def contrast(model, batch):
    x, _ = batch
    h = F.normalize(model(x), dim=1)
    other = F.normalize(model(x + 0.1), dim=1)
    return F.cross_entropy(h @ other.T / 0.2, torch.arange(len(x)), reduction="none")


def squares(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y).square()


CASES = {"contrast": (encoder, contrast), "batch norm": (with_batch_norm, squares)}
cases = pytest.mark.parametrize(("make", "loss_fn"), CASES.values(), ids=CASES)


def batches(updates=2, samples=8):
    torch.manual_seed(1)
    return [
        (torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, dtype=torch.float64))
        for _ in range(updates)
    ]


def by_hand(model, loss_fn, data, pieces):
    """SGD on the clipped rows of the Jacobian of each piece."""
    for x, y in data:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for part in zip(x.split(pieces), y.split(pieces), strict=True):
            for loss in loss_fn(model, part):
                row = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                norm = torch.sqrt(sum(g.square().sum() for g in row))
                for total, g in zip(sums, row, strict=True):
                    total += g * (0.5 / norm).clamp(max=1)
        with torch.no_grad():
            for p, total in zip(model.parameters(), sums, strict=True):
                p -= LR * total / len(x)
    return model


def said(step, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.run(data)
    return [str(warning.message) for warning in caught]


def assert_same_parameters(found, expected):
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@cases
def test_rows_of_the_jacobian_are_clipped(make, loss_fn):
    model = make()
    step = sw.Step(model, sw.sgd(LR), loss_fn, transforms=CLIP, interacting="allow")
    assert said(step, batches()) == []
    assert_same_parameters(model, by_hand(make(), loss_fn, batches(), 8))


@cases
@pytest.mark.parametrize("chain", [CLIP, [sw.normalize("mean")]], ids=str)
def test_a_window_in_pieces_is_computed_piece_by_piece_with_a_warning(make, loss_fn, chain):
    model = make()
    step = sw.Step(model, sw.sgd(LR), loss_fn, transforms=chain, microbatch=4, interacting="allow")
    (warning,) = said(step, batches())
    assert "window in 2 microbatches" in warning or "a window is computed in 2 microbatches" in warning
    assert "results depend on the microbatch size" in warning
    if chain is CLIP:
        assert_same_parameters(model, by_hand(make(), loss_fn, batches(), 4))


@cases
def test_interacting_samples_stay_uncompiled(make, loss_fn):
    """Which element belongs to which sample is not known from shapes."""
    model = make()
    step = sw.Step(model, sw.sgd(LR), loss_fn, transforms=CLIP, interacting="allow", compile=True)
    (warning,) = said(step, batches(updates=3))
    assert "updates stay uncompiled: GraphError: shapes must show which sample" in warning
    assert_same_parameters(model, by_hand(make(), loss_fn, batches(updates=3), 8))


@pytest.mark.slow
def test_samples_that_do_not_interact_are_compiled():
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squares, transforms=CLIP, interacting="allow", compile=True)
    assert said(step, batches(updates=3)) == []
    assert step.compiled == "compiled"
    assert_same_parameters(model, by_hand(mlp(), squares, batches(updates=3), 8))


@pytest.mark.parametrize(
    ("make", "loss_fn", "microbatch"),
    [(encoder, contrast, None), (encoder, contrast, 4), (with_batch_norm, squares, None)],
    ids=["contrast", "contrast in pieces", "batch norm"],
)
def test_groups(make, loss_fn, microbatch):
    """One group a sample is clipping of each sample, in pieces of one group if the window has several."""
    model = make()
    chain = [sw.group(lambda batch: list(map(float, batch[1]))), sw.clip(0.5)]
    step = sw.Step(model, sw.sgd(LR), loss_fn, transforms=chain, microbatch=microbatch, interacting="allow")
    found = said(step, batches())
    assert len(found) == (microbatch is not None)
    assert_same_parameters(model, by_hand(make(), loss_fn, batches(), 8 if microbatch is None else 1))


@pytest.mark.parametrize("transforms", [(), CLIP], ids=["plain", "clip"])
def test_allowed_interaction_is_not_reported_by_the_recheck(transforms):
    step = sw.Step(encoder(), sw.sgd(LR), contrast, transforms=transforms, interacting="allow")
    assert said(step, batches()) == []


def test_a_broadcast_is_an_error_even_if_interaction_is_allowed():
    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1)

    step = sw.Step(mlp(), sw.sgd(LR), loss_fn, interacting="allow")
    with pytest.raises(sw.LossesError, match=r"broadcast to \(8, 8\)"):
        step.run(batches())


def test_bad_values():
    with pytest.raises(ValueError, match="interacting must be 'refuse' or 'allow'; found 'maybe'"):
        sw.Step(mlp(), sw.sgd(LR), squares, interacting="maybe")
    with pytest.raises(ValueError, match="recheck must be None or False with interacting='allow'; found 10"):
        sw.Step(mlp(), sw.sgd(LR), squares, interacting="allow", recheck=10)
    assert sw.Step(mlp(), sw.sgd(LR), squares, interacting="allow").config.settings()["interacting"] == "allow"


@cases
def test_the_error_names_a_remedy_that_helps(make, loss_fn):
    with pytest.raises(sw.SamplesInteractError, match=r", or pass interacting='allow' to sw.gradients, "):
        sw.Step(make(), sw.sgd(LR), loss_fn, transforms=CLIP, recheck=False).run(batches())
    sw.Step(make(), sw.sgd(LR), loss_fn, transforms=CLIP, recheck=False, interacting="allow").run(batches())


# ------------------------------------------------------------- mixup


def mixed(x, y, order, share):
    return share * x + (1 - share) * x[order], y, y[order], torch.full_like(y, share)


def losses_of_mixed(model, batch):
    x, y, other, share = batch
    h = model(x).squeeze(1)
    return share * (h - y).square() + (1 - share) * (h - other).square()


def mixup(order):
    def loss_fn(model, batch):
        share = float(torch.distributions.Beta(0.2, 0.2).sample())
        return losses_of_mixed(model, mixed(*batch, order(len(batch[0])), share))

    return loss_fn


ORDERS = {"flip": lambda n: torch.arange(n).flip(0), "random": torch.randperm}
orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@orders
@pytest.mark.parametrize("seed", range(5))
def test_mixing_samples_in_the_loss_function_is_refused(order, seed):
    step = sw.Step(mlp(), sw.sgd(LR), mixup(order), transforms=CLIP)
    data = batches()
    torch.manual_seed(seed)
    with pytest.raises(sw.SamplesInteractError, match=r"\(mixup\) in collate_fn, .* or pass interacting='allow'"):
        step.run(data)


@orders
def test_mixing_samples_in_the_loss_function_without_transforms_is_a_warning(order):
    (warning,) = said(sw.Step(mlp(), sw.sgd(LR), mixup(order)), batches())
    assert warning.startswith("samples depend on each other: sample 0 of 8 has loss")
    assert "pass interacting='allow'" in warning


@orders
@pytest.mark.parametrize("transforms", [(), CLIP], ids=["plain", "clip"])
def test_mixing_samples_can_be_allowed(order, transforms):
    step = sw.Step(mlp(), sw.sgd(LR), mixup(order), transforms=transforms, interacting="allow")
    assert said(step, batches()) == []


@orders
def test_mixing_samples_in_collate_fn_needs_no_permission(order):
    def collate(rows):
        x, y = default_collate(rows)
        return mixed(x, y, order(len(x)), 0.7)

    ((x, y),) = batches(updates=1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, collate_fn=collate)
    assert said(sw.Step(mlp(), sw.sgd(LR), losses_of_mixed, samples=6, transforms=CLIP), loader) == []


def test_noise_on_each_sample_is_no_interaction():
    def loss_fn(model, batch):
        x, y = batch
        return squares(model, (x + torch.randn_like(x), y + torch.randn(len(y)).double()))

    for seed in range(5):
        torch.manual_seed(seed)
        assert said(sw.Step(mlp(), sw.sgd(LR), loss_fn, transforms=CLIP), batches()) == []


@pytest.mark.parametrize("places", [range(8), range(7, -1, -1)], ids=["in order", "reversed"])
def test_random_numbers_whose_count_depends_on_the_data_are_no_interaction(places):
    def loss_fn(model, batch):
        x, y = batch
        noise = {i: torch.rand(1 + 20 * int(y[i] > 0)).mean().double() for i in places}
        return squares(model, (x, y + torch.stack([noise[i] for i in range(8)])))

    assert said(sw.Step(mlp(), sw.sgd(LR), loss_fn, transforms=CLIP), batches()) == []


@orders
def test_check_finds_mixed_samples(order):
    found = sw.check(mlp(), mixup(order), batches()[0])
    assert found.interacts and not found.ok
    assert "samples interact" in str(found)


def test_state_and_copies_keep_the_setting():
    step = sw.Step(encoder(), sw.sgd(LR), contrast, transforms=CLIP, interacting="allow")
    assert said(copy.deepcopy(step), batches()) == []
