"""Models that nobody thought of: hypothesis stacks layers, reuses and reorders them, and the loop is the judge."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.testing.case import Net, confident_loss, default_dtype, seeded, squared_loss, weight
from samplewise.testing.compare import SECOND_ORDER, assert_agrees, assert_same, probe_for
from samplewise.testing.oracle import rows_of, wanted

# Sizes are drawn, so position ids come to have as many rows as there are samples.
pytestmark = pytest.mark.filterwarnings("ignore::samplewise.SamplesMayInteractWarning")

ALL_BUT_PAIRS = (
    "norms",
    "norms by parameter",
    "dot",
    "gram",
    "weighted sum",
    "sum of squares",
    "variance",
    "full",
    "by sample",
)
SIZES = st.integers(1, 7)


class Along(nn.Module):
    """Runs a layer that expects another layout of (B, T, d)."""

    def __init__(self, layer, there, back):
        super().__init__()
        self.layer, self.there, self.back = layer, there, back

    def forward(self, x):
        return self.back(self.layer(self.there(x)), x)


def heads_of(d):
    return next(h for h in (3, 2, 1) if d % h == 0)


TOKEN_LAYERS = {
    "linear": lambda d, T: nn.Linear(d, d),
    "linear without bias": lambda d, T: nn.Linear(d, d, bias=False),
    "layer norm": lambda d, T: nn.LayerNorm(d),
    "rms norm": lambda d, T: nn.RMSNorm(d),
    "attention": lambda d, T: Net(
        lambda m, x: m.f(x, x, x)[0], f=nn.MultiheadAttention(d, heads_of(d), batch_first=True)
    ),
    "attention, time first": lambda d, T: Net(
        lambda m, x: m.f(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), need_weights=False)[0].transpose(
            0, 1
        ),
        f=nn.MultiheadAttention(d, heads_of(d)),
    ),
    "gru": lambda d, T: Net(lambda m, x: m.f(x)[0], f=nn.GRU(d, d, batch_first=True)),
    "lstm, time first": lambda d, T: Net(lambda m, x: m.f(x.transpose(0, 1))[0].transpose(0, 1), f=nn.LSTM(d, d)),
    "convolution": lambda d, T: Along(nn.Conv1d(d, d, 3, padding=1), lambda x: x.mT, lambda y, x: y.mT),
    "depthwise": lambda d, T: Along(nn.Conv1d(d, d, 3, padding=1, groups=d), lambda x: x.mT, lambda y, x: y.mT),
    "mix over time": lambda d, T: Along(nn.Linear(T, T), lambda x: x.mT, lambda y, x: y.mT),
    "flattened": lambda d, T: Along(nn.Linear(d, d), lambda x: x.reshape(-1, d), lambda y, x: y.view(x.shape)),
    "time first, flattened": lambda d, T: Along(
        nn.Linear(d, d),
        lambda x: x.transpose(0, 1).reshape(-1, d),
        lambda y, x: y.view(x.shape[1], x.shape[0], d).transpose(0, 1),
    ),
    "positions": lambda d, T: Net(lambda m, x: x + m.table(torch.arange(x.shape[1])[None]), table=nn.Embedding(T, d)),
    "position table": lambda d, T: Net(lambda m, x: x + m.table[: x.shape[1]], table=weight(T + 2, d)),
    "scale": lambda d, T: Net(lambda m, x: x * m.scale + m.shift, scale=weight(d), shift=weight(1)),
    "prelu": lambda d, T: nn.PReLU(),
    "low rank": lambda d, T: Net(lambda m, x: x + x @ (m.up @ m.down), up=weight(d, 2), down=weight(2, d)),
    "weight per token": lambda d, T: Net(lambda m, x: torch.einsum("btd,tde->bte", x, m.w), w=weight(T, d, d)),
    "sorted by value": lambda d, T: Along(
        nn.Linear(d, d), lambda x: x[x[:, 0, 0].argsort()], lambda y, x: y[x[:, 0, 0].argsort().argsort()]
    ),
    "routed": lambda d, T: Net(routed, a=nn.Linear(d, d), b=nn.Linear(d, d)),
    "checkpointed": lambda d, T: Net(
        lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Sequential(nn.Linear(d, d), nn.Tanh())
    ),
    "slots": lambda d, T: Net(
        lambda m, x: (x @ m.keys.t()).softmax(-1) @ m.values, keys=weight(4, d), values=weight(4, d)
    ),
    "weight norm": lambda d, T: nn.utils.parametrizations.weight_norm(nn.Linear(d, d)),
    "gate": lambda d, T: Net(lambda m, x: x + m.gate * m.f(x), gate=weight(), f=nn.Linear(d, d)),
    "in place": lambda d, T: Net(lambda m, x: m.f(x).mul_(m.s).relu_(), f=nn.Linear(d, d), s=weight(d)),
}


def routed(m, x):
    flat = x.flatten(0, 1)
    here = flat[:, 0] > 0
    out = torch.zeros_like(flat)
    out = out.index_put((here.nonzero().squeeze(1),), m.a(flat[here]))
    return out.index_add(0, (~here).nonzero().squeeze(1), m.b(flat[~here])).view(x.shape)


REDUCTIONS = {
    "squares": lambda h: squared_loss(h),
    "mean over time": lambda h: squared_loss(h.mean(1)),
    "last token": lambda h: squared_loss(h[:, -1].tanh()),
    "largest": lambda h: h.flatten(1).max(1).values,
    "cross-entropy": lambda h: F.cross_entropy(h.mT, torch.zeros(h.shape[:2], dtype=torch.long), reduction="none").sum(
        1
    ),
    "confident": lambda h: confident_loss(h),
    "hinge": lambda h: h.flatten(1).relu().sum(1),
    "hardest": lambda h: squared_loss(h).sort().values,
}


@st.composite
def models(draw):
    B, T, d = draw(SIZES), draw(SIZES), draw(st.sampled_from([2, 3, 4, 6]))
    kinds = draw(st.lists(st.sampled_from(sorted(TOKEN_LAYERS)), min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=5))
    options = dict(residual=draw(st.booleans()), embedded=draw(st.booleans()), tied=draw(st.booleans()))
    return B, T, d, tuple(kinds), tuple(order), options, draw(st.sampled_from(sorted(REDUCTIONS)))


def build(B, T, d, kinds, order, options, reduction):
    """Layers of `kinds`, run in `order`: one may come up twice, or not at all."""

    def forward(m, x):
        h = m.words(x) if options["embedded"] else x
        for k in order:
            h = torch.tanh(m.layers[k](h)) + (h if options["residual"] else 0)
        return F.linear(h, m.words.weight) if options["tied"] else h

    layers = nn.ModuleList([TOKEN_LAYERS[kind](d, T) for kind in kinds])
    model = Net(forward, words=nn.Embedding(9, d), layers=layers)
    x = torch.randint(0, 9, (B, T)) if options["embedded"] else torch.randn(B, T, d)
    return model, lambda: REDUCTIONS[reduction](model(x))


@settings(max_examples=4 * settings.default.max_examples)
@given(models(), st.sampled_from([None, "twice", "full"]))
def test_random_models(recipe, strategy):
    with default_dtype(torch.float64), seeded(0):
        model, losses = build(*recipe)
        rows = rows_of(losses(), wanted(model))
        g = sw.gradients(losses(), model, strategy=strategy)
        assert_agrees(g, rows, probe_for(wanted(model), len(rows)), ALL_BUT_PAIRS)
        for name in ("norms", "weighted sum"):
            assert_agrees(
                sw.gradients(losses(), model, strategy=strategy), rows, probe_for(wanted(model), len(rows)), [name]
            )


@given(models())
def test_random_models_to_second_order(recipe):
    with default_dtype(torch.float64), seeded(0), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model, losses = build(*recipe)
        parameters = list(wanted(model).values())
        squares = [
            sw.gradients(losses(), model, create_graph=True).gram().diagonal().sum(),
            rows_of(losses(), wanted(model), create_graph=True).gram().diagonal().sum(),
        ]
        slopes = [
            torch.autograd.grad(s, parameters, allow_unused=True, materialize_grads=True) if s.requires_grad else None
            for s in squares
        ]
        if slopes[1] is not None:
            found, expected = (dict(zip(wanted(model), s, strict=True)) for s in slopes)
            assert_same(found, expected, SECOND_ORDER, "slope")


@given(
    B=SIZES,
    channels=st.sampled_from([2, 4, 6]),
    groups=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    rank=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_random_convolutions(B, channels, groups, kernel, stride, padding, dilation, rank, transposed):
    with default_dtype(torch.float64), seeded(0):
        kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{rank}d")
        padding = min(padding, dilation * (kernel - 1)) if transposed else padding
        layer = kind(channels, 2 * groups, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
        x = torch.randn(B, channels, *(7, 6, 5)[:rank])
        rows = rows_of(squared_loss(layer(x)), wanted(layer))
        assert_agrees(sw.gradients(squared_loss(layer(x)), layer), rows, probe_for(wanted(layer), B), ALL_BUT_PAIRS)


@settings(max_examples=4 * settings.default.max_examples)
@given(st.data())
def test_random_contractions(data):
    """einsum of an activation and a parameter, with any letters shared, the sample's letter anywhere."""
    sizes = dict(b=data.draw(SIZES), t=3, d=4, e=2, h=3)
    activation = data.draw(st.permutations("btd"))
    kept = data.draw(st.sets(st.sampled_from("td")))
    parameter = data.draw(st.permutations("deh"[: data.draw(st.integers(2, 3))]))
    output = "b" + "".join(sorted((set(parameter) - {"d"}) | kept))
    formula = f"{''.join(activation)},{''.join(parameter)}->{output}"
    with default_dtype(torch.float64), seeded(0):
        x, model = torch.randn([sizes[k] for k in activation]), Net(None, w=weight(*(sizes[k] for k in parameter)))
        rows = rows_of(squared_loss(torch.einsum(formula, x, model.w).tanh()), wanted(model))
        g = sw.gradients(squared_loss(torch.einsum(formula, x, model.w).tanh()), model)
        assert_agrees(g, rows, probe_for(wanted(model), sizes["b"]), ALL_BUT_PAIRS)


@given(B=st.integers(2, 9), mixed=st.booleans(), seed=st.integers(0, 1000), width=st.integers(1, 3))
def test_random_mixtures_are_refused_and_mere_reorderings_are_not(B, mixed, seed, width):
    """losses = M · per-row losses: a permutation is no meeting of samples, a second entry in a column is one."""
    with default_dtype(torch.float64), seeded(seed):
        model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(B, 4)
        matrix = torch.eye(B)[torch.randperm(B)]
        if mixed:
            column = torch.randint(0, B, ())
            matrix[:, column] = 0
            matrix[torch.randperm(B)[: min(width + 1, B)], column] = 1.0
        rows = rows_of(matrix @ squared_loss(model(x)), wanted(model))
        allowed = sw.gradients(matrix @ squared_loss(model(x)), model, interacting="allow")
        assert_agrees(allowed, rows, probe_for(wanted(model), B))
        try:
            assert_agrees(sw.gradients(matrix @ squared_loss(model(x)), model), rows, probe_for(wanted(model), B))
            assert not mixed, "samples interact and nobody said so"
        except sw.SamplesInteractError:
            assert mixed
