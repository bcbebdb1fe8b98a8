"""Random attacks with hooks and Functions that change gradients, on any device, against the loop on the CPU."""

import copy
import random

import torch
from torch import nn

import samplewise as sw
from samplewise.engine.strategies import jacobian_rows


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.change(g), None


def hooked(x, change):
    x.register_hook(change)
    return x


def with_prehook(x, change):
    x.grad_fn.register_prehook(lambda gradients: (change(gradients[0]),))
    return x


def with_posthook(x, change):
    x.grad_fn.register_hook(lambda inputs, outputs: (change(inputs[0]), *inputs[1:]))
    return x


def shuffled(change_of):
    """Ownership must be probed."""

    def change_shuffled(x, change):
        order = torch.randperm(len(x))
        return change_of(x[order], change)[order.argsort()]

    return change_shuffled


def rounded_to(step):
    return lambda g: (g / step).round() * step


LINEAR = ("doubled", "columns")


def changes(size, part, levels):
    """Changes of a gradient (B, ...), most of which compare the samples of the batch."""
    return {
        "doubled": lambda g: 2 * g,
        "columns": lambda g: g * torch.linspace(0, 1, g.shape[-1], device=g.device).to(g.dtype).round(),
        "rounded": rounded_to(size),
        "quantized by row": lambda g: rounded_to(1 / levels)(g / (g.abs().amax(-1, True) + 1e-9)),
        "quantized by batch": lambda g: rounded_to(float(g.abs().max() + 1e-30) / levels)(g),
        "threshold": lambda g: g * (g.abs() > size),
        "threshold of the largest": lambda g: g * (g.abs() > size * g.abs().max()),
        "threshold of the mean": lambda g: g * (g.abs() > size * g.abs().mean()),
        "threshold of the deviation": lambda g: g * (g.abs() > size * g.std()),
        "threshold of the median": lambda g: g * (g.abs() > g.abs().median()),
        "threshold of the column": lambda g: g * (g.abs() >= size * g.abs().amax(0, True)),
        "top elements": lambda g: g * (g.abs() >= g.abs().flatten().topk(max(1, g.numel() // part)).values[-1]),
        "top samples": lambda g: top_samples(g, part),
        "clipped by value": lambda g: g.clamp(-size, size),
        "clipped by the norm of the batch": lambda g: g * min(1.0, size / float(g.norm() + 1e-30)),
        "shifted": lambda g: g + size,
        "centered": lambda g: g - g.mean(0),
        "normalized": lambda g: g / (g.norm() + 1e-12),
        "sign": torch.sign,
        "noise": lambda g: g + size * torch.randn_like(g),
        "dropout": lambda g: g * (torch.rand_like(g) > 0.3),
        "mixed": lambda g: g + size * g.flip(0),
    }


def top_samples(g, part):
    norms = g.flatten(1).norm(dim=1)
    return g * (norms >= norms.topk(max(1, len(g) // part)).values[-1]).to(g.dtype).view(-1, *[1] * (g.dim() - 1))


def mlp(put):
    def losses(model, x):
        return model[2](put(model[1](model[0](x)))).square().sum(1)

    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)), (4,), losses


def convolution(put):
    def losses(model, x):
        return model[2](put(model[1](model[0](x))).flatten(1)).square().sum(1)

    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Linear(12, 2)), (2, 4, 4), losses


def tokens(put):
    def losses(model, x):
        return model[3](model[2](put(model[1](model[0](x))))).square().sum((1, 2))

    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)), (5, 4), losses


def two_places(put):
    def losses(model, x):
        return model[3](put(model[2](put(model[1](model[0](x)))).tanh())).square().sum(1)

    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 3)), (4,), losses


PLACES = (Changed.apply, hooked, with_prehook, with_posthook)
MODELS = (mlp, convolution, tokens, two_places)
STRATEGIES = ("fused", "twice", "full")
ACCURACY = {torch.float64: 1e-7, torch.float32: 4e-3}
REFUSALS = ("is not linear", "between an operation and this parameter", "must not depend on other samples")


def outcomes(seed, device="cpu"):
    """(description of a random case, whether it is linear, results of two calls: right, refused, or what is wrong)."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    samples = r.choice([2, 3, 6, 16])
    dtype = r.choice([torch.float64, torch.float64, torch.float32])
    known = changes(size=10 ** r.uniform(-1, 0), part=r.randint(2, 5), levels=r.choice([3, 15, 127]))
    name = r.choice(list(known))
    place = r.choice(PLACES)
    is_shuffled = r.random() < 0.4
    change_of = shuffled(place) if is_shuffled else place
    build = r.choice(MODELS)
    strategy = r.choice(STRATEGIES)
    model, shape, losses_of = build(lambda x: change_of(x, known[name]))
    model = model.to(dtype)
    x = torch.randn(samples, *shape, dtype=dtype)
    sizes = torch.linspace(0.1, 1, samples) if r.random() < 0.7 else 10 ** torch.linspace(-3, 0, samples)
    sizes = sizes.to(dtype)
    weights = torch.rand(samples, dtype=dtype)
    torch.manual_seed(seed)  # of the order of the samples
    expected = jacobian_rows(losses_of(model, x) * sizes, dict(model.named_parameters()))
    there = copy.deepcopy(model).to(device)
    results = []
    for _ in range(2):
        torch.manual_seed(seed)
        losses = losses_of(there, x.to(device)) * sizes.to(device)
        try:
            error = largest_error(sw.gradients(losses, there, strategy=strategy), weights.to(device), expected)
            results.append("right" if error <= ACCURACY[dtype] else f"wrong by {error:.0e}")
        except (sw.GraphError, sw.SamplesInteractError) as refusal:
            results.append("refused" if any(words in str(refusal) for words in REFUSALS) else str(refusal))
    description = f"{seed}: {build.__name__}, {place.__name__}, {is_shuffled=}, {name}, {samples}, {dtype}, {strategy}"
    return description, name in LINEAR, results


def largest_error(g, weights, expected):
    """Largest error of norms, a weighted sum and rows, relative to the largest of each."""
    norms = torch.stack([rows.flatten(1).double().norm(dim=1) for rows in expected.values()]).norm(dim=0)
    errors = [(g.norms().cpu().double() - norms).abs().max() / norms.max()]
    sums = g.sum(weights)
    rows = g.full()
    for name, right in expected.items():
        size = right.abs().max().double().clamp_min(1e-30)
        errors.append((sums[name].cpu() - torch.tensordot(weights.cpu(), right, 1)).abs().max() / size)
        errors.append((rows[name].cpu() - right).abs().max() / size)
    return max(map(float, errors))


def assert_right_or_refused(seed, device="cpu"):
    description, is_linear, results = outcomes(seed, device)
    assert set(results) <= ({"right"} if is_linear else {"right", "refused"}), (description, results)
