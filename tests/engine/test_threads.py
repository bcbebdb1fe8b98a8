"""Several threads that ask about one graph each get the answer of one."""

import threading

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.engine.backward import backward_to_leaves
from samplewise.engine.graph.graph import Graph
from samplewise.testing.case import noise

THREADS = 4


def in_threads(work):
    """Runs work(number) in several threads at once and raises the first error."""
    errors = []
    start = threading.Barrier(THREADS)

    def run(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def assert_same(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategies", [("fused",), ("twice",), ("fused", "twice", "full", "reference")], ids=len)
def test_each_with_its_own_gradients_of_one_graph(strategies):
    model = net()
    losses = model(noise(12, 16).double()).square().sum(1)
    g = sw.gradients(losses, model, strategy="reference")
    norms, sums = g.norms(), g.sum()

    def work(number):
        for turn in range(20):
            g = sw.gradients(losses, model, strategy=strategies[(number + turn) % len(strategies)])
            torch.testing.assert_close(g.norms(), norms, rtol=1e-10, atol=1e-12)
            assert_same(g.sum(), sums)

    in_threads(work)


def test_all_with_the_same_gradients():
    model = net()
    losses = model(noise(12, 16).double()).square().sum(1)
    expected = sw.gradients(losses, model, strategy="reference").sum()

    for _ in range(20):
        g = sw.gradients(losses, model)
        in_threads(lambda _, g=g: assert_same(g.sum(), expected))


def test_beside_ordinary_backward_passes():
    model = net()
    losses = model(noise(12, 16).double()).square().sum(1)
    norms = sw.gradients(losses, model, strategy="reference").norms()
    weights = torch.linspace(1, 9, 12).double()

    def work(number):
        for _ in range(20):
            if number % 2:
                torch.autograd.grad(losses, list(model.parameters()), weights, retain_graph=True)
            else:
                torch.testing.assert_close(sw.gradients(losses, model).norms(), norms, rtol=1e-10, atol=1e-12)

    in_threads(work)


def test_probed_graphs():
    model = net()
    out = model(noise(12, 16).double())[torch.randperm(12)]
    losses = out.square().sum(1)
    norms = sw.gradients(losses, model, strategy="reference").norms()

    def work(_):
        for _ in range(10):
            torch.testing.assert_close(sw.gradients(losses, model).norms(), norms, rtol=1e-10, atol=1e-12)

    in_threads(work)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pass_to_the_leaves_does_not_change_passes_of_other_threads(sharded):
    model = net()
    losses = model(noise(12, 16).double()).square().sum(1)
    parameters = dict(model.named_parameters())
    ones = torch.ones_like(losses)
    expected = torch.autograd.grad(losses, list(parameters.values()), ones, retain_graph=True)
    graph = Graph(losses, parameters)
    graph.sharded = sharded
    found = {}
    beside = []

    def plain():
        beside.append(torch.autograd.grad(losses, list(parameters.values()), ones, retain_graph=True))

    def arrived(name, gradient):
        assert threading.current_thread() is threading.main_thread()
        found[name] = gradient.clone()
        other = threading.Thread(target=plain)
        other.start()
        other.join()

    backward_to_leaves(graph, parameters, ones, arrived)
    assert len(beside) == len(parameters)
    for gradients in [[found[name] for name in parameters], *beside]:
        assert_same(dict(zip(parameters, gradients, strict=True)), dict(zip(parameters, expected, strict=True)))
