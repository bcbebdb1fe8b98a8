"""Private runs, and the same runs by hand: masks and noise from the streams of the plan, all else in plain torch."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.privacy.rng import stream

SAMPLES = 40
CLIP = 0.5
RATE = 0.15
UPDATES = 8
LR = 0.3
GAMMA = 0.01  # of automatic clipping
ACCURACY = 1e-12


def data(samples=SAMPLES):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=g, dtype=torch.float64) * torch.linspace(0.05, 3, samples)[:, None]
    return x, torch.randint(0, 3, (samples,), generator=g)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(clip=CLIP, **options):
    """Plan whose epsilon is computed quickly; `mode` and `by` are those of sw.clip."""
    of_clip = {name: options.pop(name) for name in ("mode", "by") if name in options}
    clip = sw.clip(clip, **of_clip) if of_clip else clip
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "updates": UPDATES, "sample_rate": RATE, "clip": clip}
    return sw.Privacy(**{**settings, "accountant": "rdp", "seed": 3, **options})


def make(privacy=None, model=None, losses=loss_fn, dataset=None, loader=None, lr=LR, **options):
    """Model, loader and step."""
    privacy = privacy or plan()
    model = model or net()
    dataset = dataset or TensorDataset(*data())
    batches = privacy.loader(dataset, **(loader or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, batches, sw.Step(model, optimizer, losses, privacy=privacy, **options)


def train(step, loader, updates=None):
    """Make updates until all are made, in passes over the loader; returns their number."""
    made = 0
    while step.privacy.left and made != updates:
        for _ in step.over(loader):
            made += 1
            if made == updates:
                break
    return made


# --- by hand ---------------------------------------------------------------------------------------------------------


def mask(privacy, number, units=SAMPLES, branch=0):
    """Indices of the units of a draw."""
    random = stream(privacy._state.secret, "sample", branch, number, privacy.secure)
    units = [unit for unit, value in enumerate(random.uniform(units).tolist()) if value < privacy.sample_rate]
    if privacy.max_batch is None or len(units) <= privacy.max_batch:
        return units
    keys = random.uniform(len(units)).tolist()
    return sorted(unit for _, unit in sorted(zip(keys, units, strict=True))[: privacy.max_batch])


def gradient(model, loss):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def of_samples(losses=loss_fn, parts=None, weight=lambda loss, index: 1.0):
    """Function (model, units) -> gradient of each sample, before the clip."""
    parts = parts or data()

    def gradients(model, units):
        for i in units:
            loss = losses(model, [part[i : i + 1] for part in parts])[0]
            yield [weight(loss.detach(), i) * g for g in gradient(model, loss)]

    return gradients


def clipped(gradients, privacy):
    """One gradient, clipped."""
    whole = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    scaled = []
    for g in gradients:
        norm = float(g.norm()) if privacy.clip.by_parameter else whole
        bound = privacy.clip.max_norm
        scaled.append(g * (bound / (norm + GAMMA) if privacy.clip.sets_norm else min(1, bound / (norm or 1))))
    return scaled


def by_hand(privacy, gradients=None, model=None, units=SAMPLES, lr=LR, updates=None):
    """Parameters after all updates: p -= lr × (Σ clip(g) + z) / (rate × N)."""
    model = copy.deepcopy(model) if model is not None else net()
    parameters = list(model.parameters())
    gradients = gradients or of_samples()
    sensitivity = privacy.clip.max_norm * (math.sqrt(len(parameters)) if privacy.clip.by_parameter else 1)
    divisor = privacy.divide_by or privacy.sample_rate * units
    for number in range(privacy.updates if updates is None else updates):
        sums = [torch.zeros_like(p) for p in parameters]
        for found in gradients(model, mask(privacy, number, units)):
            for total, g in zip(sums, clipped(found, privacy), strict=True):
                total += g
        random = stream(privacy._state.secret, "noise", 0, number, privacy.secure)
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                noise = random.normal(p.shape, torch.float64) * (privacy.noise_multiplier * sensitivity)
                p -= lr * (total + noise) / divisor
    return model


def assert_same(found, expected, accuracy=ACCURACY):
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        assert (p - q).abs().max().item() <= accuracy
