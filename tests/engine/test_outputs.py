"""Scalar losses with `outputs=`: the samples' parts of the gradient, against autograd and against the loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.errors import GraphError, LossesError, SamplesInteractError

B, CLASSES = 6, 4


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small_model(inputs=5, outputs=CLASSES):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def check_sum(loss, model, outputs):
    """Compare g.sum() with autograd, and return g."""
    wanted = dict(model.named_parameters())
    expected = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), retain_graph=True), strict=True))
    g = sw.gradients(loss, model, outputs=outputs)
    found = g.sum()
    for name, gradient in expected.items():
        exact = {"rtol": 1e-12, "atol": 1e-14} if gradient.dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found[name], gradient, **exact)
    return g


def check_rows(g, model, loss_of, samples):
    """Compare each row with the gradient of loss_of(i), the part of sample i in the loss."""
    for i in range(samples):
        expected = torch.autograd.grad(loss_of(i), list(model.parameters()))
        for row, gradient in zip(g[i].values(), expected, strict=True):
            torch.testing.assert_close(row, gradient, rtol=1e-11, atol=1e-13)


def test_cross_entropy_with_smoothing_weights_and_ignored_targets():
    model = small_model()
    x = torch.randn(B, 5)
    y = torch.tensor([0, 1, -100, 3, 2, 1])
    options = {"label_smoothing": 0.1, "weight": torch.rand(CLASSES) + 0.5}
    z = model(x)
    g = check_sum(F.cross_entropy(z, y, **options), model, z)
    total = options["weight"][y[y >= 0]].sum()
    check_rows(g, model, lambda i: F.cross_entropy(model(x[[i]]), y[[i]], reduction="sum", **options) / total, B)
    assert g.norms()[2] == 0


def test_mse_and_bce():
    model = small_model()
    x, y = torch.randn(B, 5), torch.rand(B, CLASSES)
    for criterion in (F.mse_loss, F.binary_cross_entropy_with_logits):
        z = model(x)
        g = check_sum(criterion(z, y), model, z)
        check_rows(g, model, lambda i, criterion=criterion: criterion(model(x[[i]]), y[[i]]) / B, B)


def test_outputs_with_one_value_per_sample():
    model = small_model(outputs=1)
    x, y = torch.randn(B, 5), torch.randn(B)
    z = model(x)[:, 0]
    g = check_sum(F.mse_loss(z, y), model, z)
    check_rows(g, model, lambda i: F.mse_loss(model(x[[i]])[:, 0], y[[i]]) / B, B)


def test_ctc():
    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 6, batch_first=True)
            self.head = nn.Linear(6, 5)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model = Recognizer()
    x = torch.randn(B, 9, 3)
    targets = torch.randint(1, 5, (B, 3))
    lengths = torch.tensor([9, 8, 9, 7, 9, 6])
    target_lengths = torch.tensor([3, 2, 3, 1, 2, 3])

    def loss_of(z, rows):
        log_probs = z.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets[rows], lengths[rows], target_lengths[rows])

    z = model(x)
    g = check_sum(loss_of(z, slice(None)), model, z)
    check_rows(g, model, lambda i: loss_of(model(x[[i]]), [i]) / B, B)


def test_causal_language_model_with_token_counts():
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.rnn = nn.LSTM(6, 6, batch_first=True)

        def forward(self, tokens):
            return self.rnn(self.embedding(tokens))[0] @ self.embedding.weight.T

    model = LM()
    tokens = torch.randint(11, (B, 7))
    labels = tokens.clone()
    for row, length in enumerate([7, 3, 5, 7, 2, 6]):
        labels[row, length:] = -100
    count = (labels[:, 1:] != -100).sum()

    def loss_of(z, rows):
        shifted = z[:, :-1].flatten(0, 1)
        return F.cross_entropy(shifted, labels[rows][:, 1:].flatten(), reduction="sum") / count

    z = model(tokens)
    g = check_sum(loss_of(z, slice(None)), model, z)
    check_rows(g, model, lambda i: loss_of(model(tokens[[i]]), [i]), B)


def test_several_outputs_of_which_one_is_computed_from_another():
    model = small_model()
    x, y = torch.randn(B, 5), torch.randint(CLASSES, (B,))

    def loss_of(hidden, z, y, samples):
        return F.cross_entropy(z, y, reduction="sum") / B + hidden.square().sum() / B + z.sigmoid().sum()

    hidden = model[1](model[0](x))
    z = model[2](hidden)
    loss = loss_of(hidden, z, y, B)

    def alone(i):
        h = model[1](model[0](x[[i]]))
        return loss_of(h, model[2](h), y[[i]], 1)

    for outputs in ([z, hidden], (hidden, z)):
        check_rows(check_sum(loss, model, outputs), model, alone, B)
    with pytest.raises(GraphError, match=r"the whole loss must pass through outputs; found that it depends on '0.weig"):
        sw.gradients(loss, model, outputs=z)
    only_z = F.cross_entropy(z, y)  # `hidden` reaches this loss through z only
    norms = sw.gradients(only_z, model, outputs=z).norms()
    torch.testing.assert_close(sw.gradients(only_z, model, outputs=[hidden, z]).norms(), norms, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_that_are_wider_copies_of_what_the_loss_was_computed_from(dtype):
    model = small_model().to(dtype)
    x, y = torch.randn(B, 5).to(dtype), torch.randint(CLASSES, (B,))
    z = model(x)
    loss = F.cross_entropy(z, y)
    for copies in (z.double(), z.float().double(), z.clone()):
        found = sw.gradients(loss, model, outputs=copies)
        expected = sw.gradients(loss, model, outputs=z)
        for name in found.names:
            assert torch.equal(found[name], expected[name])
    narrower = small_model()
    z = narrower(x.double())
    with pytest.raises(GraphError, match="no path from the loss"):
        sw.gradients(F.cross_entropy(z, y), narrower, outputs=z.float())


def test_copies_and_originals_in_one_loss():
    model = small_model().float()
    x, y = torch.randn(B, 5).float(), torch.randint(CLASSES, (B,))
    z = model(x)
    copy = z.double()
    loss = F.cross_entropy(z, y) + copy.square().mean()
    found = sw.gradients(loss, model, outputs=copy).sum()
    for total, gradient in zip(found.values(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-5, atol=1e-7)


def test_one_output_of_an_operation_with_several():
    model = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(B, 5, 3)
    output, (hidden, _) = model(x)
    last = hidden[0]
    check_sum(output.square().mean() + last.sum(), model, [output, last])
    with pytest.raises(GraphError, match="the whole loss must pass through outputs"):
        sw.gradients(output.square().mean() + last.sum(), model, outputs=output)


def test_complex_outputs():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 8)

        def forward(self, x):
            return torch.fft.fft(self.linear(x))

    model = Spectrum()
    x = torch.randn(B, 5)
    z = model(x)
    g = check_sum((z.abs() + z.real).mean(), model, z)
    check_rows(g, model, lambda i: ((model(x[[i]]).abs() + model(x[[i]]).real).mean()) / B, B)


def test_a_loss_that_combines_samples_above_the_outputs():
    model = small_model()
    x = torch.randn(B, 5)
    z = F.normalize(model(x))
    loss = F.cross_entropy(z @ z.T / 0.1, torch.arange(B).roll(1))
    g = check_sum(loss, model, z)
    c = torch.autograd.grad(loss, z, retain_graph=True)[0]
    check_rows(g, model, lambda i: (c[i] * F.normalize(model(x[[i]]))[0]).sum(), B)


def test_samples_that_interact_below_the_outputs_are_refused():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    z = model(torch.randn(B, 5))
    with pytest.raises(SamplesInteractError):
        sw.gradients(z.square().mean(), model, outputs=z).norms()


def test_penalties_and_auxiliary_losses_are_refused_with_the_parameter():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(5, 2)
            self.experts = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(2))

        def forward(self, x):
            gates = self.router(x).softmax(-1)
            z = sum(gate[:, None] * expert(x) for gate, expert in zip(gates.unbind(1), self.experts, strict=True))
            return z, gates.mean(0).square().sum()  # load balancing

    model = Experts()
    z, auxiliary = model(torch.randn(B, 5))
    loss = z.square().mean()
    check_sum(loss, model, z)
    with pytest.raises(GraphError, match=r"depends on 'router.weight' and 1 other parameter on another path, as a"):
        sw.gradients(loss + auxiliary, model, outputs=z)
    frozen_router = {name: p for name, p in model.named_parameters() if "router" not in name}
    sw.gradients(loss + auxiliary, frozen_router, outputs=z).norms()  # no wanted parameter is on the other path
    with pytest.raises(GraphError, match=r"depends on 'experts.0.weight' on another path"):
        sw.gradients(loss + model.experts[0].weight.square().sum(), model, outputs=z)


def double(gradient):
    return 2 * gradient


def mask(gradient):
    return gradient * (torch.arange(gradient.shape[-1]) % 2)


def test_hooks_of_the_outputs_are_called_once():
    model = small_model()
    z = model(torch.randn(6, 5))
    z.register_hook(lambda gradient: 2 * gradient)
    check_sum(F.cross_entropy(z, torch.randint(CLASSES, (6,))), model, z)


COPIES = {
    "clone": lambda z: z.clone(),
    "wider": lambda z: z.double(),
    "wider clone": lambda z: z.double().clone(),
    "clone of a clone": lambda z: z.clone().clone(),
    "alias": lambda z: z[...],
}


@pytest.mark.parametrize("hook", [double, mask, lambda gradient: gradient.mul_(3)], ids=["double", "mask", "in place"])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_hook_on_what_the_outputs_are_a_copy_of_acts_once(copy, hook):
    model = small_model().float()
    x, y = torch.randn(B, 5).float(), torch.randint(CLASSES, (B,))
    z = model(x)
    z.register_hook(hook)
    loss = F.cross_entropy(z, y)
    outputs = copy(z)
    expected = sw.gradients(loss, model, outputs=z)
    found = sw.gradients(loss, model, outputs=outputs)
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for name, gradient in zip(found.names, gradients, strict=True):
        assert torch.equal(found[name], expected[name])
        torch.testing.assert_close(found[name].sum(0), gradient, rtol=1e-5, atol=1e-7)


def test_a_hook_on_what_the_outputs_are_a_copy_of_if_the_loss_uses_both():
    model = small_model()
    z = model(torch.randn(B, 5))
    z.register_hook(mask)
    copy = z.clone()
    loss = F.cross_entropy(z, torch.randint(CLASSES, (B,))) + copy.square().mean()
    for outputs in (copy, [z, copy], [copy, z]):
        check_sum(loss, model, outputs)
    copy.register_hook(double)  # acts on the part of the loss that passes the copy
    for outputs in ([z, copy], [copy, z]):
        check_sum(loss, model, outputs)
    with pytest.raises(GraphError, match="hook between outputs and the tensor"):
        sw.gradients(loss, model, outputs=copy)


def hook_on_copy(z, register):
    copy = z.clone()
    register(copy)
    return copy


def hook_between(z):
    between = z.clone()
    between.register_hook(double)
    return between.clone()


UNUSED = {
    "tensor hook": lambda z: hook_on_copy(z, lambda copy: copy.register_hook(double)),
    "small change": lambda z: hook_on_copy(z, lambda copy: copy.register_hook(lambda g: g * (1 + 1e-12))),
    "clipping of large gradients": lambda z: hook_on_copy(z, lambda copy: copy.register_hook(lambda g: g.clamp(-9, 9))),
    "node posthook": lambda z: hook_on_copy(z, lambda copy: copy.grad_fn.register_hook(lambda i, o: (2 * i[0],))),
    "node prehook": lambda z: hook_on_copy(z, lambda copy: copy.grad_fn.register_prehook(lambda o: (2 * o[0],))),
    "hook between two copies": hook_between,
    "clipping between two copies": lambda z: hook_on_copy(
        z, lambda c: c.register_hook(lambda g: g.clamp(-9, 9))
    ).clone(),
    "sparsified between two copies": lambda z: hook_on_copy(
        z, lambda c: c.register_hook(lambda g: g * (g.abs() > 1e-9))
    ).clone(),
}


@pytest.mark.parametrize("copy", UNUSED.values(), ids=UNUSED)
def test_a_hook_on_a_copy_that_the_loss_does_not_pass_is_refused(copy):
    model = small_model()
    z = model(torch.randn(B, 5))
    loss = F.cross_entropy(z, torch.randint(CLASSES, (B,)))
    outputs = copy(z)
    with pytest.raises(GraphError, match=r"found a hook between outputs and the tensor\. Pass the"):
        sw.gradients(loss, model, outputs=outputs)
    check_sum(loss, model, z)


def test_a_hook_on_a_copy_that_the_loss_passes():
    for copy in UNUSED.values():
        model = small_model()
        outputs = copy(model(torch.randn(B, 5)))
        check_sum(F.cross_entropy(outputs, torch.randint(CLASSES, (B,))), model, outputs)


class _DDPSink(torch.autograd.Function):
    """A Function of the name of a copy, with another gradient."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def test_a_function_named_like_a_copy_is_none():
    model = small_model()
    z = model(torch.randn(B, 5))
    loss = F.cross_entropy(z, torch.randint(CLASSES, (B,)))
    with pytest.raises(GraphError, match="no path from the loss"):
        sw.gradients(loss, model, outputs=_DDPSink.apply(z))
    outputs = _DDPSink.apply(z)
    check_sum(F.cross_entropy(outputs, torch.randint(CLASSES, (B,))), model, outputs)


NOT_COPIES = {
    "view": lambda z: z.view(B, 2, 2),
    "whole slice": lambda z: z[:],
    "slice": lambda z: z[:, 1:],
    "transposed twice": lambda z: z.T.T,
    "new dimension": lambda z: z.unsqueeze(1),
    "product with one": lambda z: z * 1,
    "narrower": lambda z: z.float(),
    "narrower and back": lambda z: z.float().double(),
}


@pytest.mark.parametrize("change", NOT_COPIES.values(), ids=NOT_COPIES)
def test_other_functions_of_what_the_loss_was_computed_from_are_refused(change):
    model = small_model()
    z = model(torch.randn(B, 5))
    loss = F.cross_entropy(z, torch.randint(CLASSES, (B,)))
    with pytest.raises(GraphError, match="no path from the loss to them"):
        sw.gradients(loss, model, outputs=change(z))
    outputs = change(model(torch.randn(B, 5)))
    model.to(outputs.dtype)
    outputs = change(model(torch.randn(B, 5, dtype=outputs.dtype)))
    check_sum(outputs.square().mean(), model, outputs)


@pytest.mark.parametrize("hook", [double, mask])
def test_a_hook_between_outputs_of_which_one_is_computed_from_another(hook):
    model = small_model()
    first = model[0](torch.randn(B, 5))
    hidden = model[1](first)
    hidden.register_hook(hook)
    scaled = hidden * 2
    scaled.register_hook(hook)  # not called with None, although this loss has no gradient there
    z = model[2](scaled)
    loss = F.cross_entropy(z, torch.randint(CLASSES, (B,))) + hidden.square().mean()
    for outputs in ([z, hidden], [hidden, z], [z, first]):
        check_sum(loss, model, outputs)


def test_outputs_that_are_infinite_where_the_loss_does_not_depend_on_them():
    model = small_model()
    x = torch.randn(6, 5)
    y = torch.randint(CLASSES - 1, (6,))
    masked = torch.arange(CLASSES) == CLASSES - 1

    def loss_of(rows):
        return F.cross_entropy(model(x[rows]).masked_fill(masked, -torch.inf), y[rows], reduction="sum")

    z = model(x).masked_fill(masked, -torch.inf)
    loss = F.cross_entropy(z, y, reduction="sum")
    check_sum(loss, model, z)
    check_rows(sw.gradients(loss, model, outputs=z), model, lambda i: loss_of([i]), 6)


def test_checkpointed_models():
    model = small_model()
    x, y = torch.randn(B, 5), torch.randint(CLASSES, (B,))
    z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    check_sum(F.cross_entropy(z, y), model, z)


def test_invalid_arguments():
    model = small_model()
    x = torch.randn(B, 5)
    z = model(x)
    loss = z.square().mean()
    with pytest.raises(LossesError, match=r"found a scalar\. .* sw.gradients\(loss, model, outputs=logits\)"):
        sw.gradients(loss, model)
    with pytest.raises(LossesError, match="loss must be a scalar tensor if outputs are given; found shape \\(6,\\)"):
        sw.gradients(z.mean(1), model, outputs=z)
    with pytest.raises(LossesError, match=r"found dict. Pass the tensors themselves, for example outputs=out.logits"):
        sw.gradients(loss, model, outputs={"logits": z})
    with pytest.raises(LossesError, match="found a list of nothing"):
        sw.gradients(loss, model, outputs=[])
    with pytest.raises(LossesError, match="outputs must be attached"):
        sw.gradients(loss, model, outputs=z.detach())
    with pytest.raises(LossesError, match="loss must be attached"):
        sw.gradients(loss.detach(), model, outputs=z)
    with pytest.raises(LossesError, match=r"found \(6, 4\) and \(3, 5\)\. Pass tensors whose first dimension"):
        sw.gradients(loss, model, outputs=[z, model[0].weight.reshape(8, 5)[:3]])
    with pytest.raises(GraphError, match="no path from the loss"):
        sw.gradients(loss, model, outputs=model(x))
    with pytest.raises(ValueError, match=r"create_graph=True needs losses \(B,\)"):
        sw.gradients(loss, model, outputs=z, create_graph=True)
    with pytest.raises(LossesError, match=r"g.losses needs losses"):
        _ = sw.gradients(loss, model, outputs=z).losses
