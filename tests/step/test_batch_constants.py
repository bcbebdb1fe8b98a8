"""Entries of a batch that are not per sample but have as many rows as there are samples."""

import dataclasses
import warnings
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from by_hand import close
from torch import nn

import samplewise as sw

T, C = 6, 3
Named = namedtuple("Named", "x y mask")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor


def data(samples, constant):
    draw = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, T, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, C, (samples,), generator=draw)
    return x, y, constant


class Attention(nn.Module):
    """Mixes positions with a mask (T, T), as a causal model does."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.leave = nn.Linear(5, C)

    def forward(self, x, mask):
        h = self.enter(x).tanh()
        return self.leave((mask @ h if mask.dim() == 2 else mask[:, None] * h).mean(1))


def net():
    torch.manual_seed(0)
    return Attention().double()


def losses_of(model, batch):
    x, y, mask = batch
    return F.cross_entropy(model(x, mask), y, reduction="none")


def weighted(model, batch):
    """Class weights (C,) in the batch, by label."""
    x, y, weights = batch
    return F.cross_entropy(model(x, MASK), y, reduction="none") * weights[y]


def positions(model, batch):
    """Position ids (T,), the same for all samples."""
    x, y, ids = batch
    return F.cross_entropy(model(x + ids[:, None].cos(), MASK), y, reduction="none")


MASK = torch.rand(T, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tril()
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
# loss function, constant, number of samples that it has rows
CASES = {
    "mask": (losses_of, MASK, T),
    "weights": (weighted, WEIGHTS, C),
    "positions": (positions, torch.arange(T).double(), T),
    "mask of rows": (losses_of, MASK[0], T),
}
cases = pytest.mark.parametrize(("loss_fn", "constant", "samples"), CASES.values(), ids=CASES)
microbatches = pytest.mark.parametrize("microbatch", [1, 2, 4])
TRANSFORMS = {"plain": (), "clip": [sw.clip(0.5)], "mean": [sw.normalize("mean")]}


def make(loss_fn, **options):
    model = net()
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn, **options)


def parameters(step):
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def by_hand(loss_fn, batches):
    """The loop: mean of the losses of each batch, which is not sliced."""
    model = net()
    for batch in batches:
        grads = torch.autograd.grad(loss_fn(model, batch).mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.5 * g
    return {name: p.detach() for name, p in model.named_parameters()}


# ------------------------------------------------------------- not declared


@pytest.mark.sweep(2 / 3)
@cases
@microbatches
@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_the_first_slice_is_compared_with_the_batch(loss_fn, constant, samples, microbatch, transforms):
    if microbatch >= samples:
        microbatch = 2
    step = make(loss_fn, microbatch=microbatch, transforms=TRANSFORMS[transforms])
    before = parameters(step)
    state = torch.get_rng_state()
    with pytest.raises(sw.BatchError, match=r"found that batch\[2\] has . rows.*@sw\.batch_constants\(2\)"):
        step(data(samples, constant))
    close(parameters(step), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@cases
def test_windows_that_end_inside_a_batch_are_compared_too(loss_fn, constant, samples):
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        make(loss_fn, samples=2)(data(samples, constant))
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        list(make(loss_fn, samples=1).over([data(samples, constant)]))
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        make(loss_fn, microbatch=1).accumulate(data(samples, constant))


def test_several_constants_are_found():
    def loss_fn(model, batch):
        x, y, mask, ids = batch
        return F.cross_entropy(model(x + ids[:, None].cos(), mask), y, reduction="none")

    batch = *data(T, MASK), torch.arange(T).double()
    with pytest.raises(sw.BatchError, match=r"batch\[2\] and batch\[3\] .*batch_constants\(2, 3\)"):
        make(loss_fn, microbatch=1)(batch)


def test_memory_that_runs_short():
    saved = 8 * T * 5 * 3  # of about half of the samples
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        make(losses_of, microbatch=sw.auto(saved * T // 2))(data(T, MASK[0]))


@cases
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_batches_that_are_not_sliced_are_exact(loss_fn, constant, samples, transforms):
    batches = [data(samples, constant), data(samples + 1, constant)]
    step = make(loss_fn, transforms=transforms, recheck=False)
    step.run(batches)
    assert step.counters.updates == 2
    if not transforms:
        close(parameters(step), by_hand(loss_fn, batches))


@pytest.mark.parametrize(("loss_fn", "constant", "samples"), [CASES["mask"], CASES["positions"]], ids=["mask", "ids"])
def test_the_recheck_slices_constants_of_small_batches(loss_fn, constant, samples):
    hint = r"unless batch\[2\] is kept whole.*@sw\.batch_constants\(2\)"
    with pytest.warns(sw.TrainingWarning, match=hint):
        make(loss_fn)(data(samples, constant))
    with pytest.raises(sw.SamplesInteractError, match=hint):
        make(loss_fn, transforms=sw.clip(1.0))(data(samples, constant))
    step = make(sw.batch_constants(2)(loss_fn), transforms=sw.clip(1.0))
    step(data(samples, constant))


def test_targets_that_samples_share_are_not_constants():
    """Their mean is a batch statistic."""

    def loss_fn(model, batch):
        x, y, _ = batch
        return F.cross_entropy(model(x, MASK), y, reduction="none") * y.double().mean()

    batch = data(T, torch.zeros(T))
    with pytest.raises(
        sw.SamplewiseError, match=r"samples must not depend on each other|losses of 2 of the samples differ"
    ):
        make(loss_fn, transforms=sw.clip(1.0), microbatch=2)(batch)
    with pytest.raises(sw.SamplesInteractError, match="samples must not depend on each other"):
        make(loss_fn, transforms=sw.clip(1.0))(batch)


@cases
@microbatches
def test_a_constant_that_was_seen_with_another_size(loss_fn, constant, samples, microbatch):
    batches = [data(samples + 1, constant), data(samples, constant), data(samples + 3, constant)]
    step = make(loss_fn, microbatch=microbatch, recheck=False)
    step.run(batches)
    close(parameters(step), by_hand(loss_fn, batches))


@pytest.mark.parametrize(("loss_fn", "constant", "samples"), [CASES["mask"], CASES["positions"]], ids=["mask", "ids"])
def test_a_constant_that_is_seen_with_another_size_later(loss_fn, constant, samples):
    step = make(loss_fn, microbatch=1, recheck=False)
    step(data(samples, constant))  # not noticed without recheck
    before = parameters(step)
    with pytest.raises(
        sw.BatchError, match=rf"{samples + 1} in batch\[0\].*{len(constant)} in batch\[2\].*batch_const"
    ):
        step(data(samples + 1, constant))
    close(parameters(step), before, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"microbatch": 9}, {"compile": "auto"}, {"samples": T}], ids=str)
def test_batches_that_were_not_sliced_may_have_other_sizes_later(options):
    """Their number of rows was looked at only."""
    step = make(losses_of, recheck=False, tail="drop", **options)
    step(data(T, MASK))
    if "samples" in options:
        with pytest.raises(sw.BatchError, match=r"exactly samples=6 .*@sw\.batch_constants"):
            step(data(T + 1, MASK))
    else:
        step(data(T + 1, MASK))
        close(parameters(step), by_hand(losses_of, [data(T, MASK), data(T + 1, MASK)]))


def test_what_was_seen_is_in_the_state():
    batches = [data(T + 1, MASK), data(T, MASK)]
    step = make(losses_of, microbatch=2)
    step(batches[0])
    resumed = make(losses_of, microbatch=2, recheck=False)
    resumed.model.load_state_dict(step.model.state_dict())
    resumed.load_state_dict(step.state_dict())
    resumed(batches[1])
    close(parameters(resumed), by_hand(losses_of, batches))
    old = {name: value for name, value in step.state_dict().items() if name != "layouts"}
    make(losses_of).load_state_dict(old)


# ------------------------------------------------------------- declared


def of_dict(model, batch):
    return losses_of(model, (batch["x"], batch["y"], batch["mask"]))


def of_fields(model, batch):
    return losses_of(model, (batch.x, batch.y, batch.mask))


def nested(model, batch):
    return losses_of(model, (batch["in"]["x"], batch["y"], batch["in"]["mask"]))


class Losses(nn.Module):
    def forward(self, model, batch):
        return losses_of(model, batch)

    def method(self, model, batch):
        return losses_of(model, batch)


FORMS = {
    "tuple": (2, losses_of, lambda x, y, mask: (x, y, mask)),
    "list": (2, losses_of, lambda x, y, mask: [x, y, mask]),
    "from the end": (-1, losses_of, lambda x, y, mask: (x, y, mask)),
    "dict": ("mask", of_dict, lambda x, y, mask: {"mask": mask, "x": x, "y": y}),
    "nested": (("in", "mask"), nested, lambda x, y, mask: {"in": {"x": x, "mask": mask}, "y": y}),
    "encoding": (
        "mask",
        of_dict,
        lambda x, y, mask: transformers.BatchEncoding({"x": x, "y": y, "mask": mask}),
    ),
    "named": ("mask", of_fields, Named),
    "dataclass": ("mask", of_fields, Record),
    "module": (2, Losses(), lambda x, y, mask: (x, y, mask)),
    "method": (2, Losses().method, lambda x, y, mask: (x, y, mask)),
    "partial": (2, partial(losses_of), lambda x, y, mask: (x, y, mask)),
    "whole entry": (2, lambda m, b: losses_of(m, (*b[:2], b[2]["mask"])), lambda x, y, mask: (x, y, {"mask": mask})),
}
forms = pytest.mark.parametrize(("key", "loss_fn", "form"), FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize(
    "options", [{"microbatch": 1}, {"microbatch": 4}, {"samples": 4}, {"samples": 3, "microbatch": 2}], ids=str
)
def test_declared_constants_are_kept_whole(key, loss_fn, form, options):
    """In batches of any size, and the tensors of the caller stay as they are."""
    batches = [form(*data(size, MASK)) for size in (T, T - 2, T + 6)]
    step = make(sw.batch_constants(key)(loss_fn), **options)
    step.run(batches)
    x, y = (torch.cat([data(size, MASK)[k] for size in (T, T - 2, T + 6)]) for k in (0, 1))
    number = options.get("samples")
    windows = (
        list(zip(x.split(number), y.split(number), strict=True)) if number else [data(n, MASK)[:2] for n in (6, 4, 12)]
    )
    close(parameters(step), by_hand(losses_of, [(*window, MASK) for window in windows]))
    assert step.counters.microbatches > step.counters.updates or not options.get("microbatch")
    assert not hasattr(MASK, "samplewise_whole")


@cases
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_declared_constants_with_transforms(loss_fn, constant, samples, transforms):
    batches = [data(samples, constant), data(samples + 1, constant)]
    found = []
    for options in ({}, {"microbatch": 1}, {"microbatch": 2}):
        step = make(sw.batch_constants(2)(loss_fn), transforms=transforms, record="norms", **options)
        norms = [update.norms for update in step.over(batches)]
        found.append((parameters(step), torch.cat(norms)))
    for parameter, norms in found[1:]:
        close(parameter, found[0][0])
        close(norms, found[0][1])


def test_a_list_of_strings_is_cut_and_one_that_is_declared_is_not():
    names = list("abcdef")
    seen = []

    def loss_fn(model, batch):
        seen.append((batch[3], batch[4]))
        return losses_of(model, batch[:3])

    batch = (*data(T, MASK), names, tuple("uvwxyz"))
    make(sw.batch_constants(2, 4)(loss_fn), microbatch=2, recheck=False)(batch)
    assert [cut for cut, _ in seen] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(whole == tuple("uvwxyz") and isinstance(whole, tuple) for _, whole in seen)


def test_arrays_of_numpy_are_never_cut():
    def loss_fn(model, batch):
        return losses_of(model, (*batch[:2], torch.from_numpy(batch[2])))

    batches = [data(T, MASK.numpy()), data(T + 1, MASK.numpy())]
    step = make(loss_fn, microbatch=2)
    step.run(batches)
    close(parameters(step), by_hand(losses_of, [data(T, MASK), data(T + 1, MASK)]))
    assert isinstance(batches[0][2], np.ndarray)


@pytest.mark.parametrize("key", ["maks", 3, ("mask", "inner")])
def test_a_declared_entry_that_is_missing(key):
    step = make(sw.batch_constants(key)(of_dict))
    x, y, mask = data(T, MASK)
    with pytest.raises(sw.BatchError, match="the batch must hold"):
        step({"x": x, "y": y, "mask": mask})


@pytest.mark.parametrize("options", [{}, {"microbatch": 2}], ids=str)
def test_weights_of_the_batch_beside_a_constant(options):
    """A transform that reads the batch gets rows of it, and the constant as it is."""

    def weigh(batch):
        assert batch[2].shape == (T, T)
        return batch[0][:, 0, 0].abs()

    step = make(sw.batch_constants(2)(losses_of), transforms=sw.weight(weigh), **options)
    batch = data(T, MASK)
    (update,) = step(batch)
    close(update.weights, batch[0][:, 0, 0].abs())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"samples": 2}, {"microbatch": 2}, {"samples": 1}], ids=str)
def test_compiled_updates_keep_constants_whole(options):
    batches = [data(T, MASK)] * 6
    found = []
    for compile in (False, True):
        step = make(sw.batch_constants(2)(losses_of), compile=compile, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step.run(batches)
        found.append(parameters(step))
    close(found[1], found[0])


def test_resumed_windows_with_constants():
    loss_fn = sw.batch_constants(2)(losses_of)
    first, second = data(T, MASK), data(T, MASK)
    step = make(loss_fn, samples=8, microbatch=3)
    step(first)
    resumed = make(loss_fn, samples=8, microbatch=3)
    resumed.load_state_dict(step.state_dict())
    resumed(second)
    step(second)
    close(parameters(resumed), parameters(step), rtol=0, atol=0)


# ------------------------------------------------------------- outside of steps


def rows_of(model, batch):
    losses = losses_of(model, batch)
    return torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
            for loss in losses
        ]
    )


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_scan(microbatch):
    model = net()
    batches = [data(T, MASK), data(T + 1, MASK)]
    loss_fn = sw.batch_constants(2)(partial(losses_of))
    norms = torch.cat([g.norms() for _, g in sw.scan(model, loss_fn, batches, microbatch=microbatch)])
    close(norms, torch.cat([rows_of(model, batch).norm(dim=1) for batch in batches]))
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        list(sw.scan(model, losses_of, batches, microbatch=microbatch))
    model.train()
    list(sw.scan(model, losses_of, batches, microbatch=None))
    assert model.training


def test_check():
    loss_fn = sw.batch_constants(2)(partial(losses_of))
    result = sw.check(net(), loss_fn, data(T, MASK[0]))
    assert result.ok
    assert "3 samples recomputed alone" in str(result)


def test_influence():
    model = net()
    train, queries = [data(T, MASK)], [data(T + 2, MASK)]
    loss_fn = sw.batch_constants(2)(partial(losses_of))
    whole = sw.influence(model, losses_of, train, queries, microbatch=len(train[0][0]))
    close(sw.influence(model, loss_fn, train, queries, microbatch=1), whole)
    with pytest.raises(sw.BatchError, match=r"@sw\.batch_constants\(2\)"):
        sw.influence(model, losses_of, train, queries, microbatch=2)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("microbatch", [1, 4])
def test_trainer_resumes_inside_a_batch(tmp_path, microbatch):
    """The batch has more rows than the constant, and is used in part when the run stops."""
    batches = [data(size, MASK) for size in (T, 2 * T, T + 1)]

    def trainer():
        step = make(sw.batch_constants(2)(losses_of), samples=5, microbatch=microbatch)
        return sw.Trainer(step, tmp_path / "run", progress=False, device="cpu")

    trainer().fit(batches, updates=2)
    second = trainer()
    second.fit(batches, updates=5, resume=True)
    x, y = (torch.cat([batch[k] for batch in batches]) for k in (0, 1))
    windows = [(*window, MASK) for window in zip(x.split(5), y.split(5), strict=True)]
    close(parameters(second.step), by_hand(losses_of, windows[:5]))
