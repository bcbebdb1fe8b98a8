"""Each rule of the table against the loop, on a model that needs it. A new rule fails here until it has one."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.engine.rules import RULES, Rule
from samplewise.engine.rules.rule_input import summed
from samplewise.testing.case import Net, noise, weight
from samplewise.testing.conformance import check_rule

SAMPLES = 4


def tokens(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % 7


def on(model, x, dtype=torch.float64):
    """A model and its losses on x."""
    model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    return model, lambda m: (m(x).reshape(SAMPLES, -1) + 0.1).square().mean(1)


linear = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
conv = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 40, 3), nn.Tanh())
norm = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4).eval())


def experts(m, x):
    """Tokens (b, t, i), each multiplied by one of the matrices (h, o, i); the second one gets none."""
    expert, order = (x[..., 0].flatten() > 0).mul(2).sort()
    ends = torch.stack([(expert <= h).sum() for h in range(len(m.w))]).int()
    y = F.grouped_mm(x.flatten(0, 1)[order], m.w.mT, offs=ends)
    return y[order.argsort()].tanh()


def with_weight(forward, *shape):
    return Net(forward, w=weight(*shape))


EXAMPLES = {
    ("Mm", 0): lambda: on(with_weight(lambda m, x: (m.w @ x.T).T.tanh(), 3, 6), noise(SAMPLES, 6)),
    ("Mm", 1): lambda: on(nn.Linear(6, 3, bias=False), noise(SAMPLES, 5, 6)),
    ("Addmm", 0): lambda: on(linear, noise(SAMPLES, 6)),
    ("Addmm", 1): lambda: on(
        with_weight(lambda m, x: torch.addmm(x[:, :3].T, m.w, x.T, alpha=2).T.tanh(), 3, 6), noise(SAMPLES, 6)
    ),
    ("Addmm", 2): lambda: on(linear, noise(SAMPLES, 5, 6)),
    ("Bmm", 0): lambda: on(
        with_weight(lambda m, x: torch.einsum("bhi,hoi->obh", x, m.w).transpose(0, 1).tanh(), 2, 5, 6),
        noise(SAMPLES, 2, 6),
    ),
    ("Bmm", 1): lambda: on(
        with_weight(lambda m, x: torch.einsum("bhi,hio->bho", x, m.w).tanh(), 2, 6, 5), noise(SAMPLES, 2, 6)
    ),
    ("GroupedMm", 1): lambda: on(
        with_weight(experts, 3, 8, 4), noise(SAMPLES, 5, 4), torch.float32
    ),  # in PyTorch for float32 and half precision only
    ("Mv", 1): lambda: on(with_weight(lambda m, x: (x @ m.w).tanh(), 6), noise(SAMPLES, 6)),
    ("Trilinear", 1): lambda: on(Net(lambda m, x: m.f(x, x.tanh()), f=nn.Bilinear(6, 6, 3)), noise(SAMPLES, 5, 6)),
    ("LinalgSolveEx", 0): lambda: on(
        with_weight(lambda m, x: torch.linalg.solve(m.w + 3 * torch.eye(6), x.mT).mT, 6, 6), noise(SAMPLES, 5, 6)
    ),
    ("Cdist", 0): lambda: on(with_weight(lambda m, x: torch.cdist(m.w, x, p=3.0), 5, 6), noise(SAMPLES, 2, 6)),
    ("Cdist", 1): lambda: on(with_weight(lambda m, x: torch.cdist(x, m.w), 5, 6), noise(SAMPLES, 6)),
    ("EuclideanDist", 0): lambda: on(with_weight(lambda m, x: by_products(m.w, x).T, 5, 6), noise(SAMPLES, 6)),
    ("EuclideanDist", 1): lambda: on(with_weight(lambda m, x: by_products(x, m.w), 5, 6), noise(SAMPLES, 6)),
    ("Convolution", 1): lambda: on(conv, noise(SAMPLES, 2, 9, 9)),
    ("Convolution", 2): lambda: on(conv, noise(SAMPLES, 2, 9, 9)),
    ("Index", 0): lambda: on(with_weight(lambda m, x: m.w[x].tanh(), 7, 2, 3), tokens(SAMPLES, 5)),
    ("IndexSelect", 0): lambda: on(
        with_weight(lambda m, x: m.w.index_select(0, x.flatten()).tanh(), 7, 3), tokens(SAMPLES, 5)
    ),
    ("EmbeddingBag", 0): lambda: on(nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), tokens(SAMPLES, 5)),
    ("Embedding", 0): lambda: on(nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 3)), tokens(SAMPLES, 5)),
    ("NativeLayerNorm", 1): lambda: on(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm((5, 8))), noise(SAMPLES, 5, 6)),
    ("NativeLayerNorm", 2): lambda: on(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), noise(SAMPLES, 5, 6)),
    ("NativeGroupNorm", 1): lambda: on(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), noise(SAMPLES, 2, 6, 6)),
    ("NativeGroupNorm", 2): lambda: on(nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4)), noise(SAMPLES, 6)),
    ("NativeBatchNorm", 1): lambda: on(norm, noise(SAMPLES, 3, 6)),
    ("NativeBatchNorm", 2): lambda: on(norm, noise(SAMPLES, 3, 6)),
    ("Expand", 0): lambda: on(
        with_weight(lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1).cos(), 1, 2, 6), noise(SAMPLES, 5, 6)
    ),
    ("Add", 0): lambda: on(with_weight(lambda m, x: (m.w + x).tanh(), 5, 1), noise(SAMPLES, 5, 6)),
    ("Add", 1): lambda: on(with_weight(lambda m, x: x.add(m.w, alpha=3).tanh(), 6), noise(SAMPLES, 5, 6)),
    ("Sub", 0): lambda: on(with_weight(lambda m, x: (m.w - x).tanh(), 5, 1), noise(SAMPLES, 5, 6)),
    ("Sub", 1): lambda: on(with_weight(lambda m, x: x.sub(m.w, alpha=3).tanh(), 6), noise(SAMPLES, 5, 6)),
    ("Mul", 0): lambda: on(with_weight(lambda m, x: (m.w * x).tanh(), 5, 1), noise(SAMPLES, 5, 6)),
    ("Mul", 1): lambda: on(with_weight(lambda m, x: (x * m.w).tanh(), 6), noise(SAMPLES, 5, 6)),
    ("Div", 0): lambda: on(with_weight(lambda m, x: (m.w / (2 + x.cos())).tanh(), 6), noise(SAMPLES, 5, 6)),
    ("MkldnnRnnLayer", 1): lambda: lstm(),
    ("MkldnnRnnLayer", 2): lambda: lstm(bidirectional=True),
    ("MkldnnRnnLayer", 3): lambda: lstm(batch_first=True),
    ("MkldnnRnnLayer", 4): lambda: lstm(num_layers=2),
    ("PreluKernel", 1): lambda: on(nn.Sequential(nn.Linear(6, 4), nn.PReLU(4), nn.Linear(4, 3)), noise(SAMPLES, 6)),
}


def by_products(x, y):
    return torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")


def lstm(batch_first=False, **options):
    def forward(m, x):
        out, (h, c) = m.f(x if batch_first else x.transpose(0, 1))
        return torch.cat([(out if batch_first else out.transpose(0, 1)).flatten(1), h[-1], c[-1]], 1)

    return on(Net(forward, f=nn.LSTM(6, 4, batch_first=batch_first, **options)), noise(SAMPLES, 5, 6), torch.float32)


def test_every_rule_has_an_example():
    assert set(EXAMPLES) == set(RULES)


needs_grouped_mm = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm")


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=needs_grouped_mm if key[0] == "GroupedMm" else ()) for key in RULES],
    ids=lambda key: f"{key[0]}-{key[1]}",
)
def test_rule(key):
    torch.manual_seed(0)
    model, losses = EXAMPLES[key]()
    fused_kernel = key[0] in ("MkldnnRnnLayer", "GroupedMm")  # float32 only
    no_second_derivative = fused_kernel or key[0] in ("Cdist", "EmbeddingBag")  # in PyTorch
    check_rule(key, model, losses, 2e-4 if fused_kernel else 1e-9, second_order=not no_second_derivative)


@needs_grouped_mm
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.mT.contiguous().mT, lambda w: w.double().float()])
def test_matrices_of_experts_in_other_views(view):
    torch.manual_seed(0)
    model = Net(lambda m, x: experts(Net(None, w=view(m.w).mT), x), w=weight(3, 4, 8)).float()
    x = noise(SAMPLES, 5, 4).float()
    check_rule(("GroupedMm", 1), model, lambda m: m(x).reshape(SAMPLES, -1).square().mean(1), 2e-4)


@needs_grouped_mm
def test_experts_with_few_tokens_in_a_large_stack():
    """Factors are kept where rows would be larger."""
    torch.manual_seed(0)
    model = with_weight(experts, 3, 128, 64).float()
    x = noise(SAMPLES, 2, 64).float()
    check_rule(("GroupedMm", 1), model, lambda m: m(x).reshape(SAMPLES, -1).square().mean(1), 2e-4)
    table = sw.gradients(model(x).reshape(SAMPLES, -1).square().mean(1), model).explain()
    assert "3 matrices: factors, " in table


def test_a_rule_that_is_off_is_caught():
    model, losses = EXAMPLES["Add", 0]()
    twice = Rule(lambda use: summed(use, 2 * use.gradient))
    with mock.patch.dict(RULES, {("Add", 0): twice}), pytest.raises(AssertionError, match="norms: off by"):
        check_rule(("Add", 0), model, losses)


def test_a_rule_that_is_never_asked_is_caught():
    model, losses = EXAMPLES["Mv", 1]()
    with pytest.raises(AssertionError, match="found that the rule was not called"):
        check_rule(("Convolution", 1), model, losses)


@pytest.mark.parametrize(
    ("make", "channels", "size", "options"),
    [
        (nn.Conv2d, 2, 9, dict(kernel_size=3)),
        (nn.Conv2d, 20, 5, dict(kernel_size=3)),
        (nn.Conv2d, 3, 12, dict(kernel_size=5)),
        (nn.Conv2d, 40, 4, dict(kernel_size=2)),
        (nn.Conv2d, 8, 9, dict(kernel_size=3, stride=2, padding=(0, 1), dilation=(1, 2))),
        (nn.Conv1d, 16, 21, dict(kernel_size=4, padding=2, dilation=3)),
        (nn.Conv3d, 8, 4, dict(kernel_size=(2, 2, 3), stride=(1, 2, 1))),
    ],
)
def test_conv_in_every_form(make, channels, size, options):
    """Small and large kernels take different ways; none may change the numbers."""
    model = nn.Sequential(make(channels, 2 * channels, **options), nn.Tanh()).double()
    x = noise(SAMPLES, channels, *[size] * (model[0].weight.dim() - 2)).double()
    check_rule(("Convolution", 1), model, lambda m: F.softplus(m(x)).flatten(1).mean(1))


def test_sums_of_a_conv_lie_in_memory_as_its_weight_does():
    """Optimizers may ask it of .grad; turned rows are an affair of the rule."""
    model = nn.Conv2d(16, 32, 3)
    x = noise(SAMPLES, 16, 9, 9)
    g = sw.gradients(model(x).square().flatten(1).sum(1), model)
    g.backward(retain_graph=True)
    assert model.weight.grad.is_contiguous()
    assert g.sum()["weight"].is_contiguous() and g.sum_of_squares()["weight"].is_contiguous()
