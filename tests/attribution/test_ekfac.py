"""EK-FAC against explicit matrices, built from the inputs and output gradients that hooks see, in float64."""

import copy
import functools
import json
import weakref
from importlib import import_module

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from plain_loop import batches, loss_fn, make, rows
from torch import nn

import samplewise as sw
from samplewise.attribution import EKFAC
from samplewise.attribution.ekfac_fit import eigenvectors
from samplewise.attribution.sampled_labels import ExpectedLoss
from samplewise.core.files import read_tensors, tensor_bytes, write_tensors
from samplewise.testing.case import noise


def factors_of(model, module, x, y, loss_fn):
    """Inputs (n, t, i) of a module with a column of ones, and gradients (n, t, o) of its outputs, from hooks."""
    inputs, gradients = [], []

    def hook(module, args, output):
        inputs.append(args[0].detach())
        output.register_hook(lambda gradient: gradients.append(gradient.detach()))

    handle = module.register_forward_hook(hook)
    for i in range(len(x)):
        torch.autograd.grad(loss_fn(model, (x[i : i + 1], y[i : i + 1])).sum(), list(model.parameters()))
    handle.remove()
    a = torch.stack([each.reshape(-1, each.shape[-1]) for each in inputs])
    g = torch.stack([each.reshape(-1, each.shape[-1]) for each in gradients])
    ones = torch.ones(*a.shape[:2], 1, dtype=a.dtype)
    return torch.cat([a, ones], 2), g


def explicit_inverse(model, modules, x, y, damping=0.1, loss_fn=loss_fn):
    """Matrix over all parameters: a block (weight and bias) for each of the modules, which have all the parameters."""
    inverses = []
    for module in modules:
        a, g = factors_of(model, module, x, y, loss_fn)
        left = torch.linalg.eigh(torch.einsum("nto,ntp->op", g, g))[1]
        used = a * (g != 0).any(2, keepdim=True)  # inputs count where the output has a gradient
        right = torch.linalg.eigh(torch.einsum("nti,ntj->ij", used, used))[1]
        basis = torch.kron(left, right)  # columns are outer products, flattened
        matrices = torch.einsum("nto,nti->noi", g, a).flatten(1)
        values = (matrices @ basis).square().mean(0)
        inverse = basis @ torch.diag(1 / (values + damping * values.mean())) @ basis.T
        inverses.append(_weight_before_bias(inverse, g.shape[2], a.shape[2]))
    return torch.block_diag(*inverses)


def damped(rotated, damping):
    """Eigenvalues of a block, plus a multiple of their mean, from gradients in its eigenbasis."""
    values = rotated.square().mean(0)
    return values + damping * values.mean()


def _weight_before_bias(matrix, outputs, inputs):
    """Reorder a matrix over (outputs, inputs with bias) to one over (weight, bias)."""
    number = torch.arange(outputs * inputs).view(outputs, inputs)
    order = torch.cat([number[:, :-1].flatten(), number[:, -1]])
    return matrix[order][:, order]


@pytest.mark.parametrize("damping", [None, 0.3])
@pytest.mark.parametrize("size", [30, 29, 7])
def test_linear_layers(damping, size):
    model, x, y = make(n=30)
    query = (x[:4] + 0.2, y[:4])
    inverse = explicit_inverse(model, [model[0], model[2]], x, y, 0.1 if damping is None else damping)
    curvature = sw.ekfac(model, loss_fn, batches(x, y, size), labels="data")
    assert repr(curvature) == "EKFAC(2 by Kronecker factors: 0.weight, 2.weight)"
    assert not any(block.eigenvalues.requires_grad for block in curvature.blocks)
    found = sw.influence(model, loss_fn, batches(x, y, 11), [query], curvature=curvature, damping=damping)
    torch.testing.assert_close(found, rows(model, *query) @ inverse @ rows(model, x, y).T, rtol=1e-9, atol=1e-9)


def test_cosine_and_layers():
    model, x, y = make(n=30)
    query = (x[:4] + 0.2, y[:4])
    inverse = explicit_inverse(model, [model[0], model[2]], x, y, 0.3)
    theirs, mine = rows(model, x, y), rows(model, *query)
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 8), labels="data")
    options = dict(curvature=curvature, damping=0.3)
    lengths = [(each @ inverse * each).sum(1).sqrt() for each in (mine, theirs)]
    wanted = mine @ inverse @ theirs.T / torch.outer(*lengths)
    found = sw.influence(model, loss_fn, batches(x, y, 11), [query], cosine=True, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    by_layer = sw.influence(model, loss_fn, batches(x, y, 11), [query], by="layer", **options)
    size = sum(p.numel() for p in model[0].parameters())
    assert list(by_layer) == ["0", "2"]
    torch.testing.assert_close(by_layer["0"], mine[:, :size] @ inverse[:size, :size] @ theirs[:, :size].T)
    torch.testing.assert_close(sum(by_layer.values()), mine @ inverse @ theirs.T)


def test_single_samples_and_parameters_that_are_not_reached():
    model, x, y = make(n=30)
    query = (x[:1] + 0.2, y[:1])
    inverse = explicit_inverse(model, [model[0], model[2]], x, y, 0.1)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2).double()))
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 1), labels="data")
    assert "1 by the diagonal: unused" in repr(curvature)
    found = sw.influence(model, loss_fn, batches(x, y, 1), [query], curvature=curvature, damping=0.1)
    del model._parameters["unused"]
    torch.testing.assert_close(found, rows(model, *query) @ inverse @ rows(model, x, y).T, rtol=1e-9, atol=1e-9)


class Gated(nn.Module):
    """The bias has no part in the gradients of some samples, so that it cannot be a column of ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(noise(3, 5).double())
        self.bias = nn.Parameter(noise(3).double())

    def forward(self, x):
        return x @ self.weight.T + self.bias * (x[:, :1] > 0)


def test_a_vector_that_is_not_the_bias_of_the_weight():
    model = Gated()
    _, x, y = make(n=30)
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 8), labels="data")
    assert repr(curvature) == ("EKFAC(1 by Kronecker factors: weight; 1 by the diagonal: bias)")
    positive = x[:, 0] > 0  # in these samples it is
    joined = sw.ekfac(model, loss_fn, [(x[positive], y[positive])], labels="data")
    assert repr(joined) == "EKFAC(1 by Kronecker factors: weight)"
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    solved = joined.solve(gradients)
    wanted = sum(gradients[name].flatten(1) @ solved[name].flatten(1).T for name in gradients)
    torch.testing.assert_close(sw.influence(model, loss_fn, [(x, y)], [(x, y)], curvature=joined), wanted)


class Tagger(nn.Module):
    """Each sample is a sequence; its loss is the sum over tokens, without those of label -100."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def token_losses(model, batch):
    logits = model(batch[0]).transpose(1, 2)
    return F.cross_entropy(logits, batch[1], reduction="none").sum(1)


def test_tokens_are_summed_and_padding_does_not_count():
    torch.manual_seed(0)
    model = Tagger().double()
    x, y = noise(20, 5, 4).double(), torch.arange(100).view(20, 5) % 3
    query = (x[:3] + 0.1, y[:3])
    inverse = explicit_inverse(model, [model.first, model.second], x, y, loss_fn=token_losses)
    wanted = rows(model, *query, token_losses) @ inverse @ rows(model, x, y, token_losses).T
    curvature = sw.ekfac(model, token_losses, batches(x, y, 6), labels="data")
    found = sw.influence(model, token_losses, [(x, y)], [query], curvature=curvature)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    padded = F.pad(x, (0, 0, 0, 2), value=7.0), F.pad(y, (0, 2), value=-100)
    of_padded = sw.ekfac(model, token_losses, [padded], labels="data")
    torch.testing.assert_close(
        sw.influence(model, token_losses, [(x, y)], [query], curvature=of_padded), wanted, rtol=1e-9, atol=1e-9
    )


def test_convolution_equals_the_linear_layer_of_its_patches():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = noise(25, 2, 4, 4).double(), torch.arange(25) % 3
    curvature = sw.ekfac(net, loss_fn, batches(x, y, 10), labels="data")
    assert repr(curvature) == "EKFAC(2 by Kronecker factors: 0.weight, 3.weight)"

    class ByPatches(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Linear(18, 3)
            self.kernel.load_state_dict({"weight": net[0].weight.flatten(1), "bias": net[0].bias})
            self.head = copy.deepcopy(net[3])

        def forward(self, x):
            positions = self.kernel(F.unfold(x, 3).transpose(1, 2))
            return self.head(positions.relu().transpose(1, 2).flatten(1))

    same = ByPatches().double()
    torch.testing.assert_close(same(x), net(x))
    inverse = explicit_inverse(same, [same.kernel, same.head], x, y)
    wanted = rows(net, x[:5], y[:5]) @ inverse @ rows(net, x, y).T
    found = sw.influence(net, loss_fn, [(x, y)], [(x[:5], y[:5])], curvature=curvature)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_other_parameters_have_the_diagonal():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)).double()
    x, y = noise(30, 5).double(), torch.arange(30) % 3
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 9), labels="data")
    assert repr(curvature) == ("EKFAC(2 by Kronecker factors: 0.weight, 2.weight; 2 by the diagonal: 1.weight, 1.bias)")
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    solved = curvature.solve(gradients, 0.1)
    for name in ("1.weight", "1.bias"):
        torch.testing.assert_close(solved[name], gradients[name] / damped(gradients[name], 0.1))


def test_embeddings_have_one_factor():
    """The inputs of an embedding are unit vectors, whose covariance is diagonal."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.arange(90).view(30, 3) * 7 % 6, torch.arange(30) % 3
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 9), labels="data")
    assert repr(curvature) == "EKFAC(1 by Kronecker factors: 2.weight; 1 by one factor: 0.weight)"
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    of_outputs = torch.stack([g for i in range(30) for g in _gradients_of_lookups(model, x[i], y[i])])
    basis = torch.linalg.eigh(of_outputs.T @ of_outputs)[1]
    rotated = gradients["0.weight"] @ basis
    wanted = (rotated / damped(rotated, 0.1)) @ basis.T
    torch.testing.assert_close(curvature.solve(gradients, 0.1)["0.weight"], wanted, rtol=1e-9, atol=1e-9)


def _gradients_of_lookups(model, x, y):
    looked_up = model[0](x[None]).detach().requires_grad_()
    loss = F.cross_entropy(model[2](looked_up.flatten(1)), y[None])
    return torch.autograd.grad(loss, looked_up)[0][0]


def test_sides_with_too_many_dims_have_no_factor(monkeypatch):
    monkeypatch.setattr("samplewise.attribution.ekfac_fit.LARGEST_SIDE", 7)
    model, x, y = make(n=30)  # 5 + 1 inputs, 7 + 1 hidden, 3 outputs
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 9), labels="data")
    assert repr(curvature) == "EKFAC(1 by Kronecker factors: 0.weight; 1 by one factor: 2.weight)"
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    _, g = factors_of(model, model[2], x, y, loss_fn)
    basis = torch.linalg.eigh(torch.einsum("nto,ntp->op", g, g))[1]
    rotated = basis.T @ torch.cat([gradients["2.weight"], gradients["2.bias"][:, :, None]], 2)
    wanted = basis @ (rotated / damped(rotated, 0.1))
    solved = curvature.solve(gradients, 0.1)
    torch.testing.assert_close(solved["2.weight"], wanted[:, :, :-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solved["2.bias"], wanted[:, :, -1], rtol=1e-9, atol=1e-9)
    monkeypatch.setattr("samplewise.attribution.ekfac_fit.LARGEST_SIDE", 2)
    assert "4 by the diagonal" in repr(sw.ekfac(model, loss_fn, batches(x, y, 9), labels="data"))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.steps(x)[0][:, -1])


MODELS = {
    "recurrent": (Recurrent, (6, 4)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), nn.Flatten(), nn.Linear(24, 3)
        ),
        (6, 4),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=2),
            nn.BatchNorm2d(4),
            nn.ConvTranspose2d(4, 3, 2, stride=2),
            nn.Conv2d(3, 2, 3, padding=1, stride=2),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        (4, 6, 6),
    ),
    "spectral": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)),
        (4,),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_those_of_solved_rows(name):
    """Any model: gradients in the eigenbasis give the products of rows with rows that `solve` returns."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    x, y = noise(14, *shape).double(), torch.arange(14) % 3
    curvature = sw.ekfac(model, loss_fn, batches(x, y, 5))
    found = sw.influence(model, loss_fn, batches(x, y, 5), [(x[:3], y[:3])], curvature=curvature)
    gradients = sw.gradients(loss_fn(model, (x, y)), model).full()
    solved = curvature.solve({name: each[:3] for name, each in gradients.items()})
    wanted = sum(solved[name].flatten(1) @ each.flatten(1).T for name, each in gradients.items())
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------- sampled labels


def gauss_newton(model, x, hessian_of_loss):
    """Mean over samples of J^T H J, with the Jacobian J of the outputs and the Hessian H of the loss at the outputs."""
    total = 0
    for each in x:
        output = model(each[None])[0]
        jacobian = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(z, model.parameters(), retain_graph=True)])
                for z in output
            ]
        )
        total = total + jacobian.T @ hessian_of_loss(output.detach()) @ jacobian
    return total / len(x)


def of_softmax(z):
    p = z.softmax(0)
    return torch.diag(p) - torch.outer(p, p)


CRITERIA = {
    "classes": (nn.CrossEntropyLoss(), lambda n: torch.arange(n) % 3, of_softmax),
    "values": (nn.MSELoss(), lambda n: noise(n, 3).double(), lambda z: torch.eye(3, dtype=z.dtype) * 2 / 3),
    "binary": (
        nn.BCEWithLogitsLoss(),
        lambda n: (noise(n, 3) > 0).double(),
        lambda z: torch.diag(z.sigmoid() * (1 - z.sigmoid())) / 3,
    ),
}


def of_draws(loss, model, batch):
    """Gradients (samples, parameters) of each draw, from one forward pass."""
    draws = [loss(model, batch), *loss.further_draws()]
    by_draw = [sw.gradients(losses, model).full() for losses in draws]
    return [torch.cat([g.flatten(1) for g in full.values()], 1) for full in by_draw]


@pytest.mark.parametrize("name", CRITERIA)
def test_expected_labels_give_the_gauss_newton_matrix(name):
    """The second moment of the gradients, added over the draws, one for each output."""
    criterion, labels, second_derivative = CRITERIA[name]
    model, x, _ = make(n=6)
    loss = ExpectedLoss(sw.core.losses.as_loss_fn(criterion), "expected")
    gradients = of_draws(loss, model, (x, labels(6)))
    assert len(gradients) == 3
    total = sum(g.T @ g / len(x) for g in gradients)
    torch.testing.assert_close(total, gauss_newton(model, x, second_derivative), rtol=1e-10, atol=1e-12)


def test_expected_labels_of_tokens_without_ignored_ones():
    model = Tagger().double()
    x = noise(3, 4, 4).double()
    y = torch.tensor([[0, 1, 2, 1], [1, 0, -100, -100], [2, -100, 1, 0]])
    loss = ExpectedLoss(token_losses, "expected")
    total = sum(g.T @ g for g in of_draws(loss, model, (x, y)))

    parameters = list(model.parameters())
    wanted = 0
    for tokens, labels in zip(x, y, strict=True):
        for z in model(tokens[None]).reshape(-1, model(tokens[None]).shape[-1])[labels != -100]:
            jacobian = torch.stack(
                [torch.cat([g.flatten() for g in torch.autograd.grad(e, parameters, retain_graph=True)]) for e in z]
            )
            wanted = wanted + jacobian.T @ of_softmax(z.detach()) @ jacobian
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-12)


def test_curvature_with_expected_labels_has_the_trace_of_the_gauss_newton_matrix(monkeypatch):
    """So do random signs, in expectation, whose draws do not depend on microbatches."""
    model, x, y = make(n=24)
    trace = gauss_newton(model, x, of_softmax).trace().item()
    width = sum(p.numel() for p in model.parameters())
    for size in (24, 5, 1):
        curvature = sw.ekfac(model, nn.CrossEntropyLoss(), batches(x, y, size))
        assert curvature.mean_eigenvalue * width == pytest.approx(trace, rel=1e-9)
    monkeypatch.setattr(import_module("samplewise.attribution.sampled_labels"), "EXACT_OUTPUTS", 2)
    means = []
    for seed in range(20):
        whole = sw.ekfac(model, nn.CrossEntropyLoss(), [(x, y)], seed=seed)
        means.append(whole.mean_eigenvalue * width)
    in_parts = sw.ekfac(model, nn.CrossEntropyLoss(), [(x, y)], seed=seed, microbatch=7)
    assert in_parts.mean_eigenvalue * width == pytest.approx(means[-1], rel=1e-9)
    assert len(set(means)) == len(means)
    assert sum(means) / len(means) == pytest.approx(trace, rel=0.05)  # standard error 1.6 %


@pytest.mark.parametrize("kind", ["sampled", "signs"])
@pytest.mark.parametrize("name", CRITERIA)
def test_sampled_labels_give_the_gauss_newton_matrix(name, kind, monkeypatch):
    """In expectation: the mean of the squared gradients over 4,000 draws of each label is its diagonal."""
    monkeypatch.setattr(import_module("samplewise.attribution.sampled_labels"), "EXACT_OUTPUTS", 0)
    monkeypatch.setattr(import_module("samplewise.attribution.sampled_labels"), "SIGN_DRAWS", 1)
    criterion, labels, second_derivative = CRITERIA[name]
    model, x, _ = make(n=4)
    y = labels(4)
    repeated = x.repeat(4000, 1), y.repeat(4000, *[1] * (y.dim() - 1))
    torch.manual_seed(0)
    labels = "sampled" if kind == "sampled" else "expected"
    losses = ExpectedLoss(sw.core.losses.as_loss_fn(criterion), labels)(model, repeated)
    found = torch.cat([s.flatten() for s in sw.gradients(losses, model).sum_of_squares().values()]) / len(losses)
    wanted = gauss_newton(model, x, second_derivative).diagonal()
    torch.testing.assert_close(found, wanted, rtol=0.08, atol=1e-3)


def test_sampled_labels_do_not_depend_on_batches_or_global_random_state():
    model, x, y = make(n=24)
    query = [(x[:3], y[:3])]

    def scores(seed=0, **options):
        options = {"labels": "sampled", **options}
        curvature = sw.ekfac(model, nn.CrossEntropyLoss(), batches(x, y, 12), seed=seed, **options)
        return sw.influence(model, loss_fn, [(x, y)], query, curvature=curvature)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = scores()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(scores(), first)
    torch.testing.assert_close(scores(microbatch=5), first)
    torch.testing.assert_close(scores(microbatch=sw.auto(memory=800)), first)
    assert not torch.allclose(scores(seed=1), first)
    assert not torch.allclose(scores(labels="data"), first)


def test_the_loss_may_be_a_function():
    model, x, y = make(n=24)
    of_function = sw.ekfac(model, loss_fn, batches(x, y, 12))
    of_criterion = sw.ekfac(model, nn.CrossEntropyLoss(), batches(x, y, 12))
    for mine, other in zip(of_function.blocks, of_criterion.blocks, strict=True):
        assert torch.equal(mine.eigenvalues, other.eigenvalues)


def test_labels_may_be_sampled_by_a_function():
    model, x, y = make(n=24)
    relabeled = sw.ekfac(model, loss_fn, [(x, y)], labels=lambda model, batch: (batch[0], model(batch[0]).argmax(1)))
    predicted = sw.ekfac(model, loss_fn, [(x, model(x).argmax(1))], labels="data")
    for mine, other in zip(relabeled.blocks, predicted.blocks, strict=True):
        assert torch.equal(mine.eigenvalues, other.eigenvalues)


def test_losses_that_cannot_be_sampled():
    model, x, y = make()

    def other_loss(model, batch):
        return loss_fn(model, batch) + 0.1

    for loss in (other_loss, nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(torch.ones(3).double() * 2)):
        with pytest.raises(sw.LossesError, match=r"known negative log-likelihood .* found another one. Pass labels="):
            sw.ekfac(model, loss, [(x, y)])
    with pytest.raises(sw.LossesError, match=r"needs batches \(x, labels\), or dicts with 'labels'.*found Tensor"):
        sw.ekfac(model, lambda model, x: model(x).square().sum(1), [x])
    with pytest.raises(sw.LossesError, match="a loss_fn that calls the model once; found 2 calls"):
        sw.ekfac(model, lambda model, batch: loss_fn(model, batch) + loss_fn(model, batch), [(x, y)])
    with pytest.raises(ValueError, match="labels must be 'expected', 'sampled', 'data', or a function"):
        sw.ekfac(model, loss_fn, [(x, y)], labels="true")


# ------------------------------------------------------------- eigenvectors


def decomposed_in(monkeypatch):
    """List of the dtypes of all matrices that are decomposed from now on."""
    dtypes, eigh = [], torch.linalg.eigh

    def recording(matrix):
        dtypes.append(matrix.dtype)
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", recording)
    return dtypes


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_eigenvectors_of_float32_models_are_computed_in_float32(scale, monkeypatch):
    model, x, y = make(n=30)
    directions = {name: noise(2, *p.shape).double() for name, p in model.named_parameters()}

    def scaled_loss(model, batch):
        return loss_fn(model, batch) * scale

    solved = {}
    for dtype in (torch.float64, torch.float32):
        dtypes = decomposed_in(monkeypatch)
        curvature = sw.ekfac(model.to(dtype), scaled_loss, [(x.to(dtype), y)], labels="data")
        assert dtypes == [dtype] * 4
        rows = {name: values.to(dtype) for name, values in directions.items()}
        solved[dtype] = {name: values.double() * scale**2 for name, values in curvature.solve(rows, 0.3).items()}
        for block in curvature.blocks:
            for basis in (block.left, block.right):
                torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=dtype))
    for name, wanted in solved[torch.float64].items():
        torch.testing.assert_close(
            solved[torch.float32][name], wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max())
        )


@pytest.mark.parametrize("failure", ["eigenvalues", "vectors", "error"])
def test_decomposition_in_float64_if_float32_fails(failure, monkeypatch):
    rows = noise(40, 12)
    covariance = (rows.T @ rows).double()
    dtypes, eigh = [], torch.linalg.eigh

    def failing(matrix):
        dtypes.append(matrix.dtype)
        values, vectors = eigh(matrix)
        if matrix.dtype == torch.float64:
            return values, vectors
        if failure == "error":
            raise torch.linalg.LinAlgError("no convergence")
        return (values.flip(0), vectors) if failure == "eigenvalues" else (values, vectors * 1.01)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    vectors = eigenvectors(covariance.clone(), torch.float32)
    assert dtypes == [torch.float32, torch.float64] and vectors.dtype == torch.float32
    rotated = vectors.double().T @ covariance @ vectors.double()
    torch.testing.assert_close(rotated, rotated.diagonal().diag(), rtol=0, atol=1e-4)


def test_eigenvectors_of_no_gradients():
    vectors = eigenvectors(torch.zeros(5, 5).double(), torch.float32)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(5))


# ------------------------------------------------------------- the object


def test_save_and_load(tmp_path):
    model, x, y = make(n=24)
    model.append(nn.LayerNorm(3).double())
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    curvature.save(tmp_path / "curvature.pt")
    loaded = EKFAC.load(tmp_path / "curvature.pt")
    assert repr(loaded) == repr(curvature) and "by the diagonal" in repr(loaded)
    found, wanted = (sw.influence(model, loss_fn, [(x, y)], [(x, y)], curvature=each) for each in (loaded, curvature))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert [path.name for path in tmp_path.iterdir()] == ["curvature.pt"]


def test_save_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Bytes of copies that exist at the same time, counted when each of them is written."""
    model, x, y = make(n=24)
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    blocks = [(block.left, block.right, block.eigenvalues) for block in curvature.blocks]
    original = {tensor.untyped_storage().data_ptr() for tensors in blocks for tensor in tensors}
    buffers, sizes = [], []

    def recording(tensor):
        data = tensor_bytes(tensor)
        plain = vars(data.obj)["tensor"]
        if plain.untyped_storage().data_ptr() not in original:
            buffers.append(weakref.ref(data.obj))
        sizes.append(sum(buffer() is not None for buffer in buffers))
        return data

    monkeypatch.setattr("samplewise.core.files.tensor_bytes", recording)
    monkeypatch.setattr(safetensors.torch, "save", None)  # copies all tensors
    curvature.save(tmp_path / "curvature")
    assert len(buffers) == 4, "eigenvectors of eigh have columns that are contiguous"
    assert len(sizes) == 6 and max(sizes) == 1, sizes
    loaded = EKFAC.load(tmp_path / "curvature")
    for block, tensors in zip(loaded.blocks, blocks, strict=True):
        for mine, wanted in zip((block.left, block.right, block.eigenvalues), tensors, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"not a curvature")
    with pytest.raises(sw.StoreError, match=r"must be a file written by EKFAC.save; found other content"):
        EKFAC.load(path)
    write_tensors(path, {}, {"format": 99})
    with pytest.raises(sw.StoreError, match="must have format 1; found 99"):
        EKFAC.load(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Tensors and description of a saved curvature."""
    model, x, y = make(n=24)
    model.append(nn.LayerNorm(3).double())
    path = tmp_path_factory.mktemp("saved") / "curvature.pt"
    sw.ekfac(model, loss_fn, [(x, y)]).save(path)
    return read_tensors(path)


def places(content, path=()):
    """Paths of all values in nested lists and dicts."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if type(content) is list else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


FORGED = [None, True, -1, 3, 1.5, "", "left", "../x", [], [1], [4, 2], [[1]], {}, 10**30, ...]  # ...: removed


def test_forged_descriptions_are_refused(saved, tmp_path):
    """Any other value at any place: the file is refused, or means the same as before."""
    tensors, description = saved
    path = tmp_path / "forged"
    rows = {name: torch.ones(2, *shape, dtype=torch.float64) for name, shape in description["shapes"].items()}
    write_tensors(path, tensors, description)
    wanted = EKFAC.load(path).solve(rows)
    messages = []
    for place in places(description):
        for value in FORGED:
            forged = copy.deepcopy(description)
            parent = functools.reduce(lambda content, key: content[key], place[:-1], forged)
            if value is ...:
                del parent[place[-1]]
            else:
                parent[place[-1]] = value
            path.write_bytes(safetensors.torch.save(tensors, {"samplewise": json.dumps(forged)}))
            try:
                loaded = EKFAC.load(path)
            except sw.StoreError as why:
                messages.append(str(why).partition("forged must ")[2])
            else:
                torch.testing.assert_close(loaded.solve(rows), wanted)
    assert len(messages) > 400
    starts = ("be a file written by EKFAC.save; ", "have blocks whose tensors match ", "have format 1; ")
    assert all(message.startswith(starts) for message in messages)


TENSORS = {
    "cut off": lambda tensor: tensor[:-1],
    "integers": lambda tensor: tensor.long(),
    "not finite": lambda tensor: tensor * torch.nan,
    "another dimension": lambda tensor: tensor[None],
    "complex": lambda tensor: tensor.to(torch.complex64),
    "empty": lambda tensor: tensor[..., :0],
}


@pytest.mark.parametrize("change", TENSORS)
def test_forged_tensors_are_refused(saved, tmp_path, change):
    tensors, description = saved
    for name, tensor in tensors.items():
        write_tensors(tmp_path / "forged", {**tensors, name: TENSORS[change](tensor)}, description)
        with pytest.raises(
            sw.StoreError, match=r"must have blocks whose tensors match .* found ValueError: \w+ of .*, in"
        ):
            EKFAC.load(tmp_path / "forged")


def test_missing_and_further_tensors_are_refused(saved, tmp_path):
    tensors, description = saved
    for name in tensors:
        write_tensors(tmp_path / "forged", {n: t for n, t in tensors.items() if n != name}, description)
        with pytest.raises(sw.StoreError, match=f"KeyError: '{name}'. Compute the curvature again"):
            EKFAC.load(tmp_path / "forged")
        write_tensors(tmp_path / "forged", {**tensors, f"9{name}": tensors[name]}, description)
        with pytest.raises(sw.StoreError, match=f"{len(tensors) + 1} tensors in place of {len(tensors)}"):
            EKFAC.load(tmp_path / "forged")


def test_damaged_files_are_refused(saved, tmp_path):
    path = tmp_path / "damaged"
    write_tensors(path, *saved)
    content = path.read_bytes()
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        with pytest.raises(sw.StoreError, match=r"must be a file written by EKFAC.save; found other content"):
            EKFAC.load(path)
    write_tensors(path, {}, 1)
    for text in (b"[" * 10_000, b"null", b'"x"', b"{", b"\xff"):
        header = json.dumps({"__metadata__": {"samplewise": text.decode("latin-1")}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(sw.StoreError, match=r"must be a file written by EKFAC.save; found other content"):
            EKFAC.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(sw.StoreError, match=r"must be a file written by EKFAC.save; found other content"):
        EKFAC.load(path)


def test_refuses_another_model():
    model, x, y = make()
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(sw.ParameterError, match=r"other names or shapes: 0.bias, 0.weight, 2.weight. Compute it again"):
        sw.influence(other, loss_fn, [(x, y)], [(x, y)], curvature=curvature)


def test_zero_curvature_needs_damping():
    model, x, y = make()
    x[:, 0] = 0
    curvature = sw.ekfac(model, loss_fn, [(x, y)])
    query = [(x[:2] + 1, y[:2])]
    sw.influence(model, loss_fn, [(x, y)], query, curvature=curvature)
    with pytest.raises(ValueError, match=r"damping must be above 0 for 0.weight and 0.bias, .*; found 0. Pass a mult"):
        sw.influence(model, loss_fn, [(x, y)], query, curvature=curvature, damping=0)


def test_parameters_without_curvature_need_samples_that_depend_on_them():
    model, x, y = make()

    def first_layer_unused(model, batch):
        return loss_fn(model, (torch.zeros_like(batch[0]), batch[1]))

    model[0].bias = None
    curvature = sw.ekfac(model, first_layer_unused, [(x, y)])
    with pytest.raises(ValueError, match=r"curvature of 0.weight must not be zero .*; found zero in all directions"):
        sw.influence(model, loss_fn, [(x, y)], [(x, y)], curvature=curvature)


def test_bad_loaders():
    model, x, y = make()
    with pytest.raises(ValueError, match="the loader must yield at least one batch; found none"):
        sw.ekfac(model, loss_fn, [])
    with pytest.raises(ValueError, match="loader must be a loader or a list"):
        sw.ekfac(model, loss_fn, iter([(x, y)]))
