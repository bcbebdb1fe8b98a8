"""`aggregate=sw.per(...)`: updates against the plain formula, one backward pass a sample, in float64."""

import re

import pytest
import torch
from by_hand import LR, close, mlp
from torch import nn

import samplewise as sw

UNITS = {
    "token": sw.per("token"),
    "sample": sw.per("sample"),
    "group": sw.per("group", key="g"),
    "constant": sw.per(40),
}
SPLITS = ("whole", "microbatches", "ragged")
TOKENS = 5


def sequences():
    """11 samples of 1 to 5 tokens, in 4 groups that overlap batches."""
    torch.manual_seed(3)
    n = torch.tensor([5, 1, 3, 2, 5, 4, 1, 2, 3, 5, 2])
    x = torch.randn(11, TOKENS, 4).double()
    y = torch.randint(3, (11, TOKENS)).masked_fill(torch.arange(TOKENS) >= n[:, None], -100)
    return {"x": x, "y": y, "g": torch.tensor([7, 7, 2, 7, 2, 9, 9, 9, 2, 9, 4])}


def token_losses(model, batch):
    losses = nn.functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten(), reduction="none")
    return losses.view(batch["y"].shape), batch["y"] != -100


def summed(model, batch):
    losses, counted = token_losses(model, batch)
    return losses.sum(1), counted.sum(1)


def take(batch, rows):
    return {key: values[rows] for key, values in batch.items()}


def gradient_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def formula(model, batch, unit, bound):
    """Gradient of the update: Σ over samples of its clipped part, in the unit of the aggregate."""
    losses, counts = summed(model, batch)
    groups = batch["g"]
    of_group = torch.stack([counts[groups == g].sum() for g in groups])
    parts = {
        "token": (losses, counts.sum()),
        "sample": (losses / counts, len(losses)),
        "group": (losses / of_group, len(groups.unique())),
        "constant": (losses, 40),
    }
    terms, divisor = parts[unit]
    total = None
    for k in range(len(terms)):
        g = gradient_of(model, summed(model, take(batch, [k]))[0].sum() * (terms[k] / losses[k]).detach())
        norm = torch.cat([p.flatten() for p in g]).norm()
        scale = min(1.0, bound / norm.item())
        total = [scale * p for p in g] if total is None else [t + scale * p for t, p in zip(total, g, strict=True)]
    return [t / divisor for t in total], terms.sum() / divisor


def train(data, unit, transforms, split, **options):
    model = mlp()
    step = sw.Step(model, sw.sgd(LR), summed, transforms=transforms, aggregate=UNITS[unit], **options)
    if split == "ragged":
        for rows in ([0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10]):
            step.accumulate(take(data, rows))
        update = step.apply()
    else:
        (update,) = step.over([data])
    return model, update


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bound", [torch.inf, 0.3])
def test_updates_are_those_of_the_formula(unit, split, bound):
    data = sequences()
    expected, loss = formula(mlp(), data, unit, bound)
    transforms = () if bound == torch.inf else [sw.clip(bound)]
    options = {"microbatch": 3, "samples": 11} if split == "microbatches" else {}
    model, update = train(data, unit, transforms, split, **options)
    for p, before, g in zip(model.parameters(), mlp().parameters(), expected, strict=True):
        close(p, before - LR * g)
    if unit != "constant":  # update.loss is a mean per count
        assert update.loss == pytest.approx(loss.item(), rel=1e-10)
    assert update.grad_norm == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-10)


@pytest.mark.parametrize("unit", UNITS)
def test_values_of_an_update_are_in_the_unit(unit):
    data = sequences()
    model = mlp()
    losses, counts = summed(model, data)
    of_group = torch.stack([counts[data["g"] == g].sum() for g in data["g"]])
    units = {"sample": counts, "group": of_group}.get(unit, torch.ones(11))
    norms = [torch.cat([p.flatten() for p in gradient_of(model, loss)]).norm() for loss in summed_each(model, data)]
    _, update = train(data, unit, (), "ragged", record="norms")
    close(update.losses, (losses / units).detach())
    close(update.counts, counts.double() / units)
    close(update.norms, torch.stack(norms) / units)


def summed_each(model, data):
    return [summed(model, take(data, [k]))[0].sum() for k in range(11)]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("split", SPLITS[1:])
@pytest.mark.parametrize("unit", ["token", "sample", "group"])
@pytest.mark.parametrize(
    "transforms",
    [
        [sw.drop(largest=2)],
        [sw.normalize("mean")],
        [sw.group("g"), sw.clip(0.3)],
        [sw.weight(lambda losses: 1 / (1 + losses)), sw.group(lambda batch: batch["g"] % 2), sw.clip(0.3)],
        [sw.clip(0.1, by="parameter")],
    ],
    ids=str,
)
def test_transforms_of_the_window_do_not_depend_on_the_split(unit, split, transforms):
    options = {"microbatch": 3, "samples": 11} if split == "microbatches" else {}
    whole, _ = train(sequences(), unit, transforms, "whole")
    model, _ = train(sequences(), unit, transforms, split, **options)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        close(p, q)


def test_a_group_transform_with_the_groups_of_the_aggregate_acts_on_their_means():
    data = sequences()
    model = mlp()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for g in data["g"].unique():
        losses, counts = summed(model, take(data, data["g"] == g))
        grads = gradient_of(model, losses.sum() / counts.sum())
        scale = min(1.0, 0.3 / torch.cat([p.flatten() for p in grads]).norm().item())
        expected = [e + scale * p / 4 for e, p in zip(expected, grads, strict=True)]
    trained, _ = train(data, "group", [sw.group("g"), sw.clip(0.3)], "microbatches", microbatch=2)
    for p, before, g in zip(trained.parameters(), model.parameters(), expected, strict=True):
        close(p, before - LR * g)


def packed_losses(model, batch):
    """Documents (N,) of a batch of packed rows: token t of row r belongs to document batch["doc"][r, t]."""
    losses, counted = token_losses(model, batch)
    documents = int(batch["doc"].max()) + 1
    owner = batch["doc"].flatten()
    sums = losses.new_zeros(documents).index_add(0, owner, losses.flatten())
    return sums, torch.zeros(documents).index_add(0, owner, counted.flatten().float())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("transforms", [(), [sw.clip(0.3)]], ids=str)
def test_packed_documents_are_the_unpacked_ones(unit, transforms):
    data = sequences()
    counted = data["y"] != -100
    doc = torch.arange(11)[:, None].expand(11, TOKENS)[counted]
    rows = {"x": data["x"][counted], "y": data["y"][counted], "doc": doc}  # 33 tokens, in 3 rows of 11
    batch = {key: values.unflatten(0, (3, 11)) for key, values in rows.items()}
    batch["g"] = data["g"]
    aggregate = UNITS[unit]
    packed = mlp()
    step = sw.Step(packed, sw.sgd(LR), packed_losses, transforms=transforms, aggregate=aggregate)
    step.accumulate(batch)
    step.apply()
    unpacked, _ = train(data, unit, transforms, "ragged")
    for p, q in zip(packed.parameters(), unpacked.parameters(), strict=True):
        close(p, q)


def test_a_sample_or_group_without_tokens_is_not_counted():
    data = sequences()
    data["y"][3] = -100  # one of three of its group
    data["y"][10] = -100  # alone in its group
    model = mlp()
    for unit in ("sample", "group"):
        losses, counts = summed(model, data)
        groups = [data["g"] == g for g in (7, 2, 9)] if unit == "group" else [[k] for k in range(10) if k != 3]
        loss = torch.stack([losses[g].sum() / counts[g].sum() for g in groups]).mean()
        grads = gradient_of(model, loss)
        for split in ("whole", "ragged"):
            trained, update = train(data, unit, (), split)
            assert update.loss == pytest.approx(loss.item(), rel=1e-10)
            for p, before, g in zip(trained.parameters(), model.parameters(), grads, strict=True):
                close(p, before - LR * g)


@pytest.mark.parametrize("unit", ["sample", "group"])
@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_invalid_counts_are_refused(unit, bad):
    def wrong(model, batch):
        losses, counts = summed(model, batch)
        return losses, counts.double().index_fill(0, torch.tensor([1]), bad)

    model = mlp()
    step = sw.Step(model, sw.sgd(LR), wrong, aggregate=UNITS[unit], recheck=False)
    with pytest.raises(sw.NonFiniteLossError):
        step(sequences())


def test_a_criterion_with_ignored_targets_has_means_of_samples():
    data = sequences()
    model = nn.Sequential(mlp(), nn.Flatten(1), nn.Unflatten(1, (3, TOKENS)))
    batch = (data["x"], data["y"], data["g"])
    losses, counts = zip(*(per_row(model, batch, k) for k in range(11)), strict=True)
    expected = {
        "sample": torch.stack([a / b for a, b in zip(losses, counts, strict=True)]).mean(),
        "group": torch.stack(
            [
                sum(losses[k] for k in rows) / sum(counts[k] for k in rows)
                for rows in [(data["g"] == g).nonzero().flatten().tolist() for g in data["g"].unique()]
            ]
        ).mean(),
    }
    for unit, loss in expected.items():
        aggregate = sw.per("sample") if unit == "sample" else sw.per("group", key=2)
        rows = batch if unit == "group" else batch[:2]
        step = sw.Step(model, sw.sgd(0.0), nn.CrossEntropyLoss(), aggregate=aggregate, microbatch=4)
        (update,) = step.over([rows])
        assert update.loss == pytest.approx(loss.item(), rel=1e-10)


def per_row(model, batch, k):
    losses = nn.functional.cross_entropy(model(batch[0][k : k + 1]), batch[1][k : k + 1], reduction="sum")
    return losses, (batch[1][k] != -100).sum()


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("unit", ["sample", "constant"])
@pytest.mark.usefixtures("backend")
def test_compiled_updates(unit):
    data = sequences()
    models = []
    for compiled in (False, True):
        model = mlp()
        step = sw.Step(model, sw.sgd(LR), summed, aggregate=UNITS[unit], compile=compiled)
        for _ in range(3):
            step(data)
        models.append(model)
        assert step.compiled in ("compiled", "compile=False") or "faster" in step.compiled
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        close(p, q)


def test_means_over_groups_stay_uncompiled():
    step = sw.Step(mlp(), sw.sgd(LR), summed, aggregate=UNITS["group"], compile=True)
    step(sequences())
    with pytest.warns(sw.TrainingWarning, match="updates stay uncompiled: updates are means over groups"):
        step(sequences())


def test_counts_that_change_between_the_passes_are_refused():
    calls = iter(range(1000))

    def loss_fn(model, batch):
        losses, counts = summed(model, batch)
        return losses, counts * (1 + next(calls))

    step = sw.Step(mlp(), sw.sgd(LR), loss_fn, aggregate=UNITS["group"], microbatch=4, recheck=False)
    with pytest.raises(sw.LossesError, match=re.escape("per('group', key='g') is computed twice")):
        step(sequences())


def test_groups_of_losses_in_half_precision():
    def halves(model, batch):
        return model(batch["x"]).square().sum(1).bfloat16()

    data = {"x": torch.rand(1200, 4), "g": torch.arange(1200) // 900}
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    losses = halves(model, data).float()
    step = sw.Step(model, sw.sgd(0.0), halves, aggregate=UNITS["group"], recheck=False)
    (update,) = step.over([data])
    expected = (losses[:900].mean() + losses[900:].mean()) / 2
    assert update.loss == pytest.approx(expected.item(), rel=1e-4)
    assert update.grad_norm == pytest.approx(grad_norm(model, expected), rel=1e-2)


def grad_norm(model, loss):
    return torch.cat([g.flatten() for g in gradient_of(model, loss)]).norm().item()


def test_an_open_window_is_restored():
    """Sums of a part of the window are in the state, except with groups, whose samples are not computed yet."""
    data = sequences()
    for unit in ("token", "sample", "constant"):
        whole, _ = train(data, unit, (), "ragged")
        model = mlp()
        first = sw.Step(model, sw.sgd(LR), summed, aggregate=UNITS[unit])
        first.accumulate(take(data, [0, 1, 2, 3, 4]))
        second = sw.Step(model, sw.sgd(LR), summed, aggregate=UNITS[unit])
        second.load_state_dict(first.state_dict())
        for rows in ([5], [6, 7, 8, 9, 10]):
            second.accumulate(take(data, rows))
        second.apply()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            close(p, q)


def test_tails():
    """5 of 11 samples per update: the last one has one sample."""
    data = sequences()
    for unit in UNITS:
        model, alone = mlp(), mlp()
        step = sw.Step(model, sw.sgd(LR), summed, 5, microbatch=2, aggregate=UNITS[unit])
        step.run([take(data, slice(0, 4)), take(data, slice(4, 11))])
        for rows in (slice(0, 5), slice(5, 10), slice(10, 11)):
            grads, _ = formula(alone, take(data, rows), unit, torch.inf)
            with torch.no_grad():
                for p, g in zip(alone.parameters(), grads, strict=True):
                    p -= LR * g
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, q)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("unit", ["sample", "group"])
def test_a_trainer_that_is_resumed(unit, tmp_path):
    """In the middle of a window: batches of 4 samples, 5 per update."""
    data = sequences()
    batches = [take(data, slice(k, k + 4)) for k in (0, 4, 8)]

    def fit(run, updates, aggregate, **options):
        model = mlp()
        step = sw.Step(model, sw.sgd(LR), summed, 5, aggregate=aggregate)
        trainer = sw.Trainer(step, tmp_path / run)
        trainer.fit(batches, updates=updates, **options)
        return model, trainer

    whole, trainer = fit("whole", 7, UNITS[unit])
    fit("part", 4, UNITS[unit])
    resumed, _ = fit("part", 7, UNITS[unit], resume=True)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    losses, counts = summed(whole, data)
    mean = (losses / counts).mean() if unit == "sample" else losses.sum() / counts.sum()
    assert trainer.evaluate(batches)["loss"] == pytest.approx(mean.item(), rel=1e-10)
    message = f"aggregate: per(40) from now on, the run had {UNITS[unit]}"
    with pytest.warns(sw.TrainingWarning, match=re.escape(message)):
        fit("part", 8, sw.per(40), resume=True)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokens",), "per needs 'token', 'sample', 'group', or a positive number"),
        ((0,), "found 0"),
        ((True,), "found True"),
        (("group",), "found none. Pass the key of the batch with the groups: per('group', key='prompt')"),
        (("sample", "g"), "found 'g' with 'sample'. Leave it out"),
    ],
)
def test_misuse(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sw.per(*arguments)


def test_values_print_and_compare():
    assert str(sw.per("group", key="prompt")) == "per('group', key='prompt')"
    assert str(sw.per("group", key=len)) == "per('group', key=len)"
    assert sw.per(4096) == sw.per(4096) != sw.per("token")
    assert str(sw.per(4096)) == "per(4096)"
    assert "aggregate=per('sample')" in repr(sw.Step(mlp(), sw.sgd(LR), summed, aggregate=sw.per("sample")))


def test_refused_arguments_of_a_step():
    def step(**options):
        return sw.Step(mlp(), sw.sgd(LR), summed, **options)

    with pytest.raises(TypeError, match=re.escape("aggregate must be a sw.per(...); found 'sample'")):
        step(aggregate="sample")
    message = "aggregate=per(40) divides every update by the same number; found drop(largest=1), which divides"
    with pytest.raises(ValueError, match=re.escape(message)):
        step(aggregate=sw.per(40), transforms=[sw.drop(largest=1)])
    fixed = step(aggregate=sw.per(40))
    with pytest.raises(ValueError, match=re.escape(message)):
        fixed.transforms = [sw.drop(largest=1)]
    with pytest.raises(AttributeError, match=r"'aggregate'\. It is fixed when the Step is created"):
        fixed.aggregate = sw.per(3)
    wrong = step(aggregate=sw.per("group", key=lambda batch: [1, 2]))
    with pytest.raises(sw.TransformError, match="must give one key per sample; found 2 keys for 11 samples"):
        wrong(sequences())


@pytest.mark.parametrize("unit", ["token", "constant"])
def test_privacy_has_a_divisor_of_its_own(unit):
    plan = sw.Privacy(noise_multiplier=1, delta=1e-5, updates=10, sample_rate=0.1, clip=1.0, accountant="rdp")
    message = "aggregate must have its default with privacy=, because sums are divided by a public constant"
    with pytest.raises(sw.PrivacyError, match=message):
        sw.Step(mlp(), sw.sgd(LR), summed, privacy=plan, aggregate=UNITS[unit])


def test_the_noise_scale_needs_means_over_tokens_or_samples():
    with pytest.raises(ValueError, match=re.escape("found aggregate=per(40)")):
        sw.NoiseScale().on_fit_start(sw.Step(mlp(), sw.sgd(LR), summed, aggregate=sw.per(40)))
