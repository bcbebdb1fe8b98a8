"""Groups of samples, against a loop: one backward pass a sample, summed group by group."""

import pytest
import torch
from by_hand import LR, Window, clipped, close, counted, cut, descend, fitted, mlp, one_by_one, squared
from torch import nn
from unrestored import Unrestored

import samplewise as sw

# Bounds are small here so that every sample is clipped.
pytestmark = pytest.mark.filterwarnings("ignore:every weight of the first update")

# ------------------------------------------------------------- data


def drawn(*shape):
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


DRAW = torch.Generator().manual_seed(3)
USERS = torch.tensor([7, 4, 7, 7, 9, 4, 7, 9, 7, 4, 11, 7, 9])  # one of six samples, one of one
DATA = {
    "x": drawn(13, 4),
    "y": drawn(13, 3),
    "w": drawn(13).square(),
    "n": torch.randint(1, 6, (13,), generator=DRAW),
    "user": USERS,
    "name": [f"user {k}" for k in USERS.tolist()],
}

TABLE = drawn(13).square()  # a weight for each place in the window

# loader batch, samples, microbatch
GRID = {
    "one piece": (5, None, None),
    "pieces of one batch": (13, None, 4),
    "several batches": (3, 7, None),
    "several batches in pieces": (4, 7, 2),
    "ends inside a batch": (13, 7, None),
    "one by one": (1, 13, 1),
}


# ------------------------------------------------------------- the loop


def in_groups(rows, own, shares):
    """Rows of groups instead of samples, and the place of each sample's group in them."""
    users = rows.batch["user"].tolist()
    owner = torch.tensor([list(dict.fromkeys(users)).index(user) for user in users])
    member = (owner == torch.arange(int(owner.max()) + 1)[:, None]).double()  # (groups, B)
    grads = {name: torch.tensordot(member * own, g, dims=1) for name, g in rows.grads.items()}
    return Window(member @ (own * rows.losses), member @ shares, grads, None), owner


def loop(model, loss_fn, batches, of_samples, of_groups):
    """of_samples(rows) -> coefficients, shares of the denominator; of_groups(rows) likewise."""
    for batch in batches:
        rows = one_by_one(model, loss_fn, batch)
        own, shares = of_samples(rows)
        groups, owner = in_groups(rows, own, shares)
        c, below = of_groups(groups)
        descend(model, groups.grads, c, below)
        whole = {name: own * part[owner] for name, part in c.items()} if isinstance(c, dict) else own * c[owner]
        yield rows, whole


def agrees(transforms, of_samples, of_groups, shape, loss_fn=squared, data=DATA, **options):
    ours, theirs = mlp(), mlp()
    batch, samples, microbatch = shape
    transforms, data = fitted(transforms, TABLE, data, samples or batch)
    rows = len(data["x"])
    step = sw.Step(ours, sw.sgd(LR), loss_fn, samples, microbatch=microbatch, transforms=transforms, **options)
    updates = list(step.over(cut(data, batch)))
    of_loop = {name: column[:rows] for name, column in DATA.items()}
    wanted = list(loop(theirs, loss_fn, cut(of_loop, samples or batch), of_samples, of_groups))
    for update, (rows, c) in zip(updates, wanted, strict=True):
        close(update.losses, rows.losses)
        close(update.weights, c)
        assert update.samples == len(rows.losses)
        assert update.loss == pytest.approx(float(rows.losses.sum() / rows.counts.sum()), rel=1e-10)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    return updates, wanted


# ------------------------------------------------------------- the rules, written out


def as_they_are(rows):
    return torch.ones_like(rows.losses), rows.counts


def clip_samples(rows):
    return clipped(rows.norms, 4.0), rows.counts


def weigh(rows):
    return rows.batch["w"], rows.batch["w"] * rows.counts


def weigh_by_place(rows):
    return TABLE[: len(rows.losses)], rows.counts


def drop_two_samples(rows):
    keep = torch.ones_like(rows.losses)
    keep[rows.losses.argsort()[-2:]] = 0
    return keep, keep * rows.counts


def clip_groups(rows):
    return clipped(rows.norms, 11.0), rows.counts.sum()


def clip_parts_of_groups(rows):
    return {name: clipped(lengths, 3.0) for name, lengths in rows.parts.items()}, rows.counts.sum()


def drop_a_group(rows):
    keep = torch.ones_like(rows.losses)
    keep[rows.norms.argmax()] = 0
    return keep, (keep * rows.counts).sum()


def clip_then_average(rows):
    """chain(clip(11.0), normalize("mean"))"""
    c = clipped(rows.norms, 11.0)
    left = c * rows.norms
    return c * left.mean() / left, rows.counts.sum()


def weigh_groups(rows):
    """weight(per_group, renormalize=True)"""
    c = rows.losses / rows.counts / (1 + rows.norms)
    return c, (c * rows.counts).sum()


def per_group(losses, counts, norms):
    return losses / counts / (1 + norms)


def average(rows):
    return rows.norms.mean() / rows.norms, rows.counts.sum()


REFERENCE = {name: g[8] for name, g in one_by_one(mlp(), squared, DATA).grads.items()}


def align_groups(rows):
    length = torch.cat([r.flatten() for r in REFERENCE.values()]).norm()
    return (rows.dots(REFERENCE) / rows.norms / length).clamp(min=0), rows.counts.sum()


def none(rows):
    return torch.ones_like(rows.losses), rows.counts.sum()


BY = sw.group("user")
CASES = {
    "group": (BY, as_they_are, none),
    "group, clip": (sw.chain(BY, sw.clip(11.0)), as_they_are, clip_groups),
    "group, clip by parameter": (sw.chain(BY, sw.clip(3.0, by="parameter")), as_they_are, clip_parts_of_groups),
    "group, drop": (sw.chain(BY, sw.drop(largest=1)), as_they_are, drop_a_group),
    "group, clip, normalize": (sw.chain(BY, sw.clip(11.0), sw.normalize("mean")), as_they_are, clip_then_average),
    "group, weight": (sw.chain(BY, sw.weight(per_group, renormalize=True)), as_they_are, weigh_groups),
    "group, normalize": (sw.chain(BY, sw.normalize("mean")), as_they_are, average),
    "group, align": (sw.chain(BY, sw.align(REFERENCE)), as_they_are, align_groups),
    "clip, group, clip": (sw.chain(sw.clip(4.0), BY, sw.clip(11.0)), clip_samples, clip_groups),
    "weight, group, clip": (sw.chain(sw.weight("w", renormalize=True), BY, sw.clip(11.0)), weigh, clip_groups),
    "weight, group, weight": (
        sw.chain(sw.weight("w", renormalize=True), BY, sw.weight(per_group, renormalize=True)),
        weigh,
        weigh_groups,
    ),
    "weight tensor, group, clip": (sw.chain(sw.weight(TABLE), BY, sw.clip(11.0)), weigh_by_place, clip_groups),
    "weight, group, drop": (sw.chain(sw.weight("w", renormalize=True), BY, sw.drop(largest=1)), weigh, drop_a_group),
    "drop, group, clip by parameter": (
        sw.chain(sw.drop(largest=2, score="losses"), BY, sw.clip(3.0, by="parameter")),
        drop_two_samples,
        clip_parts_of_groups,
    ),
}


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("loss_fn", [squared, counted])
@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize(("transforms", "of_samples", "of_groups"), CASES.values(), ids=CASES)
def test_the_same_parameters_as_the_loop(transforms, of_samples, of_groups, shape, loss_fn):
    agrees(transforms, of_samples, of_groups, shape, loss_fn)


def test_the_bounds_bite_some_groups_and_not_others():
    """Else the comparisons above would compare nothing."""
    rows = one_by_one(mlp(), squared, DATA)
    groups, _ = in_groups(rows, *as_they_are(rows))
    assert 0 < int((groups.norms > 11.0).sum()) < 4
    assert 0 < int((rows.norms > 4.0).sum()) < 13
    over = torch.stack([lengths > 3.0 for lengths in groups.parts.values()])
    assert over.any() and not over.all()
    assert 0 < int((groups.dots(REFERENCE) > 0).sum()) < 4


# ------------------------------------------------------------- keys


def shouted(batch):
    return [name.upper() for name in batch["name"]]


KEYS = {
    "tensor": "user",
    "strings": "name",
    "function": shouted,
    "function that returns a tensor": lambda batch: batch["user"] * 2,
    "function that returns a tuple": lambda batch: tuple(batch["name"]),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("shape", [(13, None, None), (4, 7, 2)], ids=str)
def test_keys_of_any_kind(key, shape):
    agrees(sw.chain(sw.group(key), sw.clip(11.0)), as_they_are, clip_groups, shape)


@pytest.mark.parametrize("key", [2, -1], ids=str)
def test_a_place_in_the_tuple(key):
    ours, theirs = mlp(), mlp()
    step = sw.Step(
        ours,
        sw.sgd(LR),
        lambda m, b: squared(m, {"x": b[0], "y": b[1]}),
        7,
        microbatch=2,
        transforms=[sw.group(key), sw.clip(11.0)],
    )
    step.run([(b["x"], b["y"], b["user"]) for b in cut(DATA, 4)])
    list(loop(theirs, squared, cut(DATA, 7), as_they_are, clip_groups))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
def test_each_sample_its_own_group(shape):
    """Then groups are samples."""
    data = {**DATA, "user": torch.arange(13)}
    ours, theirs = mlp(), mlp()
    batch, samples, microbatch = shape
    sw.Step(ours, sw.sgd(LR), counted, samples, microbatch=microbatch, transforms=[BY, sw.clip(4.0)]).run(
        cut(data, batch)
    )
    sw.Step(theirs, sw.sgd(LR), counted, samples, microbatch=microbatch, transforms=sw.clip(4.0)).run(cut(data, batch))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("shape", [(13, None, None), (4, 7, 2)], ids=str)
@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("nobody", sw.BatchError, "the batch must hold 'nobody'; found keys 'x', 'y', 'w', 'n', 'user', 'name'"),
        ("x", sw.TransformError, r"group\('x'\) must have one name or number per sample; found a list"),
        (lambda batch: ["a"], sw.TransformError, r"group must give one key per sample; found . keys? for \d+ samples"),
    ],
)
def test_keys_that_are_none(key, error, message, shape):
    batch, samples, microbatch = shape
    model = mlp()
    with pytest.raises(error, match=message):
        sw.Step(model, sw.sgd(LR), squared, samples, microbatch=microbatch, transforms=sw.group(key)).run(
            cut(DATA, batch)
        )
    close(dict(model.named_parameters()), dict(mlp().named_parameters()), rtol=0, atol=0)


# ------------------------------------------------------------- what an update says


@pytest.mark.parametrize("shape", GRID.values(), ids=GRID)
@pytest.mark.parametrize("name", ["group, clip", "clip, group, clip", "group, drop"])
def test_norms_are_those_of_samples(name, shape):
    updates, wanted = agrees(*CASES[name], shape, record={"norms"})
    for update, (rows, _) in zip(updates, wanted, strict=True):
        close(update.norms, rows.norms)


# ------------------------------------------------------------- however the window is cut


def cut_makes_no_difference(transforms, loss_fn=squared):
    found = []
    for microbatch in (None, 4, 1):
        model = mlp()
        sw.Step(model, sw.sgd(LR), loss_fn, 13, microbatch=microbatch, transforms=transforms).run([DATA])
        found.append(dict(model.named_parameters()))
    for other in found[1:]:
        close(other, found[0])


def test_a_table_of_weights_for_groups():
    """Its values are those of the groups, in the order they come."""
    cut_makes_no_difference(sw.chain(BY, sw.weight(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())))


def test_a_function_of_the_window_sees_all_groups():
    cut_makes_no_difference(sw.chain(BY, sw.weight(lambda norms: norms / norms.max(), window=True)))


def test_noise_after_groups():
    ours, theirs = mlp(), mlp()
    torch.manual_seed(7)
    sw.Step(ours, sw.sgd(LR), squared, 13, microbatch=4, transforms=[BY, sw.clip(11.0), sw.noise(0.5)]).run([DATA])
    list(loop(theirs, squared, [DATA], as_they_are, clip_groups))
    torch.manual_seed(7)
    with torch.no_grad():
        for p in theirs.parameters():
            p -= LR * 0.5 * torch.randn_like(p) / 13
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_reference_is_made_once_per_window(microbatch):
    calls = []

    def reference():
        calls.append(1)
        return REFERENCE

    ours, theirs = mlp(), mlp()
    step = sw.Step(
        ours, sw.sgd(LR), squared, 7, microbatch=microbatch, transforms=[BY, sw.align(reference), sw.drop(smallest=1)]
    )
    assert step.run([DATA]).updates == len(calls) == 2

    def rule(rows):
        c, _ = align_groups(rows)
        keep = torch.ones_like(c)
        keep[(c * rows.norms).sort(stable=True).indices[0]] = 0
        return c * keep, (keep * rows.counts).sum()

    list(loop(theirs, squared, cut(DATA, 7), as_they_are, rule))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


class UnusedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("last", [sw.clip(1.0), sw.clip(1.0, by="parameter"), sw.drop(largest=1)], ids=repr)
@pytest.mark.parametrize("microbatch", [None, 4])
def test_parameters_that_the_loss_does_not_reach(microbatch, last):
    model = UnusedLayer()
    before = model.unused.weight.detach().clone()
    step = sw.Step(model, sw.sgd(LR), squared, 13, microbatch=microbatch, transforms=[BY, last])
    with pytest.warns(sw.TrainingWarning, match="does not reach: unused.weight, unused.bias"):
        step(DATA)
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("microbatch", [None, 4])
def test_first_weights_all_zero(microbatch):
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), squared, 13, microbatch=microbatch, transforms=[BY, lambda losses: losses * 0])
    with pytest.raises(
        sw.TransformError, match=r"nonzero weight; found none with chain\(group\('user'\), weight\(function\)\)"
    ):
        step(DATA)
    close(dict(model.named_parameters()), dict(mlp().named_parameters()), rtol=0, atol=0)


# ------------------------------------------------------------- dropout and buffers


def with_dropout():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("microbatch", [None, 4])
def test_no_group_exceeds_the_bound_under_dropout(microbatch):
    """What is clipped is what is summed, whichever masks were drawn."""
    for seed in range(5):
        model = with_dropout()
        before = [p.detach().clone() for p in model.parameters()]
        torch.manual_seed(seed)
        data = {**DATA, "user": torch.zeros(13)}
        sw.Step(model, sw.sgd(1.0), squared, 13, microbatch=microbatch, transforms=[BY, sw.clip(0.5)])(data)
        moved = [(p - b).detach().flatten() for p, b in zip(model.parameters(), before, strict=True)]
        assert float(torch.cat(moved).norm()) * 13 == pytest.approx(0.5, rel=1e-10)


@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("random_reference", [False, True])
def test_numbers_of_all_groups_and_their_sum_see_the_same_dropout(random_reference, microbatch):
    """What drop has measured is what is summed."""
    model, seen = with_dropout(), Unrestored()

    def reference():
        return sw.gradients(squared(model, DATA), model).mean()

    def watched(model, batch):
        hidden = model[1](model[0](batch["x"]))
        seen.append((hidden == 0).clone())
        return (model[3](model[2](hidden)) - batch["y"]).square().sum(1)

    transforms = [BY, *([sw.align(reference)] if random_reference else []), sw.drop(largest=1)]
    sw.Step(model, sw.sgd(LR), watched, 13, microbatch=microbatch, transforms=transforms, recheck=False)(DATA)
    masks = seen.take()
    if microbatch is None:
        assert len(masks) == 1
    else:
        half = len(masks) // 2
        assert all(torch.equal(a, b) for a, b in zip(masks[:half], masks[half:], strict=True))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_samples_and_groups_see_the_same_dropout(microbatch):
    """A sample's norm is that of the gradient which is then summed into its group."""
    model, seen = with_dropout(), Unrestored()

    def watched(model, batch):
        hidden = model[1](model[0](batch["x"]))
        for row, x in zip(hidden == 0, batch["x"], strict=True):
            seen.append((tuple(x.tolist()), tuple(row.tolist())))
        return (model[3](model[2](hidden)) - batch["y"]).square().sum(1)

    sw.Step(model, sw.sgd(LR), watched, 13, microbatch=microbatch, transforms=[sw.clip(0.5), BY], recheck=False)(DATA)
    pairs = seen.take()
    assert len(pairs) == (13 if microbatch is None else 26)
    assert len(set(pairs)) == len({x for x, _ in pairs}) == 13


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()).double())

    def forward(self, x):
        self.seen += len(x)
        return self.inner(x)


@pytest.mark.parametrize(
    "transforms", [[BY], [BY, sw.clip(11.0)], [BY, sw.drop(largest=1)], [sw.clip(4.0), BY]], ids=repr
)
@pytest.mark.parametrize("microbatch", [None, 4])
def test_each_sample_advances_the_buffers_once(transforms, microbatch):
    model = Counting()
    sw.Step(model, sw.sgd(LR), squared, 13, microbatch=microbatch, transforms=transforms)(DATA)
    assert model.seen == 13


# ------------------------------------------------------------- what cannot be grouped


def test_batch_norm_in_a_window_of_several_pieces():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    step = sw.Step(model, sw.sgd(LR), squared, 13, microbatch=4, transforms=[BY, sw.clip(1.0)], recheck=False)
    message = r"group\('user'\) needs samples that do not depend on each other; found BatchNorm in training mode: 1\."
    with pytest.raises(sw.SamplesInteractError, match=message):
        step(DATA)


def test_batch_norm_in_one_piece():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(sw.SamplesInteractError):
        sw.Step(model, sw.sgd(LR), squared, None, transforms=[BY, sw.clip(1.0)], recheck=False)(DATA)


@pytest.mark.parametrize("microbatch", [None, 4])
def test_more_losses_than_samples(microbatch):
    def doubled(model, batch):
        return squared(model, batch).repeat(2)

    step = sw.Step(mlp(), sw.sgd(LR), doubled, 13, microbatch=microbatch, transforms=[BY, sw.clip(1.0)], recheck=False)
    with pytest.raises(sw.SamplewiseError, match=r"for \d+ samples"):
        step(DATA)


class Uncut:
    """A batch whose samples cannot be told apart from outside."""

    def __init__(self, batch):
        self.batch, self.user = batch, batch["user"]


def of_uncut(model, batch):
    return squared(model, batch.batch)


def test_batches_that_cannot_be_cut():
    step = sw.Step(mlp(), sw.sgd(LR), of_uncut, transforms=[BY, sw.clip(1.0)])
    for batch in cut(DATA, 7):
        step.accumulate(Uncut(batch))
    message = (
        r"group\('user'\) must select single samples if a window has several microbatches; "
        "found a batch that cannot be cut"
    )
    with pytest.raises(sw.BatchError, match=message):
        step.apply()


def test_one_batch_that_cannot_be_cut():
    ours, theirs = mlp(), mlp()
    sw.Step(ours, sw.sgd(LR), of_uncut, transforms=[BY, sw.clip(11.0)]).run([Uncut(b) for b in cut(DATA, 7)])
    list(loop(theirs, squared, cut(DATA, 7), as_they_are, clip_groups))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("microbatch", [None, 3])
def test_by_hand(microbatch):
    """A group over batches that were accumulated one after the other."""
    ours, theirs = mlp(), mlp()
    step = sw.Step(ours, sw.sgd(LR), counted, None, microbatch=microbatch, transforms=[BY, sw.clip(11.0)])
    for batch in cut(DATA, 4):
        step.accumulate(batch)
    assert step.apply().samples == 13
    list(loop(theirs, counted, [DATA], as_they_are, clip_groups))
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
