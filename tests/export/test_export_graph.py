"""The graph of an exported update against loops written by hand, in float64, before and after simplification."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import samplewise as sw
from samplewise.export import executorch
from samplewise.export.graph import trace_program
from samplewise.export.simplify import aten, simplify
from samplewise.step.compiled import inductor
from samplewise.step.compiled.optim import formula_of

LR = 2.0**-5  # exact in float32, the type of the input lr


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


class TwoHeads(nn.Module):
    """One linear layer used twice, a frozen layer, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.head(torch.tanh(self.shared(torch.tanh(self.frozen(self.shared(x))))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def token_losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(x.shape).mean(1)


def images(features, *layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


MODELS = {
    "linear": (lambda: nn.Linear(5, 1), (5,), (1,), nn.MSELoss()),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,), 3, nn.CrossEntropyLoss()),
    "norms": (
        lambda: nn.Sequential(nn.Linear(5, 8, bias=False), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)),
        (5,),
        (2,),
        nn.HuberLoss(),
    ),
    "cnn": (
        lambda: images(16, nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(3, 2)),
        (1, 6, 5),
        3,
        nn.CrossEntropyLoss(),
    ),
    "frozen batchnorm": (
        lambda: images(32, nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8).eval(), nn.ReLU()),
        (1, 4, 4),
        3,
        nn.CrossEntropyLoss(),
    ),
    "attention": (Attention, "tokens", "tokens", token_losses),
    "gru": (Recurrent, (5, 2), 3, nn.CrossEntropyLoss()),
    "shared": (TwoHeads, (4,), 3, nn.CrossEntropyLoss()),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=LR, weight_decay=0.01),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=LR, momentum=0.9, centered=True),
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows(shape, n):
    if shape == "tokens":
        return torch.randint(0, 11, (n, 6))
    return torch.randint(0, shape, (n,)) if isinstance(shape, int) else torch.randn(n, *shape)


def traced(step, example, *, simplified, forward=None):
    """The traced program, with the decompositions of .pte files; lr is a float64 tensor in these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inductor.load_compiler()
        program = trace_program(step, formula_of(step.optimizer), example, forward, executorch.decompositions())
    if simplified:
        simplify(program.update.graph, scaled_sums=True)
    return program


def by_hand(model, optimizer, loss_fn, clip, max_grad_norm=None):
    """Function that makes one update with a loop over samples, and returns losses, norms and weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def update(x, y):
        sums = [torch.zeros_like(p) for p in parameters]
        results = []
        for k in range(len(x)):
            pair = (x[k : k + 1], y[k : k + 1])
            loss = loss_fn(model, pair)[0] if loss_fn is token_losses else loss_fn(model(pair[0]), pair[1])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            norm = torch.cat([g.flatten() for g in gradients if g is not None]).norm()
            weight = torch.ones(()) if clip is None else (clip / norm).clamp(max=1)
            results.append(torch.stack([loss.detach(), norm, weight]))
            for total, g in zip(sums, gradients, strict=True):
                total += 0 if g is None else weight * g / len(x)
        for p, total, g in zip(parameters, sums, gradients, strict=True):
            p.grad = None if g is None else total
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        return torch.stack(results).T

    return update


def compare(name, optimizer="momentum", clip=0.5, samples=1, simplified=True, updates=12, max_grad_norm=None):
    make, shape, target, loss_fn = MODELS[name]
    model = make()
    twin = copy.deepcopy(model)
    transforms = [] if clip is None else [sw.clip(clip)]
    step = sw.Step(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        loss_fn,
        samples=samples,
        transforms=transforms,
        max_grad_norm=max_grad_norm,
    )
    loop = by_hand(twin, OPTIMIZERS[optimizer](twin.parameters()), loss_fn, clip, max_grad_norm)
    program = traced(step, (rows(shape, samples), rows(target, samples)), simplified=simplified)
    state = list(program.state.values())
    constants = list(program.constants.values())
    for _ in range(updates):
        x, y = rows(shape, samples), rows(target, samples)
        loss, norm, weight, *state = program.update(state, constants, x, y, torch.tensor(LR))
        losses, norms, weights = loop(x, y)
        torch.testing.assert_close(loss, losses)
        torch.testing.assert_close(weight, weights)
        if clip is not None or samples == 1:
            torch.testing.assert_close(norm, norms)
    after = dict(zip(program.state, state, strict=True))
    for key, p in twin.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(after[key], p.detach(), rtol=1e-9, atol=1e-11)
    return step, program, state


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "simplified",
    [pytest.param(False, id="traced", marks=pytest.mark.slow), pytest.param(True, id="simplified")],
)
def test_updates_of_models_equal_a_loop(name, simplified):
    compare(name, simplified=simplified)


@functools.cache
def compared(optimizer):
    """Result of `compare` for a small network; programs change no state."""
    return compare("mlp", optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_of_optimizers_equal_a_loop(optimizer):
    compared(optimizer)


def test_updates_without_transforms_equal_a_loop():
    compare("mlp", clip=None)


def test_updates_of_several_samples_equal_a_loop():
    compare("mlp", samples=4)
    compare("cnn", samples=3, clip=None)


def test_max_grad_norm_equals_a_loop():
    compare("mlp", clip=None, max_grad_norm=0.1)
    compare("mlp", samples=3, max_grad_norm=0.1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200], ids=["nan", "inf", "overflow"])
def test_an_update_that_is_not_finite_changes_nothing(optimizer, value):
    _, program, state = compared(optimizer)
    x, y = torch.randn(1, 5), torch.tensor([1])
    x[0, 2] = value
    _, _, _, *after = program.update(state, [], x, y, torch.tensor(LR))
    for before, now in zip(state, after, strict=True):
        assert torch.equal(before, now)


def test_an_ignored_label_changes_nothing():
    _, program, state = compare("mlp", "adamw")
    loss, _, _, *after = program.update(state, [], torch.randn(1, 5), torch.tensor([-100]), torch.tensor(LR))
    assert loss == 0
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


def test_learning_rates_of_param_groups_are_inputs():
    model = MODELS["mlp"][0]()
    twin = copy.deepcopy(model)

    def optimizer(net):
        groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters(), "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.25)

    step = sw.Step(model, optimizer(model), nn.CrossEntropyLoss(), samples=1)
    x, y = torch.randn(1, 5), torch.tensor([2])
    program = traced(step, (x, y), simplified=True)
    assert program.update.inputs["lr"].tolist() == [0.5, 0.25]
    rates = torch.tensor([0.125, 1.0])
    other = optimizer(twin)
    for group, rate in zip(other.param_groups, rates.tolist(), strict=True):
        group["lr"] = rate
    loop = by_hand(twin, other, nn.CrossEntropyLoss(), None)
    state = list(program.state.values())
    for _ in range(5):
        _, _, _, *state = program.update(state, [], x, y, rates)
        loop(x, y)
    for p, now in zip(twin.parameters(), state, strict=False):
        torch.testing.assert_close(now, p.detach())


def test_the_state_of_the_optimizer_is_continued():
    model = MODELS["mlp"][0]()
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=LR), nn.CrossEntropyLoss(), samples=1)
    batches = [(torch.randn(1, 5), torch.randint(0, 3, (1,))) for _ in range(10)]
    step.run(batches[:5])
    program = traced(step, batches[0], simplified=True)
    assert program.state["optimizer.step.0"] == 5
    state = list(program.state.values())
    for x, y in batches[5:]:
        _, _, _, *state = program.update(state, [], x, y, torch.tensor(LR))
    step.run(batches[5:])
    for p, now in zip(model.parameters(), state, strict=False):
        torch.testing.assert_close(now, p.detach())


def test_predictions_are_those_of_eval_mode():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8).eval(), nn.ReLU(), nn.Linear(8, 3))
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss(), samples=1)
    x, y = torch.randn(1, 5), torch.tensor([2])
    program = traced(step, (x, y), simplified=True, forward=lambda net, batch: net(batch[0]))
    assert list(program.predict.inputs) == ["x"]
    (output,) = program.predict(list(program.state.values()), list(program.constants.values()), x)
    torch.testing.assert_close(output, model.eval()(x).detach())


def passes(graph: fx.GraphModule) -> int:
    """Number of elements that the operations of a graph write; views write none."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node.target is not aten.view.default]
    return sum(node.meta["val"].numel() for node in nodes if isinstance(node.meta.get("val"), Tensor))


def test_simplification_leaves_three_passes_over_the_parameters():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, transforms=[sw.clip(1.0)])
    program = traced(step, (torch.randn(1, 64), torch.tensor([1])), simplified=False)
    before = passes(program.update.graph) / size
    simplify(program.update.graph, scaled_sums=True)
    after = passes(program.update.graph) / size
    assert before > 10
    assert after < 3.5  # gradient, momentum, parameter
