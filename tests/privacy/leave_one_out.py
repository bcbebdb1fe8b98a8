"""Released sums of private steps without noise, and how far leaving out one sample or user moves them."""

import math

import torch
import torch.nn.functional as F
from private_runs import plan
from torch import nn
from torch.utils.data import Dataset

import samplewise as sw

TOKENS = 6
WIDTH = 24  # rows of the layers below are larger than their factors, so that sums are sums over tokens
WORDS = 40
CLASSES = 3


class Rows(Dataset):
    """Samples of a batch, as a dataset."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        return tuple(column[index] for column in self.columns)


def released(model, losses, columns, transforms=(), microbatch=None, users=None, precision=None, **options):
    """Σ of the clipped gradients of all rows, as the update releases it but without noise, and the sensitivity."""
    if users is not None:
        options = {**options, "users": users}
    privacy = plan(sample_rate=1.0, updates=1, divide_by=1.0, **options)
    loader = privacy.loader(Rows(*columns))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"transforms": transforms, "microbatch": microbatch, "precision": precision}
    step = sw.Step(model, optimizer, losses, privacy=privacy, **settings)
    sums = []
    step.config.policy._noise_std = lambda: 0.0
    step.config.policy.before_apply = lambda trained: sums.extend(
        g.detach().double().flatten() for g in trained.gradients()
    )
    for _ in step.over(loader):
        pass
    return torch.cat(sums), step.config.policy.sensitivity


def moved(make, losses, columns, left_out, users=None, **options):
    """How far the sum moves if the rows `left_out` are left out, in units of the sensitivity, and its size."""
    whole, bound = released(make(), losses, columns, users=users, **options)
    rows = [k for k in range(len(columns[0])) if k not in left_out]
    rest = [column[rows] for column in columns]
    without, _ = released(make(), losses, rest, users=users and [users[k] for k in rows], **options)
    assert whole.isfinite().all() and without.isfinite().all()
    return float((whole - without).norm() / bound), float(whole.norm() / bound)


# --- models --------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A layer of tokens (T, WIDTH), then the sum over tokens."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).sum(1)


class Convolution(nn.Module):
    def __init__(self, kernel, **options):
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, 2 * WIDTH, kernel, **options)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2)).sum(2))


class Words(nn.Module):
    """Embedding, with the tokens' own factors; `tied`: the table is the head, too."""

    def __init__(self, tied=False, sparse=False):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.tied = tied
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words, x):
        hidden = (self.table(words) * x).sum(1)
        return F.linear(hidden, self.table.weight)[:, :CLASSES] if self.tied else self.head(hidden)


class Attention(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        hidden = self.norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(self.norm, nn.GroupNorm) else self.norm(x)
        return self.head(self.attention(hidden, hidden, hidden, need_weights=False)[0].sum(1))


class Twice(nn.Module):
    """One layer used with both signs: its two uses cancel where the inputs are equal."""

    def __init__(self, normed=False):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES, bias=False)
        if normed:
            self.layer = nn.utils.parametrizations.weight_norm(self.layer)

    def forward(self, x):
        return (self.layer(x[:, 0::2]) - self.layer(x[:, 1::2])).sum(1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x)[0].sum(1))


class Batched(nn.Module):
    """A weight (h, i, o) in a batched product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, CLASSES) / 5)

    def forward(self, x):
        return torch.bmm(x.flatten(0, 1).expand(2, -1, -1), self.weight).sum(0).view(*x.shape[:2], -1).sum(1)


MODELS = {
    "linear": lambda: Tokens(nn.Linear(WIDTH, CLASSES)),
    "wide": lambda: Tokens(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, CLASSES))),
    "convolution": lambda: Convolution(1),
    "convolution of 3": lambda: Convolution(3, padding=1),
    "strided convolution": lambda: Convolution(2, stride=2),
    "grouped convolution": lambda: Convolution(3, groups=2),
    "embedding": Words,
    "sparse embedding": lambda: Words(sparse=True),
    "tied": lambda: Words(tied=True),
    "layer norm and attention": lambda: Attention(nn.LayerNorm(WIDTH)),
    "group norm and attention": lambda: Attention(nn.GroupNorm(2, WIDTH)),
    "two uses": Twice,
    "weight norm": lambda: Twice(normed=True),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "batched product": Batched,
}
OF_WORDS = ("embedding", "sparse embedding", "tied")


def model_of(name, dtype):
    """Function that makes the model, with the same parameters in each call."""

    def make():
        torch.manual_seed(1)
        return MODELS[name]().to(dtype)

    return make


def linear_loss(name):
    """Loss linear in the outputs: huge inputs give huge gradients. The target weighs the outputs."""

    def losses(model, batch):
        *inputs, target = batch
        if name not in OF_WORDS:
            inputs = inputs[-1:]
        return (model(*inputs) * target).sum(1)

    return losses


def cross_entropy(name):
    def losses(model, batch):
        *inputs, target = batch
        if name not in OF_WORDS:
            inputs = inputs[-1:]
        return F.cross_entropy(model(*inputs), target.argmax(1), reduction="none")

    return losses


LOSSES = {"linear": linear_loss, "cross entropy": cross_entropy}


def columns(samples, dtype, generator):
    """Words, inputs (samples, TOKENS, WIDTH) and targets."""
    words = torch.randint(0, WORDS, (samples, TOKENS), generator=generator)
    x = torch.randn(samples, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)
    return words, x.to(dtype), target.to(dtype)


# --- adversarial samples -------------------------------------------------------------------------------------------


def canceling(words, x, target, row, size):
    """Tokens of a sample in pairs of opposite sign: its gradient is zero, or what rounding leaves."""
    x[row, 1::2] = -x[row, 0::2] * size
    x[row, 0::2] *= size
    words[row, 1::2] = words[row, 0::2]


def equal_pairs(words, x, target, row, size):
    x[row] *= size
    x[row, 1::2] = x[row, 0::2]
    words[row] = words[row, 0]


def nearly_canceling(words, x, target, row, size):
    canceling(words, x, target, row, size)
    x[row, 0] = x[row, 0] * (1 + 4 * torch.finfo(x.dtype).eps)


def huge(words, x, target, row, size):
    x[row] *= size


def one_token(words, x, target, row, size):
    x[row] = 0
    x[row, 2] = size


def not_a_number(words, x, target, row, size):
    x[row, 0, 0] = math.nan


def infinite(words, x, target, row, size):
    target[row] = math.inf


def denormal(words, x, target, row, size):
    x[row] = torch.finfo(x.dtype).tiny / 8


def zero(words, x, target, row, size):
    x[row] = 0


def duplicate(words, x, target, row, size):
    for column in (words, x, target):
        column[:] = column[row].clone()


ATTACKS = {
    attack.__name__: attack
    for attack in (
        canceling,
        equal_pairs,
        nearly_canceling,
        huge,
        one_token,
        not_a_number,
        infinite,
        denormal,
        zero,
        duplicate,
    )
}


def tolerance(dtype, samples):
    """Rounding: of the sum of all samples, and of the terms of one sample up to the limit of `largest_terms`."""
    eps = torch.finfo(dtype).eps
    return 1 + 64 * samples * eps + 16 * eps**0.5
