"""A run that is the same in one process and on several ranks: rank r of N has samples r, r + N, r + 2N, ... of it."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.parallel import collectives

SAMPLES = 17


def data():
    """inputs, targets, numbers, users, weights. Some gradients are much longer than others."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64) * torch.linspace(0.2, 3, SAMPLES)[:, None]
    y = torch.randint(0, 3, (SAMPLES,), generator=g)
    users = torch.tensor([0, 0, 1, 2, 1, 3, 3, 4, 5, 4, 0, 6, 7, 6, 6, 8, 2])
    return x, y, torch.arange(SAMPLES), users, torch.rand(SAMPLES, generator=g, dtype=torch.float64)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def counted(model, batch):
    """Losses with denominators of their own, one of which is zero."""
    return loss_fn(model, batch) * (batch[2] % 4), (batch[2] % 4).double()


def direction(model):
    """Of two samples that everybody has, by names that do not depend on a wrapper."""
    return sw.gradients(loss_fn(model, [part[:2] for part in data()]), model).mean()


def soft(losses):
    return torch.exp(-losses)


def ranked(norms):
    """Needs the whole window."""
    return norms.argsort().argsort() / len(norms)


def seeded():
    return torch.Generator().manual_seed(5)


TRANSFORMS = {
    "plain": lambda model: (),
    "clip": lambda model: [sw.clip(0.5)],
    "clip by parameter": lambda model: [sw.clip(0.2, by="parameter")],
    "clip automatic": lambda model: [sw.clip(0.5, mode="automatic")],
    "weight": lambda model: [soft],
    "weight renormalized": lambda model: [sw.weight(soft, renormalize=True)],
    "weight of the batch": lambda model: [sw.weight(4)],
    "weight by place": lambda model, number=6: [sw.weight(torch.linspace(0.1, 2, number, dtype=torch.float64))],
    "weight by number": lambda model: [sw.weight(torch.linspace(0, 1, SAMPLES, dtype=torch.float64), index=2)],
    "weight by rank": lambda model: [sw.weight(ranked, window=True)],
    "drop a quantile": lambda model: [sw.drop(quantile=0.6)],
    "drop both ends": lambda model: [sw.drop(largest=1, smallest=1, score="losses")],
    "normalize": lambda model: [sw.normalize(2.0)],
    "normalize to the mean": lambda model: [sw.normalize("mean")],
    "align": lambda model: [sw.align(lambda: direction(model))],
    "align by dot": lambda model: [sw.align(lambda: direction(model), kind="dot", renormalize=True)],
    "group and clip": lambda model: [sw.group(3), sw.clip(0.5)],
    "weight, group, clip by parameter": lambda model: [soft, sw.group(3), sw.clip(0.2, by="parameter")],
    "drop, group and drop": lambda model: [sw.drop(largest=1), sw.group(3), sw.drop(smallest=1)],
    "group and align": lambda model: [sw.group(3), sw.align(lambda: direction(model))],
    "noise": lambda model: [sw.noise(0.3, generator=seeded())],
    "clip and noise": lambda model: [sw.clip(0.5), sw.noise(0.3, generator=seeded())],
    "weight, drop, normalize to the mean, weight": lambda model: [
        soft,  # not a clip, after which norms are equal and dropped by chance
        sw.drop(quantile=0.8),
        sw.normalize("mean"),
        sw.weight(4, renormalize=True),
    ],
}


def wrapped(model, how):
    """On ranks: a model that rank 0 must give to the others, or one that was."""
    if collectives.size() == 1:
        return model, None
    with torch.no_grad():
        for p in model.parameters():
            p.add_(collectives.rank())
    if how == "ddp":
        return DistributedDataParallel(model), None
    if how == "sharded":
        collectives.broadcast_bucketed_(list(model.parameters()))
        for module in (model[0], model[3], model):
            fully_shard(module)
        return model, None
    return model, {"plain": "ddp", "fsdp": sw.parallel.fsdp([nn.Linear])}[how]


def in_places(batch, samples=None, tail="update", **_):
    """Samples of every window, and of all of them together, if none is shorter, for weights by place."""
    number = min(samples or batch * collectives.size(), SAMPLES)
    return number, SAMPLES if tail == "carry" else SAMPLES // number * number


def own_batches(batch, parts=None):
    """This rank's samples in batches of so many."""
    own = [part[collectives.rank() :: collectives.size()] for part in (parts or data())]
    return list(zip(*(part.split(batch) for part in own), strict=True))


def run(transforms="plain", how="plain", batch=3, epochs=2, losses="loss_fn", recheck=False, **options):
    """The parameters, and what the updates say, after a few epochs."""
    model, parallel = wrapped(net(), how)
    inside = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    parts, places = data(), ()
    if transforms == "weight by place":
        *places, rows = in_places(batch, **options)
        parts = [part[:rows] for part in parts]
    made = TRANSFORMS[transforms](inside, *places)
    fn = {"loss_fn": loss_fn, "counted": counted}[losses]
    step = sw.Step(model, optimizer, fn, transforms=made, parallel=parallel, recheck=recheck, **options)
    updates = [
        (update.samples, update.loss, update.grad_norm, update.skipped)
        for _ in range(epochs)
        for update in step.over(own_batches(batch, parts))
    ]
    return flat(inside), updates, copy.copy(step.counters), not step._has_pending_samples


def flat(model):
    """All parameters in one vector; collective for a sharded model."""
    return torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in model.parameters()]
    )


def assert_same(one, other):
    """Up to the order of sums."""
    torch.testing.assert_close(other[0], one[0], rtol=1e-10, atol=1e-12)
    assert [u[0] for u in other[1]] == [u[0] for u in one[1]]
    assert [u[3] for u in other[1]] == [u[3] for u in one[1]]
    for k in (1, 2):
        torch.testing.assert_close(
            torch.tensor([u[k] for u in other[1]]), torch.tensor([u[k] for u in one[1]]), equal_nan=True
        )
    assert (other[2].updates, other[2].skipped) == (one[2].updates, one[2].skipped)
    assert other[2].samples == one[2].samples or not one[3]  # of an open window each rank counts its own
