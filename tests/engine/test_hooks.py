"""Hooks that change gradients: part of the result, or refused, whenever they are registered."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop, count_passes
from torch import nn
from zoo import CASES

import samplewise as sw
from samplewise.testing.case import noise

MIXING = {
    "minus the mean": lambda g: g - g.mean(0),
    "rolled": lambda g: g.roll(1, 0),
    "summed up": lambda g: g.cumsum(0),
    "flipped": lambda g: g.flip(0),
    "normalized over the batch": lambda g: g / g.norm(),
}
PER_SAMPLE = {
    "doubled": lambda g: 2 * g,
    "some features dropped": lambda g: g * torch.tensor([1.0, 0, 1, 0, 1, 0]).double(),
    "features reversed": lambda g: g.flip(1),
}


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def losses_of(net, hook=None, place="activation"):
    x = noise(5, 4).double()
    h = net[1](net[0](x))
    if hook is not None and place == "activation":
        h.register_hook(hook)
    if hook is not None and place == "node":
        h.grad_fn.register_prehook(lambda gradients: (hook(gradients[0]),))
    if hook is not None and place == "after a node":
        h.grad_fn.register_hook(lambda inputs, outputs: (hook(inputs[0]),))
    return net[2](h).square().sum(1)


PLACES = ["activation", "node", "after a node"]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("known", [0, 1, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", MIXING)
def test_mixing_hooks_that_come_after_some_steps(hook, place, known):
    """Never rows of another model without a word: refused, or with "allow" what the loop gives."""
    net = model()
    for _ in range(known):
        assert_as_loop(losses_of(net), net)
    losses = losses_of(net, MIXING[hook], place)
    try:
        assert_as_loop(losses, net)
    except (sw.SamplesInteractError, sw.GraphError):
        assert_as_loop(losses, net, strategy="reference")
    assert_as_loop(losses_of(net), net)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", PER_SAMPLE)
def test_hooks_that_keep_samples_apart_are_part_of_the_gradient(hook, place):
    net = model()
    assert_as_loop(losses_of(net), net)
    for _ in range(3):
        assert_as_loop(losses_of(net, PER_SAMPLE[hook], place), net)


def test_hook_on_a_transposed_weight():
    weight, x = nn.Parameter(noise(3, 4).double()), noise(5, 4).double()
    assert_as_loop((x @ weight.t()).square().sum(1), {"weight": weight})
    transposed = weight.t()
    transposed.register_hook(lambda g: 2 * g)
    losses = (x @ transposed).square().sum(1)
    with pytest.raises(sw.GraphError, match=r"those of 'weight' do not. A hook .* Remove the hook"):
        sw.gradients(losses, {"weight": weight}).norms()
    assert_as_loop(losses, {"weight": weight}, strategy="reference")


@pytest.mark.parametrize("known", [False, True])
def test_hook_after_the_node_that_uses_the_weight(known):
    layer, x = nn.Linear(4, 3).double(), noise(5, 4).double()
    if known:
        sw.gradients(layer(x).square().sum(1), layer).norms()
    out = layer(x)
    out.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else 3 * g for g in inputs))
    with pytest.raises(sw.GraphError, match="must sum to the gradient from autograd"):
        sw.gradients(out.square().sum(1), layer).norms()


def test_full_backward_hook_of_a_module_that_comes_later():
    net = model()
    x = noise(5, 4).double()
    assert_as_loop(net(x).square().sum(1), net)
    handle = net[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] - inputs[0].mean(0),))
    with pytest.raises((sw.SamplesInteractError, sw.GraphError)):
        sw.gradients(net(x).square().sum(1), net).norms()
    handle.remove()
    assert_as_loop(net(x).square().sum(1), net)


def test_hook_on_a_parameter_acts_in_backward_alone():
    """Documented: quantities are those without it, `backward` is as autograd's."""
    layer, x = nn.Linear(4, 3).double(), noise(5, 4).double()
    expected = sw.gradients(layer(x).square().sum(1), layer).norms()
    layer.weight.register_hook(lambda g: 2 * g)
    g = sw.gradients(layer(x).square().sum(1), layer)
    torch.testing.assert_close(g.norms(), expected)
    g.backward()
    found = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).square().sum(1).sum().backward()
    torch.testing.assert_close(found, layer.weight.grad)


def test_layers_without_gradients_are_compared_when_they_have_some():
    """A hook below a layer whose gradient was zero at the first look."""
    net, x = model(), noise(5, 4).double()
    with torch.no_grad():
        kept = net[2].weight.clone()
        net[2].weight.zero_()

    def losses():
        transposed = net[0].weight.t()
        transposed.register_hook(lambda g: 2 * g)
        return net[2](torch.tanh(x @ transposed)).square().sum(1)

    sw.gradients(losses(), net).norms()
    with torch.no_grad():
        net[2].weight.copy_(kept)
    with pytest.raises(sw.GraphError, match="must sum to the gradient"):
        sw.gradients(losses(), net).norms()


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_hook_somewhere_in_the_process_refuses_nothing(case):
    nn.Linear(1, 1).register_forward_hook(lambda module, inputs, output: None)
    B = 3 if case.allows(3) else 5
    net, inputs = case.build(B)
    losses = case.losses(net, inputs)
    assert sw.gradients(losses, net, interacting="allow").norms().shape == losses.shape


# ------------------------------------------------------------- forward hooks, which change no gradient


# Parameters whose gradients consist of rounding errors only, and the losses.


def key_bias(x):
    """The softmax does not depend on it."""
    q, k, v = (nn.Linear(6, 6).to(x) for _ in range(3))
    return ((q(x) @ k(x).mT).softmax(-1) @ v(x)).square().sum((1, 2)), {"bias": k.bias}


def key_bias_of_a_transformer(x):
    layer = nn.MultiheadAttention(6, 2, batch_first=True, kdim=6, vdim=4).to(x)
    bias = nn.Parameter(torch.randn(6).to(x))
    return layer(x, x + bias, x[..., :4], need_weights=False)[0].square().sum((1, 2)), {"bias": bias}


def bias_before_a_norm(x):
    layer = nn.Conv1d(5, 3, 1).to(x)
    return F.instance_norm(layer(x)).pow(3).sum((1, 2)), {"bias": layer.bias}


def length_of_normalized_values(x):
    layer = nn.Linear(6, 5).to(x)
    return F.layer_norm(layer(x), (5,), eps=0).square().sum((1, 2)), dict(layer.named_parameters())


def constant_probabilities(x):
    layer = nn.Linear(6, 5).to(x)
    return layer(x).softmax(-1).sum((1, 2)), dict(layer.named_parameters())


def losses_that_cancel(x):
    layer = nn.Linear(6, 5).to(x)
    h = layer(x)
    return (h.logsumexp(-1) - (h - 1).logsumexp(-1)).sum(1), dict(layer.named_parameters())


CANCELLING = [
    key_bias,
    key_bias_of_a_transformer,
    bias_before_a_norm,
    length_of_normalized_values,
    constant_probabilities,
    losses_that_cancel,
]


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", CANCELLING)
def test_gradients_that_all_cancel_to_rounding_errors(make, dtype, samples):
    for seed in range(3):
        torch.manual_seed(seed)
        x = noise(samples, 5, 6).to(dtype)
        x.requires_grad_().register_hook(PER_SAMPLE["doubled"])
        losses, parameters = make(x)
        arriving = torch.autograd.grad(losses.sum(), x, retain_graph=True)[0].abs().max()
        g = sw.gradients(losses, parameters)
        assert g.norms().max() <= 200 * torch.finfo(dtype).eps * arriving.clamp_min(1)


@pytest.mark.parametrize("depth", [4, 12])
def test_a_hook_below_the_cut_is_refused_whatever_the_size_of_the_gradient(depth):
    """The gradient of the first layer is tiny beside that of the last one, and is not a rounding error."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))).double()
    for layer in net[1:]:
        layer.weight.data *= 1e-3
    for _ in range(2):
        weight = net[0].weight.t()
        weight.register_hook(PER_SAMPLE["doubled"])
        losses = net[1:](noise(5, 3).double() @ weight).square().sum(1) + net[-1].bias.sum()
        with pytest.raises(sw.GraphError, match="those of 'first' do not"):
            sw.gradients(losses, {"first": net[0].weight}).norms()


@pytest.fixture
def passes(monkeypatch):
    """A list with an entry for each backward pass of the engine."""
    return count_passes(monkeypatch)


X = torch.linspace(-1, 1, 20).double().sin().view(5, 4)


def called(net):
    """Losses of the modules' own forward passes, which run their hooks."""
    return net(X).square().sum(1)


def assert_noticed(losses, net):
    """Refused, or what the loop gives."""
    try:
        assert_as_loop(losses, net)
    except (sw.SamplesInteractError, sw.GraphError):
        assert_as_loop(losses, net, strategy="reference")


FORWARD = {
    "forward hook": lambda net: net[1].register_forward_hook(lambda *_: None),
    "forward hook of the model": lambda net: net.register_forward_hook(lambda *_: None, with_kwargs=True),
    "forward pre-hook": lambda net: net[2].register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("register", FORWARD.values(), ids=FORWARD)
def test_a_forward_hook_in_each_step_costs_no_further_pass(register, passes):
    net = model()
    expected = sw.gradients(called(net), net).norms()
    for _ in range(3):
        handle = register(net)
        passes.clear()
        torch.testing.assert_close(sw.gradients(called(net), net).norms(), expected)
        assert len(passes) == 1
        handle.remove()


@pytest.mark.parametrize("hook", MIXING)
def test_a_hook_on_a_tensor_that_a_forward_hook_registers(hook):
    net = model()
    sw.gradients(called(net), net).norms()
    net[1].register_forward_hook(lambda module, inputs, output: output.register_hook(MIXING[hook]) and None)
    for _ in range(3):
        assert_noticed(called(net), net)


@pytest.mark.parametrize("hook", MIXING)
def test_a_hook_on_a_tensor_next_to_forward_hooks_of_another_model(hook):
    """The count of hooks must not return to a value for which the model was verified."""
    net, other = model(), model()
    sw.gradients(called(net), net).norms()
    other.register_forward_hook(lambda *_: None)
    sw.gradients(called(net), net).norms()
    losses = losses_of(net, MIXING[hook])
    sw.gradients(called(other), other).norms()
    assert_noticed(losses, net)


@pytest.mark.parametrize("hook", MIXING)
def test_a_backward_hook_of_a_module(hook):
    net = model()
    sw.gradients(called(net), net).norms()
    FORWARD["forward hook"](net)
    net[1].register_full_backward_hook(lambda module, inputs, outputs: (MIXING[hook](inputs[0]),))
    for _ in range(3):
        assert_noticed(called(net), net)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", MIXING)
def test_a_graph_with_a_hook_that_is_older_than_a_verified_one_without(hook, place):
    net = model()
    hooked = losses_of(net, MIXING[hook], place)
    for _ in range(2):
        sw.gradients(losses_of(net), net).norms()
    assert_noticed(hooked, net)
