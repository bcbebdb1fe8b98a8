"""A user's autograd.Function is never taken for the ATen operation of the same name."""

import pytest
import torch
from by_loop import assert_as_loop
from torch import nn

import samplewise as sw
from samplewise.engine.grads.indexed import VIEWS as VIEWS_OF_PARAMETERS
from samplewise.engine.graph import saved, structure
from samplewise.engine.graph.graph import Graph, operation
from samplewise.engine.ownership.independence import BATCH_NORMS, REDUCTIONS
from samplewise.engine.ownership.layouts import MOVERS, VIEWS
from samplewise.engine.parameter_side import UNCHANGED
from samplewise.engine.rules import RULES
from samplewise.errors import SamplesInteractError
from samplewise.testing.case import noise

OTHERS = {"CheckpointFunction", "CompiledFunction", "AccumulateGrad", "Index", "Embedding", "Linear"}
NAMES = sorted(
    set(MOVERS) | VIEWS | VIEWS_OF_PARAMETERS | UNCHANGED | BATCH_NORMS | REDUCTIONS | {op for op, _ in RULES} | OTHERS
)


def named(name, forward, backward):
    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", NAMES)
def test_on_the_way_of_the_samples(name):
    """Rows are rolled in the backward pass of f = roll: each sample's gradient is another row's."""
    function = named(name, lambda ctx, x: x.roll(1, 0), lambda ctx, g: g.roll(-1, 0))
    layer, x = nn.Linear(4, 4).double(), noise(4, 4).double()
    assert_as_loop(function.apply(layer(x)).square().sum(1), layer)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", NAMES)
def test_on_the_way_of_a_weight(name):
    """The gradient that this function hands on is three times the one that an operation of that name would."""
    function = named(name, lambda ctx, w: w.clone(), lambda ctx, g: 3 * g)
    weight, x = nn.Parameter(noise(4, 4).double()), noise(4, 4).double()
    assert_as_loop((x @ function.apply(weight)).square().sum(1), {"weight": weight})


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", NAMES)
def test_with_the_parameter_first(name):
    """f(p, h) = p h with a gradient of its own, and nothing saved under the names of an ATen node."""

    def forward(ctx, p, h):
        ctx.save_for_backward(p, h)
        ctx.dim = ctx.alpha = ctx.variable = "mine"
        return p * h

    def backward(ctx, g):
        p, h = ctx.saved_tensors
        return 5 * g * h, g * p

    p, layer, x = nn.Parameter(noise(4, 4).double()), nn.Linear(4, 4).double(), noise(4, 4).double()
    losses = named(name, forward, backward).apply(p, layer(x)).square().sum(1)
    assert_as_loop(losses, {"p": p, **dict(layer.named_parameters())})


def test_mixing_samples_in_a_function_with_the_name_of_an_elementwise_operation():
    def backward(ctx, g):
        return g - g.mean(0)

    function = named("Add", lambda ctx, x: x - x.mean(0), backward)
    layer, x = nn.Linear(4, 4).double(), noise(5, 4).double()
    with pytest.raises(SamplesInteractError, match="must not depend on other samples"):
        sw.gradients(function.apply(layer(x)).square().sum(1), layer).norms()


def test_data_kept_as_an_attribute_is_sample_data_too():
    def forward(ctx, w, x):
        ctx.x = x
        return w * x.mean()

    def backward(ctx, g):
        return g * ctx.x.mean(), None

    function = named("Mul", forward, backward)
    w, x = nn.Parameter(noise(4).double()), noise(5, 4).double()
    with pytest.raises(SamplesInteractError):
        sw.gradients((x @ function.apply(w, x)).square(), [w]).norms()


def test_names_in_messages_and_tables():
    function = named("Add", lambda ctx, x: x * 1, lambda ctx, g: g)
    layer, x = nn.Linear(4, 4).double(), noise(5, 4).double()
    out = function.apply(layer(x))
    assert operation(out.grad_fn) == "Function 'Add'"
    assert "Function 'Add'" in Graph(out.sum(1), dict(layer.named_parameters())).operations.values()


def test_functions_defined_in_every_forward_pass_leave_nothing_behind():
    layer, x = nn.Linear(4, 4).double(), noise(5, 4).double()

    def losses():
        function = named("Mine", lambda ctx, x: x * 2, lambda ctx, g: g * 2)
        return function.apply(layer(x)).square().sum(1)

    assert_as_loop(losses(), layer)
    caches = structure._operations, structure._setting_names, structure._structures, saved._names
    sizes = [len(cache) for cache in caches]
    for _ in range(5):
        assert_as_loop(losses(), layer)
    assert [len(cache) for cache in caches] == sizes


class ScaledProduct(torch.autograd.Function):
    """Numbers stand between and before the tensors."""

    @staticmethod
    def forward(ctx, scale, x, name, weight):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * (x @ weight)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return None, ctx.scale * g @ weight.t(), None, ctx.scale * x.t() @ g


@pytest.mark.parametrize("width", [3, 4, 5])  # with 4 or 5, the gradients of x and weight have the same shape
def test_arguments_that_are_no_tensors(width):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(width, 2)).double()
    weight = nn.Parameter(torch.linspace(-1, 1, 5 * width).double().view(5, width))
    for step in range(3):
        x = torch.linspace(-2, 2, 30).double().view(5, 6).cos() + step
        losses = model[1](ScaledProduct.apply(2.0 + step, model[0](x), "name", weight).tanh()).square().sum(1)
        assert_as_loop(losses, {**dict(model.named_parameters()), "weight": weight})
