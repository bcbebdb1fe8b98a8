"""A graph has the structure of an earlier one only if it equals it in every node, setting, connection and shape."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop
from torch import nn

from samplewise.engine.graph import structure
from samplewise.engine.graph.graph import Graph
from samplewise.testing.case import Net, noise

SAMPLES = 4  # also the number of tokens and features, so that shapes tell nothing


@pytest.fixture(autouse=True)
def _nothing_known():
    structure.forget_structures()


def x():
    return noise(SAMPLES, SAMPLES, SAMPLES).double()


def net(forward, **parts):
    return Net(forward, a=nn.Linear(SAMPLES, SAMPLES), b=nn.Linear(SAMPLES, SAMPLES), **parts).double()


def summed(h):
    return h.flatten(1).square().sum(1)


ORDER = torch.tensor([1, 0, 3, 2])

PROGRAMS = {
    "once": lambda m, x: summed(m.a(x).tanh()),
    "below the end of another": lambda m, x: summed(m.a(m.b(x).tanh()).tanh()),
    "twice": lambda m, x: summed(m.a(m.a(x).tanh()).tanh()),
    "the other one": lambda m, x: summed(m.b(x).tanh()),
    "swapped": lambda m, x: summed(m.b(m.a(x).tanh()).tanh()),
    "one input for both": lambda m, x: summed(m.a(x) * m.b(x)),
    "two inputs": lambda m, x: summed(m.a(x) * m.b(x.tanh())),
    "one node for both": lambda m, x: summed((h := m.a(x)) * h),
    "two nodes": lambda m, x: summed(m.a(x) * m.a(x)),
    "rows moved": lambda m, x: summed(m.a(x).tanh()[ORDER]),
    "rows moved by a pad": lambda m, x: summed(F.pad(m.a(x), (0, 0, 0, 0, 1, -1)).tanh()),
    "tokens moved by a pad": lambda m, x: summed(F.pad(m.a(x), (0, 0, 1, -1, 0, 0)).tanh()),
    "tokens first": lambda m, x: summed(m.a(x.transpose(0, 1)).tanh().transpose(0, 1)),
    "samples first": lambda m, x: summed(m.a(x.transpose(0, 1)).tanh().transpose(1, 0).transpose(1, 2)),
    "view": lambda m, x: summed(m.a(x).view(SAMPLES, -1).tanh()),
    "copy": lambda m, x: summed(m.a(x).clone().tanh()),
    "sum over tokens": lambda m, x: m.a(x).tanh().sum(1).square().sum(1),
    "sum over features": lambda m, x: m.a(x).tanh().sum(2).square().sum(1),
    "scaled": lambda m, x: summed(torch.addmm(m.a.bias, x[:, 0], m.a.weight, alpha=2, beta=3)),
    "not scaled": lambda m, x: summed(torch.addmm(m.a.bias, x[:, 0], m.a.weight)),
    "slope": lambda m, x: summed(F.leaky_relu(m.a(x), 0.1)),
    "another slope": lambda m, x: summed(F.leaky_relu(m.a(x), 0.4)),
    "frozen": lambda m, x: summed(m.a(x).detach().tanh() + m.b(x)),
    "not frozen": lambda m, x: summed(m.a(x).tanh() + m.b(x)),
    "half of the samples": lambda m, x: summed(m.a(x[:2]).tanh()),
    "token norm": lambda m, x: summed(F.layer_norm(m.a(x), (SAMPLES,), m.b.bias, eps=1e-5)),
    "token norm with a large eps": lambda m, x: summed(F.layer_norm(m.a(x), (SAMPLES,), m.b.bias, eps=0.5)),
    "sample norm": lambda m, x: summed(F.layer_norm(m.a(x), (SAMPLES, SAMPLES), m.b.weight, eps=1e-5)),
}


def test_programs_one_after_the_other():
    model = net(lambda m, x: None)
    for program in (*PROGRAMS.values(), *reversed(PROGRAMS.values())):
        assert_as_loop(program(model, x()), model)


def test_each_program_has_its_own_structure():
    model = net(lambda m, x: None)
    graphs = {name: _graph(program, model) for name, program in PROGRAMS.items()}
    found = {name: graph.structure for name, graph in graphs.items()}
    # A kernel does not save its eps, nor does a rule need it; inputs without gradients are not in the graph.
    # Numbers to compute with may change in each step; rules read them from the node.
    alike = {
        "token norm with a large eps": "token norm",
        "two inputs": "one input for both",
        "not scaled": "scaled",
        "another slope": "slope",
    }
    assert all(graphs[name].sizes is graphs[same].sizes for name, same in alike.items())
    # The same operations with other sizes.
    resized = {"tokens moved by a pad": "rows moved by a pad", "half of the samples": "once"}
    assert all(found[name] is found[same] for name, same in {**alike, **resized}.items())
    assert all(graphs[name].sizes is not graphs[same].sizes for name, same in resized.items())
    assert len(set(map(id, found.values()))) == len(found) - len(alike) - len(resized)
    for name, program in PROGRAMS.items():
        graph = _graph(program, model)
        assert graph.structure is found[name]
        assert graph.sizes is graphs[name].sizes


def _graph(program, model):
    return Graph(program(model, x()), dict(model.named_parameters()))


def test_a_graph_like_the_last_one_is_not_read_again(monkeypatch):
    model = net(lambda m, x: None)
    first = _graph(PROGRAMS["twice"], model).structure
    monkeypatch.setattr(structure, "_read", None)
    assert _graph(PROGRAMS["twice"], model).structure is first


def test_a_graph_with_other_sizes_is_not_read_again(monkeypatch):
    model = net(lambda m, x: summed(m.a(x)[:, : x.shape[1] - 1].tanh()))
    first = Graph(model(x()), dict(model.named_parameters()))
    monkeypatch.setattr(structure, "_read", None)
    for shape in ((3, 4, 4), (4, 7, 4), (5, 2, 4)):
        other = Graph(model(noise(*shape).double()), dict(model.named_parameters()))
        assert other.structure is first.structure
        assert other.sizes is not first.sizes


def test_a_graph_that_differs_in_shapes_only_is_not_read_again(monkeypatch):
    model = net(lambda m, x: None)

    def graph_of(samples):
        losses = summed(model.a(noise(samples, 5, SAMPLES).double()).tanh())
        return Graph(losses, dict(model.named_parameters()))

    first = graph_of(3)
    monkeypatch.setattr(structure, "_read", None)
    second = graph_of(4)
    assert second.structure is first.structure
    assert second.sizes is not first.sizes
    assert graph_of(3).sizes is first.sizes
    assert graph_of(4).sizes is second.sizes


def test_classes_defined_in_each_call_are_not_kept():
    model = net(lambda m, x: None)
    for _ in range(3):

        class Negative(torch.autograd.Function):
            @staticmethod
            def forward(ctx, losses):
                return -losses

            @staticmethod
            def backward(ctx, gradient):
                return -gradient

        assert_as_loop(Negative.apply(PROGRAMS["twice"](model, x())), {"a": model.a.weight})
    assert len(structure._recent) == 1


CHANGES = {
    "dropout": (lambda m: m.drop.train(), lambda m: m.drop.eval()),
    "dropout rate": (lambda m: setattr(m.drop, "p", 0.1), lambda m: setattr(m.drop, "p", 0.6)),
    "frozen": (lambda m: m.a.weight.requires_grad_(False), lambda m: m.a.weight.requires_grad_()),
    "hook": (lambda m: setattr(m, "hook", lambda g: g * 2), lambda m: setattr(m, "hook", None)),
    "padding_idx": (lambda m: setattr(m.words, "padding_idx", 1), lambda m: setattr(m.words, "padding_idx", None)),
    "by frequency": (
        lambda m: setattr(m.words, "scale_grad_by_freq", True),
        lambda m: setattr(m.words, "scale_grad_by_freq", False),
    ),
    "batch norm": (lambda m: m.norm.train(), lambda m: m.norm.eval()),
    "replaced": (lambda m: setattr(m, "a", nn.Linear(SAMPLES, SAMPLES).double()), lambda m: None),
    "samples": (lambda m: setattr(m, "rows", 3), lambda m: setattr(m, "rows", SAMPLES)),
}


def changing(m, x):
    h = m.words(torch.arange(m.rows * SAMPLES).view(m.rows, SAMPLES) % 3) + m.a(x[: m.rows])
    if m.hook is not None:
        h.register_hook(m.hook)
    h = F.instance_norm(h, use_input_stats=True) + m.norm(h.transpose(1, 2)) if not m.norm.training else h
    return summed(m.b(m.drop(h).tanh()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_setting_between_steps(change):
    model = net(changing, words=nn.Embedding(3, SAMPLES), drop=nn.Dropout(0.3), norm=nn.BatchNorm1d(SAMPLES))
    model.eval()
    model.hook = None
    model.rows = SAMPLES
    for k in range(5):
        torch.manual_seed(k)
        CHANGES[change][k % 2](model)
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses = model(x())
        reached = Graph(losses, wanted).leaves.values()
        assert_as_loop(losses, {name: wanted[name] for name in reached})


def test_another_set_of_parameters():
    model = net(PROGRAMS["swapped"])
    everything = dict(model.named_parameters())
    for names in (everything, ["a.weight"], ["b.bias", "a.bias"], ["a.weight", "b.weight"], everything):
        for _ in range(2):
            assert_as_loop(model(x()), {name: everything[name] for name in names})
