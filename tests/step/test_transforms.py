"""Transforms in a step, against a loop: one backward pass a sample, then plain arithmetic."""

import math
from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from by_hand import LR, Window, clipped, close, counted, cut, descend, fitted, mlp, one_by_one, squared
from torch import nn
from unrestored import Unrestored

import samplewise as sw
from samplewise.transforms.transform import SampleTransform, SumTransform

# ------------------------------------------------------------- data, cut in many ways


def drawn(*shape):
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


DRAW = torch.Generator().manual_seed(3)
DATA = {
    "x": drawn(13, 4),
    "y": drawn(13, 3),
    "w": drawn(13).square(),  # weights
    "i": torch.randperm(13, generator=DRAW),  # numbers in the dataset
    "n": torch.randint(1, 6, (13,), generator=DRAW),  # counts
}
TABLE = drawn(13).square()  # a weight for each number, or for each place in the window

# loader batch, samples, microbatch
GRID = {
    "one piece": (5, None, None),
    "pieces of one batch": (13, None, 4),
    "several batches": (3, 7, None),
    "several batches in pieces": (4, 5, 2),
    "ends inside a batch": (13, 5, None),
    "one by one": (1, 5, 1),
}


def windows(batch, samples, microbatch):
    return cut(DATA, samples or batch)


# ------------------------------------------------------------- the loop


def loop(model, loss_fn, batches, rule):
    """Each window with its coefficients. `rule` says the coefficients and what is divided by."""
    for batch in batches:
        window = one_by_one(model, loss_fn, batch)
        c, below = rule(window)
        descend(model, window.grads, c, below)
        yield window, c


def agrees(transforms, rule, shape, loss_fn=squared, **options):
    """Runs the step and the loop over the same data, and compares what they did."""
    ours, theirs = mlp(), mlp()
    batch, samples, microbatch = shape
    transforms, data = fitted(transforms, TABLE, DATA, samples or batch)
    step = sw.Step(ours, sw.sgd(LR), loss_fn, samples, microbatch=microbatch, transforms=transforms, **options)
    updates = list(step.over(cut(data, batch)))
    wanted = list(loop(theirs, loss_fn, cut(data, samples or batch), rule))
    for update, (window, c) in zip(updates, wanted, strict=True):
        close(update.losses, window.losses)
        close(update.weights, c)
        assert update.loss == pytest.approx(float(window.losses.sum() / window.counts.sum()), rel=1e-10)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    return updates, wanted


# ------------------------------------------------------------- the rules, written out


def kept(values, largest=0, smallest=0, above=math.inf):
    order = sorted(range(len(values)), key=lambda k: float(values[k]))
    gone = set(order[:smallest]) | set(order[len(order) - largest :])
    return torch.tensor([float(k not in gone and v <= above) for k, v in enumerate(values)]).double()


def over_counts(coefficient):
    return lambda window: (coefficient(window), window.counts.sum())


def over_shares(coefficient):
    def rule(window):
        c = coefficient(window)
        return c, (c * window.counts).sum()

    return rule


def soft(losses):
    return torch.exp(-losses)


def long(norms, counts):
    return counts / (1 + norms)


def ranks(losses):
    return losses.argsort().argsort().double() + 1


def looked_at(batch, losses):
    return batch["x"][:, 0].square() + losses


# Some samples of every window point its way, and some do not.
REFERENCE = {name: g[[2, 6, 11]].mean(0) for name, g in one_by_one(mlp(), squared, DATA).grads.items()}
LENGTH = math.sqrt(sum(float(r.square().sum()) for r in REFERENCE.values()))


def clip_weigh_drop(window):
    """chain(clip(4.0), weight("w", renormalize=True), weight(norms), drop(largest=1))"""
    c1, c2 = clipped(window.norms, 4.0), window.batch["w"]
    c3 = 1 / (1 + c1 * c2 * window.norms)
    c4 = kept(c1 * c2 * c3 * window.norms, largest=1)
    return c1 * c2 * c3 * c4, (c2 * c4 * window.counts).sum()


def drop_then_weigh(window):
    """chain(drop(largest=1), weight("w"), weight(TABLE))"""
    keep = kept(window.norms, largest=1)
    return keep * window.batch["w"] * TABLE[: len(keep)], (keep * window.counts).sum()


def parts_then_whole(window):
    """chain(clip(2.0, by="parameter"), clip(2.5), drop(smallest=1))"""
    c = {name: clipped(n, 2.0) for name, n in window.parts.items()}
    left = torch.stack([c[name] * n for name, n in window.parts.items()]).square().sum(0).sqrt()
    whole = clipped(left, 2.5)
    keep = kept(left * whole, smallest=1)
    return {name: part * whole * keep for name, part in c.items()}, (keep * window.counts).sum()


def weigh_then_parts(window):
    """chain(weight("w"), clip(2.0, by="parameter"))"""
    w = window.batch["w"]
    return {name: w * clipped(w * n, 2.0) for name, n in window.parts.items()}, window.counts.sum()


def align_after_weight(window):
    """chain(weight(-1 or 1), align(kind="dot"), normalize())"""
    sign = torch.where(window.batch["w"] < 0.5, -1.0, 1.0).double()
    dots = (sign * window.dots(REFERENCE)).clamp(min=0)
    left = dots * window.norms
    return sign * dots * torch.where(left > 0, 1 / left, 0.0), window.counts.sum()


def signs(batch):
    return torch.where(batch["w"] < 0.5, -1.0, 1.0)


CASES = {
    "nothing": ((), over_counts(lambda w: torch.ones_like(w.losses))),
    "clip": (sw.clip(4.0), over_counts(lambda w: clipped(w.norms, 4.0))),
    "clip by parameter": (
        sw.clip(2.0, by="parameter"),
        over_counts(lambda w: {name: clipped(n, 2.0) for name, n in w.parts.items()}),
    ),
    "clip automatic": (sw.clip(4.0, mode="automatic"), over_counts(lambda w: 4.0 / (w.norms + 0.01))),
    "clip automatic by parameter, gamma": (
        sw.clip(4.0, by="parameter", mode="automatic", gamma=0.5),
        over_counts(lambda w: {name: 4.0 / (n + 0.5) for name, n in w.parts.items()}),
    ),
    "clip inf": (sw.clip(math.inf), over_counts(lambda w: torch.ones_like(w.losses))),
    "weight losses": (sw.weight(soft), over_counts(lambda w: torch.exp(-w.losses))),
    "weight norms, counts": (sw.weight(long), over_counts(lambda w: w.counts / (1 + w.norms))),
    "weight batch": (sw.weight(looked_at), over_counts(lambda w: w.batch["x"][:, 0] ** 2 + w.losses)),
    "weight window": (sw.weight(ranks, window=True), over_counts(lambda w: 1 + w.losses.argsort().argsort().double())),
    "weight tensor": (sw.weight(TABLE), over_counts(lambda w: TABLE[: len(w.losses)])),
    "weight tensor, index": (sw.weight(TABLE, index="i"), over_counts(lambda w: TABLE[w.batch["i"]])),
    "weight key": (sw.weight("w"), over_counts(lambda w: w.batch["w"])),
    "weight key, renormalize": (sw.weight("w", renormalize=True), over_shares(lambda w: w.batch["w"])),
    "weight window, renormalize": (
        sw.weight(ranks, window=True, renormalize=True),
        over_shares(lambda w: 1 + w.losses.argsort().argsort().double()),
    ),
    "drop largest": (sw.drop(largest=2), over_shares(lambda w: kept(w.norms, largest=2))),
    "drop both ends": (sw.drop(largest=1, smallest=1), over_shares(lambda w: kept(w.norms, 1, 1))),
    "drop quantile": (
        sw.drop(quantile=0.6),
        over_shares(lambda w: kept(w.norms, above=float(torch.quantile(w.norms, 0.6)))),
    ),
    "drop by losses": (sw.drop(smallest=1, score="losses"), over_shares(lambda w: kept(w.losses, smallest=1))),
    "normalize": (sw.normalize(), over_counts(lambda w: 1 / w.norms)),
    "normalize 2": (sw.normalize(2.0), over_counts(lambda w: 2 / w.norms)),
    "normalize mean": (sw.normalize("mean"), over_counts(lambda w: w.norms.mean() / w.norms)),
    "align": (
        sw.align(REFERENCE),
        over_counts(lambda w: (w.dots(REFERENCE) / w.norms / LENGTH).clamp(min=0)),
    ),
    "align by dot": (sw.align(REFERENCE, kind="dot"), over_counts(lambda w: w.dots(REFERENCE).clamp(min=0))),
    "align, renormalize": (
        sw.align(REFERENCE, renormalize=True),
        over_shares(lambda w: (w.dots(REFERENCE) / w.norms / LENGTH).clamp(min=0)),
    ),
    "clip, weights, drop": (
        [sw.clip(4.0), sw.weight("w", renormalize=True), lambda norms: 1 / (1 + norms), sw.drop(largest=1)],
        clip_weigh_drop,
    ),
    "drop, weight key, weight tensor": (
        sw.chain(sw.drop(largest=1), sw.weight("w"), sw.weight(TABLE)),
        drop_then_weigh,
    ),
    "clip by parameter, clip, drop": (
        sw.chain(sw.clip(2.0, by="parameter"), sw.clip(2.5), sw.drop(smallest=1)),
        parts_then_whole,
    ),
    "weight, clip by parameter": (sw.chain(sw.weight("w"), sw.clip(2.0, by="parameter")), weigh_then_parts),
    "weight, align, normalize": (
        sw.chain(signs, sw.align(REFERENCE, kind="dot"), sw.normalize()),
        align_after_weight,
    ),
}


@pytest.mark.sweep(1 / 12)
@pytest.mark.parametrize("loss_fn", [squared, counted])
@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize(("transforms", "rule"), CASES.values(), ids=CASES)
def test_the_same_parameters_as_the_loop(transforms, rule, shape, loss_fn):
    agrees(transforms, rule, shape, loss_fn)


def test_the_bounds_bite_some_samples_and_not_others():
    """Else the comparisons above would compare nothing."""
    window = one_by_one(mlp(), squared, DATA)
    assert 0 < int((window.norms > 4.0).sum()) < 13
    for norms in window.parts.values():
        assert int((norms > 2.0).sum()) < 13
    assert any((norms > 2.0).any() for norms in window.parts.values())
    assert 0 < int((window.dots(REFERENCE) > 0).sum()) < 13


# ------------------------------------------------------------- what an update says


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize("name", ["clip", "clip by parameter", "clip, weights, drop", "weight key"])
def test_norms_are_those_before_any_transform(name, shape):
    updates, wanted = agrees(*CASES[name], shape, record={"norms"})
    for update, (window, _) in zip(updates, wanted, strict=True):
        close(update.norms, window.norms)


def test_grad_norm_is_that_of_the_divided_sum():
    updates, wanted = agrees(*CASES["clip"], GRID["several batches in pieces"])
    window, c = wanted[0]
    whole = torch.cat([torch.tensordot(c, g, dims=1).flatten() for g in window.grads.values()]) / 5
    assert updates[0].grad_norm == pytest.approx(float(whole.norm()), rel=1e-10)


def test_max_grad_norm_comes_after_the_division():
    ours, theirs = mlp(), mlp()
    sw.Step(ours, sw.sgd(LR), squared, 13, microbatch=4, transforms=sw.clip(4.0), max_grad_norm=0.1).run([DATA])
    window = one_by_one(theirs, squared, DATA)
    c = clipped(window.norms, 4.0)
    norm = torch.cat([torch.tensordot(c, g, dims=1).flatten() for g in window.grads.values()]).norm() / 13
    assert norm > 0.1
    descend(theirs, window.grads, c * 0.1 / norm, 13)
    # torch's clip_grad_norm_ divides by norm + 1e-6
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=1e-6)


# ------------------------------------------------------------- batches of other kinds


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor


Pair = namedtuple("Pair", "x y w")


def of_place(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1)


def of_attribute(model, batch):
    return (model(batch.x) - batch.y).square().sum(1)


@pytest.mark.parametrize("shape", [(13, 5, 2), (4, 7, None)], ids=str)
@pytest.mark.parametrize(
    ("kind", "loss_fn", "key"),
    [
        (lambda b: (b["x"], b["y"], b["w"]), of_place, 2),
        (lambda b: (b["x"], b["y"], b["w"]), of_place, -1),
        (lambda b: Record(b["x"], b["y"], b["w"]), of_attribute, "w"),
        (lambda b: Pair(b["x"], b["y"], b["w"]), of_attribute, "w"),
        (lambda b: Pair(b["x"], b["y"], b["w"]), of_attribute, 2),
    ],
    ids=["tuple", "tuple from behind", "dataclass", "named tuple", "named tuple by place"],
)
def test_weights_in_batches_of_any_kind(kind, loss_fn, key, shape):
    ours, theirs = mlp(), mlp()
    batch, samples, microbatch = shape
    step = sw.Step(
        ours, sw.sgd(LR), loss_fn, samples, microbatch=microbatch, transforms=sw.weight(key, renormalize=True)
    )
    step.run([kind(b) for b in cut(DATA, batch)])
    list(loop(theirs, squared, windows(*shape), over_shares(lambda w: w.batch["w"])))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_a_table_looked_up_by_a_place_in_the_tuple():
    ours, theirs = mlp(), mlp()
    batches = [(b["i"], b["x"], b["y"]) for b in cut(DATA, 4)]
    sw.Step(
        ours, sw.sgd(LR), lambda m, b: of_place(m, b[1:]), 5, microbatch=2, transforms=sw.weight(TABLE, index=0)
    ).run(batches)
    list(loop(theirs, squared, cut(DATA, 5), over_counts(lambda w: TABLE[w.batch["i"]])))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_a_list_of_numbers_is_as_exact_as_a_tensor():
    data = {**DATA, "w": DATA["w"].tolist()}
    ours, theirs = mlp(), mlp()
    sw.Step(ours, sw.sgd(LR), squared, 5, microbatch=2, transforms=sw.weight("w")).run(cut(data, 4))
    list(loop(theirs, squared, cut(DATA, 5), over_counts(lambda w: w.batch["w"])))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_whole_numbers_and_truth_values_are_weights():
    ours, theirs = mlp(), mlp()
    sw.Step(ours, sw.sgd(LR), squared, 5, microbatch=2, transforms=[sw.weight("n"), lambda norms: norms > 4.0]).run(
        cut(DATA, 4)
    )
    list(
        loop(
            theirs, squared, cut(DATA, 5), over_counts(lambda w: w.batch["n"] * (w.batch["n"] * w.norms > 4.0).double())
        )
    )
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


# ------------------------------------------------------------- weights of zero


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
def test_a_weight_of_zero_leaves_the_sample_out(shape, renormalize):
    mask = (torch.arange(13) % 3 != 1).double()
    over = over_shares if renormalize else over_counts
    weight = sw.weight(mask, index="i", renormalize=renormalize)
    agrees(weight, over(lambda w: mask[w.batch["i"]]), shape, counted)
    agrees(weight, over(lambda w: mask[w.batch["i"]]), shape, counted, record={"norms"})


def weights_of(first, rest):
    """Weights that are the same within an update, and others from the second on."""
    return {**DATA, "w": torch.cat([torch.full((5,), first), torch.full((8,), rest)]).double()}


@pytest.mark.parametrize("microbatch", [None, 2])
def test_first_weights_all_zero(microbatch):
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, 5, microbatch=microbatch, transforms=sw.weight("w"))
    message = (
        r"at least one sample of the first update must have a nonzero weight; found none with chain\(weight\('w'\)"
    )
    with pytest.raises(sw.TransformError, match=message):
        step.run([weights_of(0.0, 1.0)])
    close(dict(model.named_parameters()), dict(mlp().named_parameters()))


def test_first_weights_all_zero_by_parameter():
    step = sw.Step(mlp(), sw.sgd(LR), squared, transforms=[lambda losses: losses * 0, sw.clip(1.0, by="parameter")])
    with pytest.raises(sw.TransformError, match="at least one sample of the first update must have a nonzero weight"):
        step(DATA)


def test_first_gradients_clipped_to_nothing():
    with pytest.raises(sw.TransformError, match=r"found none with chain\(clip\(0.0\)\)"):
        sw.Step(mlp(), sw.sgd(LR), squared, transforms=sw.clip(0.0))(DATA)


def test_later_weights_all_zero_change_nothing():
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, 5, transforms=sw.weight("w"))
    after = [{name: p.detach().clone() for name, p in model.named_parameters()} for _ in step.over([weights_of(1, 0)])]
    assert len(after) == 3
    close(after[1], after[0], rtol=0, atol=0)


def test_weights_that_sum_to_zero_cannot_be_divided_by():
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, 5, transforms=sw.weight("w", renormalize=True))
    updates = step.over([weights_of(1, 0)])
    next(updates)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(sw.NonFiniteLossError, match="its counts, or the weights of its samples, sum to 0"):
        next(updates)
    close(dict(model.named_parameters()), before, rtol=0, atol=0)


ZEROS = (sw.clip(1.0), sw.normalize(), sw.normalize("mean"), sw.align(REFERENCE), sw.drop(largest=1))


@pytest.mark.parametrize("transform", ZEROS, ids=repr)
def test_a_gradient_of_zero(transform):
    """A sample that is masked out by its loss: no 0/0 comes up, and it changes nothing."""

    def masked(model, batch):
        return squared(model, batch) * (batch["i"] != 7)

    ours = mlp()
    (update,) = sw.Step(ours, sw.sgd(LR), masked, 13, microbatch=4, transforms=[transform, lambda norms: 1 + norms])(
        DATA
    )
    (place,) = (DATA["i"] == 7).nonzero().tolist()[0]
    assert update.norms[place] == 0
    assert update.weights.isfinite().all()
    if "clip" in repr(transform):
        assert update.weights[place] == 1
    if "normalize" in repr(transform) or "align" in repr(transform):
        assert update.weights[place] == 0
    assert all(p.isfinite().all() for p in ours.parameters())


# ------------------------------------------------------------- align


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
def test_a_reference_is_made_once_per_window(shape):
    """And from the parameters as they are then."""
    clean = {key: values[:4] for key, values in DATA.items()}
    ours, theirs, calls = mlp(), mlp(), []

    def reference():
        calls.append(1)
        return sw.gradients(squared(ours, clean), ours).mean()

    def cosine(window):
        mean = {name: g.mean(0) for name, g in one_by_one(theirs, squared, clean).grads.items()}
        length = torch.cat([m.flatten() for m in mean.values()]).norm()
        return (window.dots(mean) / window.norms / length).clamp(min=0), len(window.losses)

    batch, samples, microbatch = shape
    updates = sw.Step(ours, sw.sgd(LR), squared, samples, microbatch=microbatch, transforms=sw.align(reference)).run(
        cut(DATA, batch)
    )
    list(loop(theirs, squared, windows(*shape), cosine))
    assert len(calls) == updates.updates
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
def test_a_reference_may_be_made_by_backward(shape):
    """Gradients that it leaves behind are none of the update's."""
    ours, theirs = mlp(), mlp()

    def reference():
        ours.zero_grad()
        squared(ours, DATA).mean().backward()
        return {name: p.grad.clone() for name, p in ours.named_parameters()}

    def dot(window):
        mean = {name: g.mean(0) for name, g in one_by_one(theirs, squared, DATA).grads.items()}
        return window.dots(mean).clamp(min=0), len(window.losses)

    batch, samples, microbatch = shape
    aligned = sw.align(reference, kind="dot")
    sw.Step(ours, sw.sgd(0.01 * LR), squared, samples, microbatch=microbatch, transforms=aligned).run(cut(DATA, batch))
    list(loop(theirs, squared, windows(*shape), lambda w: (0.01 * dot(w)[0], dot(w)[1])))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("kind", ["cosine", "dot"])
def test_samples_that_point_away_get_nothing(kind):
    window = one_by_one(mlp(), squared, DATA)
    towards = {name: g[5] for name, g in window.grads.items()}
    (update,) = sw.Step(mlp(), sw.sgd(LR), squared, None, microbatch=4, transforms=sw.align(towards, kind=kind))(DATA)
    away = window.dots(towards) < 0
    assert 0 < int(away.sum()) < 13
    assert torch.equal(update.weights == 0, away)
    if kind == "cosine":
        assert float(update.weights[5]) == pytest.approx(1.0, rel=1e-10)


@pytest.mark.parametrize("reference", [{}, {"0.weight": torch.ones(6, 4)}, {"0.weight": torch.ones(4, 6)}])
def test_a_reference_for_another_model(reference):
    step = sw.Step(mlp(), sw.sgd(LR), squared, transforms=sw.align(reference))
    with pytest.raises(
        sw.TransformError, match=r"of the same name and shape for every trained parameter; found none for '0\."
    ):
        step(DATA)


def test_a_reference_of_zero_weighs_nothing():
    zero = {name: torch.zeros_like(p) for name, p in mlp().named_parameters()}
    with pytest.raises(sw.TransformError, match=r"found none with chain\(align\(reference\)\)"):
        sw.Step(mlp(), sw.sgd(LR), squared, transforms=sw.align(zero))(DATA)


# ------------------------------------------------------------- noise


def noisy(model, loss_fn, batches, coefficient, std, draw):
    """As the loop, with noise on the sum."""
    for batch in batches:
        window = one_by_one(model, loss_fn, batch)
        c = coefficient(window)
        for name, p in model.named_parameters():
            with torch.no_grad():
                p -= LR * (torch.tensordot(c, window.grads[name], dims=1) + std * draw(p)) / window.counts.sum()


@pytest.mark.parametrize("loss_fn", [squared, counted])
@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize("bound", [None, 4.0])
def test_noise_comes_once_on_the_sum_before_it_is_divided(bound, shape, loss_fn):
    ours, theirs = mlp(), mlp()
    batch, samples, microbatch = shape
    transforms = [sw.noise(0.5)] if bound is None else [sw.clip(bound), sw.noise(0.5)]
    torch.manual_seed(7)
    sw.Step(ours, sw.sgd(LR), loss_fn, samples, microbatch=microbatch, transforms=transforms).run(cut(DATA, batch))
    torch.manual_seed(7)
    noisy(theirs, loss_fn, windows(*shape), lambda w: clipped(w.norms, bound or math.inf), 0.5, torch.randn_like)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_noise_from_a_generator_of_its_own():
    ours, theirs = mlp(), mlp()
    before = torch.get_rng_state()
    own = torch.Generator().manual_seed(11)
    sw.Step(ours, sw.sgd(LR), squared, 5, microbatch=2, transforms=sw.noise(0.5, generator=own)).run(cut(DATA, 4))
    assert torch.equal(before, torch.get_rng_state())
    again = torch.Generator().manual_seed(11)

    def draw(p):
        return torch.randn(p.shape, dtype=p.dtype, generator=again)

    noisy(theirs, squared, cut(DATA, 5), lambda w: torch.ones_like(w.losses), 0.5, draw)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


class UnusedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("transforms", [[sw.noise(0.5)], [sw.clip(1.0), sw.noise(0.5)]], ids=str)
def test_noise_on_parameters_that_the_loss_does_not_reach(transforms):
    model = UnusedLayer()
    before = model.unused.weight.detach().clone()
    step = sw.Step(model, sw.sgd(LR), squared, 13, microbatch=4, transforms=transforms)
    torch.manual_seed(7)
    step(DATA)  # no word of parameters that are not reached: noise moves them
    torch.manual_seed(7)
    drawn = [torch.randn_like(p) for p in model.parameters()][2]
    close(model.unused.weight, before - LR * 0.5 * drawn / 13)


def test_two_noises():
    ours, theirs = mlp(), mlp()
    torch.manual_seed(7)
    sw.Step(ours, sw.sgd(LR), squared, 13, microbatch=4, transforms=[sw.noise(0.5), sw.noise(2.0)]).run([DATA])
    torch.manual_seed(7)
    first, second = ([torch.randn_like(p) for p in theirs.parameters()] for _ in range(2))
    both = iter([a + 4.0 * b for a, b in zip(first, second, strict=True)])
    noisy(theirs, squared, [DATA], lambda w: torch.ones_like(w.losses), 0.5, lambda p: next(both))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_a_sum_transform_of_ones_own():
    """Sees every parameter's sum, in the optimizer's order, once per update."""
    seen = []

    def act(sums):
        seen.append([s.clone() for s in sums])
        for total in sums:
            total.mul_(2)

    ours, theirs = mlp(), mlp()
    double = SumTransform("double()", "Σ g", act)
    sw.Step(ours, sw.sgd(LR), squared, 5, microbatch=2, transforms=[sw.clip(4.0), double]).run(cut(DATA, 4))
    wanted = list(loop(theirs, squared, cut(DATA, 5), lambda w: (2 * clipped(w.norms, 4.0), len(w.losses))))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert len(seen) == 3
    window, c = wanted[0]
    close(seen[0], [torch.tensordot(c / 2, g, dims=1) for g in window.grads.values()])


# ------------------------------------------------------------- two passes over a window


def with_dropout():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)).double()


def rows_in_one_pass(model, loss_fn, pieces):
    """Each sample's loss and gradient, from one forward pass a piece."""
    losses, rows = [], []
    for piece in pieces:
        found = loss_fn(model, piece)
        rows += [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in found]
        losses.append(found.detach())
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))
    return Window(torch.cat(losses), torch.ones(len(rows)).double(), grads, {})


WINDOWED = {
    "drop": (sw.drop(largest=3), lambda w: kept(w.norms, largest=3)),
    "normalize": (sw.normalize("mean"), lambda w: w.norms.mean() / w.norms),
    "by parameter": (
        [sw.drop(largest=3), sw.clip(0.5, by="parameter")],
        lambda w: {name: clipped(n * kept(w.norms, 3), 0.5) * kept(w.norms, largest=3) for name, n in w.parts.items()},
    ),
}


@pytest.mark.parametrize(("transforms", "coefficient"), WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("shape", [(13, None, 4), (3, 13, None), (5, 13, 2), (13, None, None)], ids=str)
def test_both_passes_see_the_same_dropout(shape, transforms, coefficient):
    batch, samples, microbatch = shape
    ours, theirs = with_dropout(), with_dropout()
    step = sw.Step(ours, sw.sgd(LR), squared, samples, microbatch=microbatch, transforms=transforms)
    torch.manual_seed(9)
    (update,) = step.over(cut(DATA, batch))
    after = torch.get_rng_state()

    torch.manual_seed(9)
    pieces = [piece for b in cut(DATA, batch) for piece in cut(b, microbatch or batch)]
    window = rows_in_one_pass(theirs, squared, pieces)
    assert torch.equal(after, torch.get_rng_state()), "one pass takes fewer random numbers, or more"
    close(update.losses, window.losses)
    c = coefficient(window)
    below = kept(window.norms, largest=3).sum() if "drop" in repr(step.transforms) else 13
    descend(theirs, window.grads, c, below)
    close(update.weights, c)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_a_random_reference_does_not_come_between_the_passes():
    """A reference computed with dropout takes random numbers; samples must see the same masks in both passes."""
    ours, seen = with_dropout(), Unrestored()

    def reference():
        return sw.gradients(squared(ours, DATA), ours).mean()

    def watched(model, batch):
        hidden = model[1](model[0](batch["x"]))
        seen.append((hidden == 0).clone())
        return (model[3](model[2](hidden)) - batch["y"]).square().sum(1)

    step = sw.Step(
        ours,
        sw.sgd(LR),
        watched,
        None,
        microbatch=4,
        transforms=[sw.align(reference), sw.drop(largest=3)],
        recheck=False,
    )
    step(DATA)
    masks = seen.take()
    assert len(masks) == 8
    assert all(torch.equal(a, b) for a, b in zip(masks[:4], masks[4:], strict=True))


class Counting(nn.Module):
    """A loss that depends on how many pieces have been seen, and counts them."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()).double())

    def forward(self, x):
        return self.inner(x)


def aging(model, batch):
    model.seen += 1
    return squared(model, batch) * model.seen


@pytest.mark.parametrize("transforms", [sw.drop(largest=3), sw.clip(4.0), ()], ids=repr)
def test_buffers_advance_once_per_piece(transforms):
    ours, theirs = Counting(), Counting()
    step = sw.Step(ours, sw.sgd(LR), aging, 7, microbatch=3, transforms=transforms)
    updates = list(step.over(cut(DATA, 5)))
    for update, sizes in zip(updates, [(0, 3, 5, 7), (7, 10, 13)], strict=True):
        pieces = [{k: v[a:b] for k, v in DATA.items()} for a, b in pairwise(sizes)]
        window = rows_in_one_pass(theirs, aging, pieces)
        close(update.losses, window.losses)
        keep = kept(window.norms, largest=3) if "drop" in repr(step.transforms) else torch.ones_like(window.losses)
        c = clipped(window.norms, 4.0) if "clip" in repr(step.transforms) else keep
        descend(theirs, window.grads, c, keep.sum())
    assert ours.seen == theirs.seen == 5
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


# ------------------------------------------------------------- answers that are no coefficients


def own(answer, **options):
    return SampleTransform("own()", "c", answer, **options)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda losses: losses.sum(), r"must return one coefficient per sample, a tensor of shape \(4,\); found"),
        (lambda losses: 1.0, r"weight\(function\) must return .*found float"),
        (lambda losses: losses[:, None], r"found shape \(4, 1\)"),
        (lambda losses: losses / 0, r"must return finite coefficients; found inf at sample 0"),
        (sw.weight("x"), r"weight\('x'\) must return one coefficient per sample.*found shape \(4, 4\)"),
        (
            own(lambda n: n.losses, by_parameter=True),
            r"own\(\) must return a dict of parameter names and tensors \(B,\); found Tensor",
        ),
        (
            own(lambda n: {"0.bias": n.losses[:2]}, by_parameter=True),
            r"one coefficient per sample for '0.bias', a tensor of shape \(4,\); found shape \(2,\)",
        ),
        (own(lambda n: n.norms), "must declare the values it reads; found that it reads norms without"),
    ],
)
def test_answers_that_are_no_coefficients(transform, message):
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, 13, microbatch=4, transforms=transform)
    with pytest.raises(sw.TransformError, match=message):
        step(DATA)
    close(dict(model.named_parameters()), dict(mlp().named_parameters()), rtol=0, atol=0)


def last_layer_when_hard(numbers):
    """Samples of a large loss train the last layer alone. It needs no norms."""
    easy = (numbers.losses < 3).double()
    return {name: torch.ones_like(easy) if name.startswith("2.") else easy for name, _ in mlp().named_parameters()}


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize("window", [False, True])
def test_a_dict_by_parameter_of_ones_own(window, shape):
    transform = own(last_layer_when_hard, needs=frozenset({"losses"}), by_parameter=True, window=window)
    agrees(transform, over_counts(last_layer_when_hard), shape)


def test_coefficients_for_some_parameters_only():
    step = sw.Step(mlp(), sw.sgd(LR), squared, transforms=own(lambda n: {"0.bias": n.losses}, by_parameter=True))
    with pytest.raises(sw.SamplewiseError, match=r"0\.weight"):
        step(DATA)


def test_a_table_of_weights_shorter_than_the_window():
    message = r"weight\(tensor of 6\) must have one value for each sample of the window; found a window of at least 8"
    with pytest.raises(sw.TransformError, match=message + r".*samples=.*index="):
        sw.Step(mlp(), sw.sgd(LR), squared, 13, microbatch=4, transforms=sw.weight(TABLE[:6]))(DATA)


def test_weights_that_are_not_in_the_batch():
    with pytest.raises(sw.BatchError, match="the batch must hold 'weights'; found keys 'x', 'y', 'w', 'i', 'n'"):
        sw.Step(mlp(), sw.sgd(LR), squared, transforms=sw.weight("weights"))(DATA)


def test_weights_that_are_no_numbers():
    step = sw.Step(mlp(), sw.sgd(LR), squared, transforms=sw.weight("name"))
    with pytest.raises(sw.TransformError, match=r"batch\['name'\] must hold one weight per sample; found list"):
        step({**DATA, "name": ["a"] * 13})


def test_one_transform_a_list_or_a_chain():
    found = []
    for transforms in (sw.clip(4.0), [sw.clip(4.0)], sw.chain(sw.clip(4.0)), (t for t in [sw.clip(4.0)])):
        model = mlp()
        sw.Step(model, sw.sgd(LR), squared, 5, microbatch=2, transforms=transforms).run(cut(DATA, 4))
        found.append(dict(model.named_parameters()))
    assert len(found) == 4
    for other in found[1:]:
        close(other, found[0], rtol=0, atol=0)


def test_an_optimizer_sees_the_same_gradients():
    ours, theirs = mlp(), mlp()
    adam = torch.optim.AdamW(ours.parameters(), lr=0.01)
    sw.Step(ours, adam, counted, 5, microbatch=2, transforms=[sw.drop(largest=1), sw.clip(4.0)]).run(cut(DATA, 4))
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for batch in cut(DATA, 5):
        window = one_by_one(theirs, counted, batch)
        keep = kept(window.norms, largest=1)
        c = clipped(keep * window.norms, 4.0)
        for name, p in theirs.named_parameters():
            p.grad = torch.tensordot(c * keep, window.grads[name], dims=1) / (keep * window.counts).sum()
        adam.step()
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_by_hand():
    ours, theirs = mlp(), mlp()
    step = sw.Step(ours, sw.sgd(LR), counted, 7, microbatch=2, transforms=[sw.drop(largest=1), sw.clip(4.0)])
    assert [len(step(batch)) for batch in cut(DATA, 4)] == [0, 1, 0, 0]
    assert step.flush().samples == 6
    assert step.flush() is None
    for batch in cut(DATA, 4):
        step.accumulate(batch)
    assert step.apply().samples == 13

    def rule(window):
        keep = kept(window.norms, largest=1)
        return keep * clipped(keep * window.norms, 4.0), (keep * window.counts).sum()

    list(loop(theirs, counted, [*cut(DATA, 7), DATA], rule))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_ragged_ends(tail):
    ours, theirs = mlp(), mlp()
    step = sw.Step(ours, sw.sgd(LR), counted, 5, microbatch=2, transforms=sw.drop(largest=1), tail=tail)
    for _ in range(2):
        step.run(cut(DATA, 4))
    twice = {key: torch.cat([values, values]) for key, values in DATA.items()}
    batches = cut(twice, 5)[:5] if tail == "carry" else cut(DATA, 5)[:2] * 2
    list(loop(theirs, counted, batches, over_shares(lambda w: kept(w.norms, largest=1))))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


# ------------------------------------------------------------- a tensor of another length than the window


def of_rows(batch):
    return (batch["i"] % 4).tolist()


LENGTHS = {
    "longer": (20, dict(samples=5, tail="drop")),
    "one more": (6, dict(samples=5, tail="drop")),
    "one more, in pieces": (6, dict(samples=5, microbatch=2, tail="drop")),
    "of all rows": (13, dict(samples=5, microbatch=3)),
    "shorter": (4, dict(samples=5, microbatch=3)),
    "of one row": (1, dict(samples=5)),
    "last window": (5, dict(samples=5, tail="update")),
    "last window in pieces": (5, dict(samples=5, microbatch=2, tail="update")),
    "one batch": (20, {}),
}


@pytest.mark.sweep(1 / 6)
@pytest.mark.filterwarnings("ignore:updates stay uncompiled")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("after", [[], [sw.clip(1.0)], [sw.normalize("mean")]], ids=["", "clip", "mean"])
@pytest.mark.parametrize(("length", "options"), LENGTHS.values(), ids=LENGTHS)
def test_a_tensor_of_weights_must_have_the_length_of_the_window(length, options, after, compile):
    """It was cut off, so that every window used its first values."""
    model = mlp()
    step = sw.Step(
        model, sw.sgd(LR), squared, transforms=[sw.weight(TABLE.new_ones(length)), *after], compile=compile, **options
    )
    whole = length == options.get("samples")
    updates = step.over([DATA])
    for _ in range(2 if whole else 0):
        next(updates)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(sw.TransformError, match=rf"weight\(tensor of {length}\) must have one value.*index="):
        next(updates)
    close(dict(model.named_parameters()), before, rtol=0, atol=0)
    assert step.counters.updates == (2 if whole else 0)
    assert not step._has_pending_samples


def test_accumulated_samples_are_counted_for_a_tensor_of_weights():
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, transforms=sw.weight(TABLE))
    for batch in cut(DATA, 4)[:-1]:
        step.accumulate(batch)
    with pytest.raises(sw.TransformError, match=r"found a window of 12 samples\. Pass index="):
        step.apply()
    for batch in cut(DATA, 4):
        step.accumulate(batch)
    close(step.apply().weights, TABLE)


def test_flushed_samples_are_counted_for_a_tensor_of_weights():
    step = sw.Step(mlp(), sw.sgd(LR), squared, samples=10, transforms=sw.weight(TABLE[:10]))
    step(DATA)
    with pytest.raises(sw.TransformError, match="found a window of 3 samples"):
        step.flush()


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("length", [3, 5, 13])
def test_a_tensor_of_weights_after_a_group_must_have_one_value_for_each_group(length, microbatch):
    transforms = [sw.group(of_rows), sw.weight(TABLE[:length])]
    step = sw.Step(mlp(), sw.sgd(LR), squared, transforms=transforms, microbatch=microbatch)
    with pytest.raises(sw.TransformError, match=r"each group of the window; found a window of (4 groups|at least 4)"):
        step(DATA)


def test_a_tensor_of_weights_in_a_restored_window():
    def make():
        return sw.Step(mlp(), sw.sgd(LR), squared, samples=13, transforms=sw.weight(TABLE))

    first, *others = cut(DATA, 4)
    before = make()
    before(first)
    step = make()
    step.load_state_dict(before.state_dict())
    (update,) = [update for batch in others for update in step(batch)]
    close(update.weights, TABLE)
