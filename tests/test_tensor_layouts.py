"""Parameters without elements or dimensions, sparse and nested tensors: every quantity against the plain loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.errors import ParameterError

B = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Model(nn.Module):
    """A layer, and a further parameter `p`."""

    def __init__(self, p):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.p = nn.Parameter(p)

    def forward(self, x):
        return self.layer(x)


def ragged(layout):
    return torch.nested.nested_tensor([torch.randn(length, 3) for length in (2, 5, 1, 3)], layout=layout)


def padded(values):
    return values.to_padded_tensor(0.0).square().sum((1, 2))


def by_sample(values):
    """Sums of the rows of each sample of `ragged`."""
    return torch.zeros(B).index_add(0, torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3]), values)


def product(model, x):
    return (x @ model.layer.weight.T + model.layer.bias).exp().sum(1)


def attention(model, x):
    q = k = model(x).unflatten(-1, [2, 1]).transpose(1, 2)
    return padded(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(-2))


# name: parameter, function (model, x) -> losses, input
CASES = {
    "(0, 3)": (torch.zeros(0, 3), lambda m, x: m(x).square().sum(1) + (x @ m.p.T).sum(1), None),
    "(3, 0)": (torch.zeros(3, 0), lambda m, x: m(x).square().sum(1) + (x @ m.p).sum(1), None),
    "(0,)": (torch.zeros(0), lambda m, x: m(x).square().sum(1) + m.p.sum(), None),
    "(0, 3) of a linear layer": (
        torch.zeros(0, 3),
        lambda m, x: m(x).square().sum(1) + F.linear(x, m.p).exp().sum(1),
        None,
    ),
    "(0, 3) beside another": (
        torch.zeros(0, 3),
        lambda m, x: (x @ torch.cat([m.p, m.layer.weight]).T).square().sum(1) + m(x).sum(1),
        None,
    ),
    "(0, 3) with permuted rows": (
        torch.zeros(0, 3),
        lambda m, x: (m(x).square().sum(1) + (x @ m.p.T).sum(1))[torch.tensor([2, 0, 3, 1])],
        None,
    ),
    "() factor": (torch.tensor(1.3), lambda m, x: (m.p * m(x)).square().sum(1), None),
    "() exponent": (torch.tensor(1.3), lambda m, x: (m(x).abs() ** m.p).sum(1), None),
    "() temperature": (torch.tensor(1.3), lambda m, x: (m(x) / m.p.exp()).logsumexp(1), None),
    "COO": (torch.ones(3, 2), lambda m, x: (x @ m.p).square().sum(1) + product(m, x), "coo"),
    "CSR": (torch.ones(3, 2), lambda m, x: (x @ m.p).square().sum(1) + product(m, x), "csr"),
    "CSC": (torch.ones(3, 2), lambda m, x: (x @ m.p).square().sum(1) + product(m, x), "csc"),
    "CSR in a linear layer": (torch.ones(()), lambda m, x: m.p * m(x).square().sum(1), "csr"),
    "CSR with a vector": (torch.ones(3), lambda m, x: (x @ m.p).square() + product(m, x), "csr"),
    "COO parameter": (
        torch.eye(2, 3).to_sparse(),
        lambda m, x: torch.sparse.mm(m.p, x.T).T.square().sum(1) + m(x).sum(1),
        None,
    ),
    "CSR parameter": (
        lambda: torch.eye(2, 3).to_sparse_csr(),
        lambda m, x: (m.p @ x.T).T.exp().sum(1) + m(x).sum(1),
        None,
    ),
    "jagged": (torch.ones(2, 2), lambda m, x: padded(F.linear(torch.tanh(m(x)), m.p)), torch.jagged),
    "jagged, single samples": (
        torch.ones(()),
        lambda m, x: m.p * torch.stack([one.square().sum() for one in m(x).unbind()]),
        torch.jagged,
    ),
    "jagged values": (torch.ones(()), lambda m, x: m.p * by_sample(m(x).values().exp().sum(1)), torch.jagged),
    "jagged attention": (torch.ones(()), lambda m, x: m.p * attention(m, x), torch.jagged),
    "nested": (torch.ones(2, 2), lambda m, x: padded(F.linear(m(x), m.p)), torch.strided),
    "nested, single samples": (
        torch.ones(()),
        lambda m, x: m.p * torch.stack([one.square().sum() for one in m(x).unbind()]),
        torch.strided,
    ),
}  # fmt: skip


def make(name):
    p, loss, kind = CASES[name]
    dense = torch.randn(B, 3) * (torch.rand(B, 3) > 0.3)
    sparse = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(), None: dense}
    x = ragged(kind) if isinstance(kind, torch.layout) else sparse[kind]
    return Model((p if isinstance(p, torch.Tensor) else p()).double().clone()), loss, x


def rows_by_loop(losses, model):
    rows = {name: [] for name, _ in model.named_parameters()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            rows[name].append(torch.zeros(p.shape) if gradient is None else gradient.to_dense())
    return {name: torch.stack(stack) for name, stack in rows.items()}


def close(found, expected):
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-9, atol=1e-12)


def flat(rows):
    return torch.cat([row.reshape(len(row), -1) for row in rows.values()], 1)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_quantity(name, strategy):
    model, loss, x = make(name)
    losses = loss(model, x)
    rows = rows_by_loop(losses, model)
    g = sw.gradients(losses, model, strategy=strategy)
    weights = torch.rand(B)
    direction = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    close(g.norms(), flat(rows).norm(dim=1))
    close(g.dot(direction), (flat(rows) * torch.cat([d.flatten() for d in direction.values()])).sum(1))
    close(g.dot(g), flat(rows).square().sum(1))
    close(g.gram(), flat(rows) @ flat(rows).T)
    close(g.gram(rows), flat(rows) @ flat(rows).T)
    assert g.project(4).shape == (B, 4)
    for name, row in rows.items():
        close(g.norms(by="parameter")[name], row.reshape(B, -1).norm(dim=1))
        close(g.sum()[name], row.sum(0))
        close(g.sum(weights)[name], torch.tensordot(weights, row, 1))
        close(g.sum_of_squares()[name], row.square().sum(0))
        close(g.variance()[name], (row - row.mean(0)).square().sum(0) / (B - 1))
        close(g.full()[name], row)
        close(g[name], row)
        close(g[1][name], row[1])
    g.backward(weights, retain_graph=True)
    for name, p in model.named_parameters():
        close(p.grad, torch.tensordot(weights, rows[name], 1))
    assert len(g.explain().splitlines()) > 3


@pytest.mark.parametrize("name", [name for name in CASES if "CSR par" not in name])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", [None, 4.0])
def test_steps(name, compile, clip):
    """Torch's optimizers do not change CSR parameters."""
    model, loss, x = make(name)
    before = {name: p.detach().to_dense().clone() for name, p in model.named_parameters()}
    rows = rows_by_loop(loss(model, x), model)
    transforms = [] if clip is None else [sw.clip(clip)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = sw.Step(model, optimizer, loss, transforms=transforms, compile=compile, recheck=False)
    (update,) = step(x)
    assert len(update.losses) == B
    norms = flat(rows).norm(dim=1)
    weights = torch.ones(B) if clip is None else (clip / norms).clamp_max(1)
    for name, p in model.named_parameters():
        close(p.detach(), before[name] - torch.tensordot(weights, rows[name], 1) / B)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(
    "name", [name for name in CASES if "parameter" not in name and "permuted" not in name and "values" not in name]
)
def test_microbatches_scan_check_and_backward(name):
    model, loss, x = make(name)
    norms = flat(rows_by_loop(loss(model, x), model)).norm(dim=1)
    found = torch.cat([g.norms() for _, g in sw.scan(model, loss, [x], microbatch=3)])
    close(found, norms)
    close(torch.cat([g.norms() for _, g in sw.scan(model, loss, [x])]), norms)
    check = sw.check(model, loss, x)
    assert check.ok, str(check)
    assert "recomputed alone" in str(check)
    close(sw.backward(loss(model, x), model, transforms=[sw.clip(1.0)]).norms, norms)
    model.zero_grad()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, samples=3, transforms=[sw.clip(1.0)])
    found = torch.cat([update.norms for update in step.over([x, x, x])])
    close(found, norms.repeat(3))


def test_weights_by_parameter_need_strided_parameters():
    model, loss, x = make("COO parameter")
    g = sw.gradients(loss(model, x), model)
    weights = {name: torch.ones(B) for name, _ in model.named_parameters()}
    with pytest.raises(ParameterError, match=r"found a dict, and the sparse parameter 'p'\. Use g\.sum\(weights\)"):
        g.backward(weights)
    assert all(p.grad is None for p in model.parameters())
    close(g.sum(weights)["p"], g.full()["p"].sum(0))


INPUTS = {
    "COO": (lambda: torch.randn(B, 3).to_sparse(), lambda w, x: (x @ w).square().sum(1)),
    "CSR": (lambda: torch.randn(B, 3).to_sparse_csr(), lambda w, x: (x @ w).square().sum(1)),
    "jagged": (lambda: ragged(torch.jagged), lambda w, x: padded(F.linear(x, w.T))),
    "nested": (lambda: ragged(torch.strided), lambda w, x: padded(F.linear(x, w.T))),
    "nested inside": (
        lambda: torch.randn(B, 5, 3),
        lambda w, x: padded(F.linear(torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged), w.T)),
    ),
    "no elements": (lambda: torch.randn(B, 0), lambda w, x: x.exp().sum(1) + w.sum()),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input_gradients(name):
    make_input, loss = INPUTS[name]
    x = make_input().requires_grad_()
    w = torch.randn(3, 2, requires_grad=True)

    def values(tensor):
        return tensor.values() if tensor.is_nested else tensor.to_dense()

    losses = loss(w, x)
    (expected,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    torch.testing.assert_close(values(sw.input_gradients(losses, x)), values(expected), rtol=1e-12, atol=1e-14)
    other = make_input().requires_grad_()
    with pytest.raises(sw.GraphError, match="no path to it in the graph"):
        sw.input_gradients(losses, other)
    if name != "no elements":
        with pytest.raises(sw.SamplesInteractError, match="found elements shared by several samples"):
            sw.input_gradients(losses + losses.sum(), x)
