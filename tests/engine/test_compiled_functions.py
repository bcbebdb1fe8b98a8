"""Functions made by torch.compile inside an ordinary model: exact, refused if they mix samples or hold parameters."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import rows_by_loop
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import get_donated_idxs

import samplewise as sw
from samplewise.errors import GraphError, SamplesInteractError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
T, D = 5, 8


def attention(q, k, v):
    return (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v


def activation(x):
    return F.gelu(x) * torch.sigmoid(x)


def criterion(z, y):
    return F.cross_entropy(z, y, reduction="none")


class Model(nn.Module):
    """One attention layer; `compiled`: the function that is compiled."""

    def __init__(self, compiled=None, backend="aot_eager"):
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(D, 3 * D)
        self.outside = nn.Linear(D, 3)
        self.functions = {f.__name__: f for f in (attention, activation, criterion)}
        if compiled is not None:
            self.functions[compiled] = torch.compile(self.functions[compiled], backend=backend)
        self.double()

    def logits(self, x):
        q, k, v = (t.unflatten(-1, (2, D // 2)).transpose(1, 2) for t in self.inside(x).chunk(3, -1))
        h = self.functions["attention"](q, k, v).transpose(1, 2).flatten(2)
        return self.outside(self.functions["activation"](h)).mean(1)

    def forward(self, x, y):
        return self.functions["criterion"](self.logits(x), y)


def batch(size):
    return torch.randn(size, T, D, dtype=torch.double), torch.arange(size) % 3


def assert_as_plain(model, size):
    """Norms and sums, compared with a loop over the samples of the model that is not compiled."""
    x, y = batch(size)
    plain = Model()
    rows = rows_by_loop(plain(x, y), plain)
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    g = sw.gradients(model(x, y), model)
    torch.testing.assert_close(g.norms(), norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(g.norms(), norms, rtol=1e-9, atol=0)
    sums = g.sum(1 / norms)
    for name, r in rows.items():
        torch.testing.assert_close(sums[name], torch.einsum("b...,b->...", r, 1 / norms), rtol=1e-9, atol=1e-12)
    # The loss of the batch, clipped, through the logits.
    logits = model.logits(x)
    sw.backward(model.functions["criterion"](logits, y).sum(), model, outputs=logits, transforms=[sw.clip(0.1)])
    for name, p in model.named_parameters():
        weights = (0.1 / norms).clamp_max(1)
        torch.testing.assert_close(p.grad, torch.einsum("b...,b->...", rows[name], weights), rtol=1e-9, atol=1e-12)
        p.grad = None


@pytest.mark.parametrize("compiled", ["attention", "activation", "criterion"])
def test_functions_of_activations(compiled):
    model = Model(compiled)
    for size in (4, 4, 6):
        assert_as_plain(model, size)


def compile_overwriting(graph, inputs):
    """Compiler of a backward pass that overwrites the tensors that it may."""
    donated = get_donated_idxs()
    assert donated

    def run(*args):
        results = graph(*args)
        for position in donated:
            args[position].fill_(7)
        return results

    return make_boxed_func(run)


@pytest.mark.parametrize("compiled", ["attention", "criterion"])
def test_a_backward_that_overwrites_saved_tensors(compiled):
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=compile_overwriting)
    model = Model(compiled, backend)
    for size in (4, 4, 6):
        assert_as_plain(model, size)


@pytest.mark.slow
def test_code_of_inductor():
    model = Model("attention", "inductor")
    for size in (4, 4, 6):
        assert_as_plain(model, size)


def test_torch_still_refuses_to_repeat_a_backward_that_samplewise_has_not_seen():
    model = Model("attention")
    assert_as_plain(model, 4)
    losses = model(*batch(4))
    with pytest.raises(RuntimeError, match="donated buffer"):
        losses.sum().backward(retain_graph=True)


def test_a_function_that_mixes_samples_is_refused():
    model = Model()
    model.functions["activation"] = torch.compile(lambda h: h.softmax(0), backend="aot_eager")
    for _ in range(2):
        with pytest.raises(SamplesInteractError, match=r"Function 'CompiledFunction' .* mixes samples"):
            sw.gradients(model(*batch(4)), model).norms()


def test_compiled_parameters_are_refused_by_name():
    model = Model()
    model.outside = torch.compile(model.outside, backend="aot_eager")
    message = r"found outside._orig_mod.weight, outside._orig_mod.bias in one, .* compile only functions of activations"
    with pytest.raises(GraphError, match=message):
        sw.gradients(model(*batch(4)), model)
    model.outside.requires_grad_(False)
    x, y = batch(4)
    plain = Model()
    rows = rows_by_loop(plain(x, y), {"weight": plain.inside.weight})
    torch.testing.assert_close(sw.gradients(model(x, y), [model.inside.weight]).full()["0"], rows["weight"])
