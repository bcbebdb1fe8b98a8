"""Backward passes divided at LSTM kernels, which are not run because the rule gives the gradients of their inputs."""

import pytest
import torch
from by_loop import assert_as_loop
from torch import nn
from torch.profiler import ProfilerActivity, profile

import samplewise as sw
from samplewise.engine import backward
from samplewise.testing.case import Net, noise

KERNEL = "aten::mkldnn_rnn_layer_backward"
SAMPLES = 4


def lstm(size=6, hidden=6, **options):
    return nn.LSTM(size, hidden, batch_first=True, **options)


def first_states(m, x):
    """States computed from the samples, and gradients at all three outputs."""
    h = m.start(x[:, 0])
    out, (h, c) = m.f(m.enter(x), (h[None], h.sin()[None]))
    return out[:, 1:] + h[0][:, None] * c[0][:, None]


def step_by_step(m, x):
    states = None
    for one in m.enter(x).unbind(1):
        out, states = m.f(one[:, None], states)
    return out


def same_states(m, x):
    entered = m.enter(x)
    states = (entered[None, :, 0], entered[None, :, 1])
    return m.g(m.f(entered, states)[0], states)[0]


# model, number of kernels that the backward pass of a quantity runs
DIVIDED = {
    "one layer": (lambda: Net(lambda m, x: m.f(m.enter(x))[0], enter=nn.Linear(6, 6), f=lstm()), 0),
    "last state": (lambda: Net(lambda m, x: m.f(m.enter(x))[1][1][0], enter=nn.Linear(6, 6), f=lstm()), 0),
    "first states": (lambda: Net(first_states, enter=nn.Linear(6, 6), start=nn.Linear(6, 6), f=lstm()), 0),
    "layers": (lambda: Net(lambda m, x: m.f(m.enter(x))[0], enter=nn.Linear(6, 6), f=lstm(num_layers=3)), 0),
    "directions": (
        lambda: Net(
            lambda m, x: m.f(m.enter(x))[0], enter=nn.Linear(6, 6), f=lstm(6, 5, num_layers=2, bidirectional=True)
        ),
        0,
    ),
    "no bias": (lambda: Net(lambda m, x: m.f(m.enter(x))[0], enter=nn.Linear(6, 6), f=lstm(bias=False)), 0),
    "used twice": (lambda: Net(lambda m, x: m.f(m.f(m.enter(x))[0].tanh())[0], enter=nn.Linear(6, 6), f=lstm()), 0),
    "side by side": (
        lambda: Net(lambda m, x: m.f(m.enter(x))[0] * m.g(m.enter(x))[0], enter=nn.Linear(6, 6), f=lstm(), g=lstm()),
        0,
    ),
    "skip": (lambda: Net(lambda m, x: m.f(m.enter(x))[0] + m.enter(x), enter=nn.Linear(6, 6), f=lstm()), 0),
    "residual": (lambda: Net(lambda m, x: add_to(m.enter(x), m.f), enter=nn.Linear(6, 6), f=lstm()), 1),
    "residual below": (
        lambda: Net(lambda m, x: m.g(add_to(m.enter(x), m.f))[0], enter=nn.Linear(6, 6), f=lstm(), g=lstm()),
        1,
    ),
    "one call per step": (lambda: Net(step_by_step, enter=nn.Linear(6, 6), f=lstm()), 4),
    "states used by two layers": (lambda: Net(same_states, enter=nn.Linear(6, 6), f=lstm(), g=lstm()), 1),
    "first layer": (lambda: Net(lambda m, x: m.f(x)[0], f=lstm()), 0),
}


def add_to(x, layer):
    return x + layer(x)[0]


def losses_of(model, samples=SAMPLES):
    return model(noise(samples, 5, 6)).tanh().flatten(1).square().sum(1)


def kernels_run(compute):
    with profile(activities=[ProfilerActivity.CPU]) as events:
        compute()
    return sum(event.count for event in events.key_averages() if event.key == KERNEL)


@pytest.mark.parametrize("strategy", ["fused", "twice"])
@pytest.mark.parametrize("case", DIVIDED)
def test_gradients_of_divided_passes(case, strategy, monkeypatch):
    monkeypatch.setattr(backward, "may_have_hooks", lambda graph: False)  # other tests may have registered hooks
    torch.manual_seed(0)
    model = DIVIDED[case][0]()
    assert_as_loop(losses_of(model), model, rtol=2e-4, atol=1e-5, strategy=strategy)


@pytest.mark.parametrize("case", DIVIDED)
def test_kernels_that_are_run(case, monkeypatch):
    monkeypatch.setattr(backward, "may_have_hooks", lambda graph: False)  # other tests may have registered hooks
    make, expected = DIVIDED[case]
    model = make()
    sw.gradients(losses_of(model), model).norms()  # verifies the plan
    g = sw.gradients(losses_of(model), model)
    assert kernels_run(g.norms) == expected
    assert kernels_run(lambda: g.backward()) == 0


def on_the_input(entered, out):
    entered.register_hook(lambda gradient: gradient * 2)


def on_the_output(entered, out):
    out.register_hook(lambda gradient: gradient * 2)


def on_the_node_of_the_input(entered, out):
    entered.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))


@pytest.mark.parametrize("hook", [on_the_input, on_the_output, on_the_node_of_the_input])
def test_divided_passes_with_hooks(hook):
    model = DIVIDED["layers"][0]()
    sw.gradients(losses_of(model), model).norms()
    entered = model.enter(noise(SAMPLES, 5, 6))
    out = model.f(entered)[0]
    hook(entered, out)
    assert_as_loop(out.tanh().flatten(1).square().sum(1), model, rtol=2e-4, atol=1e-5)


def test_a_hook_on_the_node_of_a_layer_is_not_left_out():
    """The pass is then not divided at this node: the hook acts on the gradients of the layers below it."""
    layers = nn.LSTM(6, 4, num_layers=2, batch_first=True)
    seen = []

    def losses():
        out = layers(noise(SAMPLES, 5, 6))[0]
        node = out.grad_fn
        while "Rnn" not in node.name():
            node = node.next_functions[0][0]
        node.register_prehook(lambda gradients: seen.append(len(gradients)))
        return out.tanh().flatten(1).square().sum(1)

    sw.gradients(losses(), layers).norms()
    seen.clear()
    assert_as_loop(losses(), layers, rtol=2e-4, atol=1e-5)
    assert seen
