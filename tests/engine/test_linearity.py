"""Backward passes that are not linear: rows are those of the loop, or an error names the operation."""

import pytest
import torch
from by_loop import assert_as_loop, rows_by_loop
from nonlinear_hooks import Changed, hooked, rounded_to, shuffled, with_posthook, with_prehook
from torch import nn

import samplewise as sw
from samplewise.engine import hook_checks
from samplewise.engine.ownership import probe, verify, weighted_passes
from samplewise.testing.case import Net, noise

B = 6
NOT_LINEAR = r"the backward of .* is not linear"


# Each sample's gradient is changed for itself: the rows of the loop add up to the gradient of the sum.
APART = {
    "rounded": rounded_to(1e-2),
    "rounded a little": rounded_to(1e-5),
    "fake-quantized per row": lambda g: rounded_to(1 / 127)(g / (g.abs().amax(-1, True) + 1e-9)),
    "sparsified": lambda g: g * (g.abs() > 0.05),
    "clipped by value": lambda g: g.clamp(-0.05, 0.05),
    "clipped per row": lambda g: g / (g.norm(dim=-1, keepdim=True) / 0.1).clamp_min(1),
    "sign": torch.sign,
    "squared": lambda g: g * g.abs(),
    "tanh": torch.tanh,
}
# The rows of the loop do not add up to the gradient of the sum.
TOGETHER = {
    "shifted": lambda g: g + 0.01,
    "shifted a little": lambda g: g + 1e-7,
    "clipped by the norm of the batch": lambda g: g * min(1.0, 0.1 / float(g.norm() + 1e-30)),
    "quantized by the largest of the batch": lambda g: rounded_to(float(g.abs().max() + 1e-30) / 127)(g),
    "noise": lambda g: g + 1e-3 * torch.randn_like(g),
    "dropout": lambda g: g * (torch.rand_like(g) > 0.3),
}
# As before, but a scaled batch has a scaled gradient. These samples interact, so both errors are right.
SCALED = {
    "largest of the batch": lambda g: g * (g.abs() > 0.1 * g.abs().max()),
    "top third": lambda g: g * (g.abs() >= g.abs().flatten().topk(max(1, g.numel() // 3)).values[-1]),
}
LINEAR = {
    "doubled": lambda g: 2 * g,
    "columns dropped": lambda g: g * torch.linspace(0, 1, g.shape[-1], dtype=g.dtype).round(),
    "clip that is never reached": lambda g: g.clamp(-1e3, 1e3),
    "threshold that is never reached": lambda g: g * (g.abs() > 1e-30),
}


class Quantized(torch.autograd.Function):
    """Matrix product with a changed gradient of the weight."""

    @staticmethod
    def forward(ctx, x, weight, change):
        ctx.save_for_backward(x, weight)
        ctx.change = change
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, ctx.change(g.t() @ x), None


ON_ACTIVATIONS = {
    "Function": Changed.apply,
    "hook": hooked,
    "prehook of a node": with_prehook,
    "posthook of a node": with_posthook,
    "Function on shuffled rows": shuffled(Changed.apply),
    "hook on shuffled rows": shuffled(hooked),
}
WAYS = {"fused": {}, "full": {"strategy": "full"}, "twice differentiable": {"create_graph": True}}


def net(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def losses_of(model, change_of, change):
    x = noise(B, 4).to(model[0].weight)
    out = model[2](change_of(model[1](model[0](x)), change))
    return out.square().sum(1) * torch.linspace(0.1, 1, B).to(x)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", APART)
def test_changes_of_each_sample_for_itself_give_the_rows_of_the_loop(change, place, way):
    model = net()
    for _ in range(2):
        assert_as_loop(losses_of(model, ON_ACTIVATIONS[place], APART[change]), model, **WAYS[way])


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", APART)
def test_a_sum_that_is_a_backward_pass_with_weights_is_refused(change, place):
    model = net()
    weights = torch.linspace(0.01, 1, B).double()
    for _ in range(2):
        g = sw.gradients(losses_of(model, ON_ACTIVATIONS[place], APART[change]), model, strategy="twice")
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            g.backward(weights)
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            g.norms()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", TOGETHER)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
def test_changes_that_do_not_add_up_are_refused(change, place, strategy):
    model = net()
    for _ in range(2):
        losses = losses_of(model, ON_ACTIVATIONS[place], TOGETHER[change])
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            sw.gradients(losses, model, strategy=strategy).norms()
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            sw.gradients(losses, model, strategy=strategy).backward()


@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", SCALED)
def test_changes_that_depend_on_the_largest_of_the_batch_are_refused(change, place):
    model = net()
    for _ in range(4):
        with pytest.raises((sw.GraphError, sw.SamplesInteractError)):
            sw.gradients(losses_of(model, ON_ACTIVATIONS[place], SCALED[change]), model).norms()


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", LINEAR)
def test_linear_changes_are_part_of_the_gradient(change, place, strategy):
    model = net()
    weights = torch.linspace(-1, 1, B).double()
    for _ in range(2):
        losses = losses_of(model, ON_ACTIVATIONS[place], LINEAR[change])
        assert_as_loop(losses, model, strategy=strategy)
        assert_backward_as_loop(sw.gradients(losses, model, strategy=strategy), losses, model, weights)


def assert_backward_as_loop(g, losses, model, weights):
    model.zero_grad()
    g.backward(weights, retain_graph=True)
    for name, rows in rows_by_loop(losses, model).items():
        torch.testing.assert_close(model.get_parameter(name).grad, torch.tensordot(weights, rows, 1))


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("change", [*APART, *TOGETHER, *SCALED])
@pytest.mark.parametrize("place", ["Function", "hook"])
@pytest.mark.parametrize("strategy", ["fused", "twice", "full"])
def test_changes_on_the_way_to_a_weight_are_refused(change, place, strategy):
    """The change acts on the sum of the samples in an ordinary pass, and on each of them in the loop."""
    model = net()
    x = noise(B, 4).double()
    for _ in range(2):
        weight = ON_ACTIVATIONS[place](model[2].weight * 2, {**APART, **TOGETHER, **SCALED}[change])
        losses = (torch.tanh(model[0](x)) @ weight.t() + model[2].bias).square().sum(1)
        with pytest.raises(sw.GraphError, match=f"{NOT_LINEAR}|between an operation and this parameter"):
            sw.gradients(losses, model, strategy=strategy).norms()


def test_a_shift_below_the_cut_is_refused_whatever_weights_are_drawn(monkeypatch):
    """Weights that add up to 1 multiply the shift of a sum of rows by 1, too."""
    monkeypatch.setattr(
        hook_checks, "random_powers", lambda samples: torch.tensor([2**-2, 2**-2, *[2**-3] * (samples - 2)])
    )
    test_changes_on_the_way_to_a_weight_are_refused("shifted", "hook", "fused")


@pytest.mark.parametrize("change", [*APART, *TOGETHER, *SCALED])
@pytest.mark.parametrize("strategy", ["fused", "twice"])
def test_changes_of_the_gradient_of_a_weight_in_a_function_are_refused(change, strategy):
    model = net()
    h = torch.tanh(model[0](noise(B, 4).double()))
    losses = Quantized.apply(h, model[2].weight, {**APART, **TOGETHER, **SCALED}[change]).square().sum(1)
    parameters = {"a": model[0].weight, "b": model[2].weight}
    with pytest.raises(sw.GraphError, match="the backward of Function 'Quantized' is not linear"):
        sw.gradients(losses, parameters, strategy=strategy).norms()
    with pytest.raises(sw.GraphError, match="the backward of Function 'Quantized' is not linear"):
        sw.gradients(losses, parameters, strategy=strategy).backward(torch.linspace(0.1, 1, B).double())


def test_gradients_that_cancel_to_rounding_errors_are_linear():
    """The bias of the keys does not change the attention, and a batch of two that is normalized is constant."""
    model = Net(None, q=nn.Linear(6, 6), k=nn.Linear(6, 6, bias=False), v=nn.Linear(6, 6)).double()
    bias = nn.Parameter(noise(6).double())
    for _ in range(3):
        x = hooked(noise(B, 5, 6).double().requires_grad_() * 1, LINEAR["doubled"])
        keys = Biased.apply(model.k(x), bias)
        losses = ((model.q(x) @ keys.mT).softmax(-1) @ model.v(x)).square().sum((1, 2))
        assert_as_loop(losses, {**dict(model.named_parameters()), "bias": bias}, atol=1e-9)
        two = noise(2, 6).double()
        pair = model.v(two)
        losses = hooked((pair - pair.mean(0)) / pair.std(0), LINEAR["doubled"]).square().sum(1) + model.q(two).sum(1)
        parameters = {"v": model.v.weight, "q": model.q.weight}
        assert_as_loop(losses, parameters, atol=1e-9, interacting="allow")


class Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, g):
        return g, g.sum((0, 1))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", [*LINEAR, "clipped by value"])
def test_hooks_on_outputs_of_layers_whose_ownership_is_probed(change, place):
    """The result of a backward pass does not have the hooks on nodes that the pass runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    for _ in range(3):
        h = noise(B, 4).double()
        for number, layer in enumerate(model):
            h = layer(h)
            if number == place:
                h.register_hook({**LINEAR, **APART}[change])
            h = h.tanh()
        assert_as_loop(h[torch.randperm(B)].square().sum(1), model)


def test_the_clip_is_reached_after_some_steps():
    model = net()
    for size in (1e-3, 1e-3, 1.0, 1e-3, 10.0):
        losses = losses_of(model, shuffled(Changed.apply), lambda g: g.clamp(-0.05, 0.05)) * size
        assert_as_loop(losses, model)


def test_the_error_names_the_function_or_the_place_of_the_hook():
    model = net()
    with pytest.raises(sw.GraphError, match=r"backward of Function 'Changed' is not linear\. .* strategy='reference'"):
        sw.gradients(losses_of(model, Changed.apply, TOGETHER["shifted"]), model).norms()
    with pytest.raises(sw.GraphError, match="backward of Addmm, including hooks on the output of Tanh, is not linear"):
        sw.gradients(losses_of(model, hooked, TOGETHER["shifted"]), model).norms()
    losses = losses_of(model, hooked, TOGETHER["shifted"])
    assert_rows_of_reference(losses, model)


def assert_rows_of_reference(losses, model):
    rows = sw.gradients(losses, model, strategy="reference").full()
    for name, expected in rows_by_loop(losses, model).items():
        torch.testing.assert_close(rows[name], expected)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("place", ON_ACTIVATIONS)
@pytest.mark.parametrize("change", [*APART, *TOGETHER, *SCALED, *LINEAR])
def test_where_sums_are_not_deterministic(change, place, monkeypatch):
    for module in (hook_checks, weighted_passes, probe, verify):
        monkeypatch.setattr(module, "is_deterministic", lambda graph: False)
    model = net()
    for _ in range(2):
        losses = losses_of(model, ON_ACTIVATIONS[place], {**APART, **TOGETHER, **SCALED, **LINEAR}[change])
        if change in LINEAR or change in APART:
            assert_as_loop(losses, model)
            continue
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            sw.gradients(losses, model).norms()
    if change not in LINEAR:
        with pytest.raises(sw.GraphError, match=NOT_LINEAR):
            sw.gradients(losses, model, strategy="twice").sum()


# ------------------------------------------------------------- other entries


def loss_of(change_of, change):
    def loss(model, batch):
        out = model[2](change_of(model[1](model[0](batch)), change))
        return out.square().sum(1) * torch.linspace(0.1, 1, B).to(batch)[: len(batch)]

    return loss


@pytest.mark.parametrize("change_of", [Changed.apply, hooked, shuffled(Changed.apply)])
@pytest.mark.parametrize("change", ["rounded", "clipped by value", "sparsified"])
def test_updates_and_sw_backward_with_clipping(change, change_of):
    x = noise(B, 4).double()
    loss = loss_of(change_of, APART[change])
    model = net()
    rows = rows_by_loop(loss(model, x), model)
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    weights = (float(norms.median()) / norms).clamp_max(1)
    sw.backward(loss(model, x), model, transforms=[sw.clip(float(norms.median()))])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensordot(weights, rows[name], 1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        loss,
        transforms=[sw.clip(float(norms.median()))],
        recheck=False,
    )
    step(x)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] - torch.tensordot(weights, rows[name], 1) / B)


def test_windows_that_are_summed_in_a_second_pass_are_refused():
    model = net()
    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        loss_of(Changed.apply, APART["rounded"]),
        samples=B,
        microbatch=B // 2,
        transforms=[sw.drop(1)],
        recheck=False,
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sw.GraphError, match=NOT_LINEAR):
        step(noise(B, 4).double())
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("change", [*APART, *TOGETHER])
def test_input_gradients(change):
    x = noise(B, 4).double().requires_grad_()
    out = Changed.apply(torch.tanh(x), {**APART, **TOGETHER}[change]).square().sum(1)
    with pytest.raises(sw.GraphError, match="the backward of Function 'Changed' is not linear"):
        sw.input_gradients(out, x)
    linear = Changed.apply(torch.tanh(x), LINEAR["doubled"]).square().sum(1)
    (expected,) = torch.autograd.grad(linear.sum(), x, retain_graph=True)
    torch.testing.assert_close(sw.input_gradients(linear, x), expected)


# ------------------------------------------------------------- algorithms that depend on the size of the gradient


def exponential(size):
    return lambda h, _: torch.linalg.matrix_exp(h.view(-1, 3, 3) * size).reshape(-1, 9)


def symmetric_exponential(h, _):
    a = h.view(-1, 3, 3)
    return torch.linalg.matrix_exp(a - a.mT).reshape(-1, 9)


EXPONENTIALS = {
    "small": exponential(0.1),
    "ordinary": exponential(1),
    "large": exponential(4),
    "shuffled": shuffled(exponential(2)),
    "orthogonal": symmetric_exponential,
    "twice": lambda h, _: exponential(0.5)(exponential(0.5)(h, None), None),
    "of a product": lambda h, _: torch.linalg.matrix_exp(h.view(-1, 3, 3) @ h.view(-1, 3, 3).mT).reshape(-1, 9),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", EXPONENTIALS)
def test_matrix_exponentials_of_activations(case, dtype):
    model = net(dtype)
    exact = {"rtol": 1e-9, "atol": 1e-10} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    for strategy in ("fused", "twice", "full", None):
        assert_as_loop(losses_of(model, EXPONENTIALS[case], None), model, strategy=strategy, **exact)


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_matrix_exponentials_with_losses_of_other_sizes(size):
    model = net()
    losses = losses_of(model, exponential(1), None) * size
    rows = rows_by_loop(losses, model)
    for name, found in sw.gradients(losses, model).full().items():
        torch.testing.assert_close(found / size, rows[name] / size, rtol=1e-7, atol=1e-8)


def test_matrix_exponentials_in_updates():
    x, model = noise(B, 4).double(), net()
    loss = loss_of(exponential(1), None)
    rows = rows_by_loop(loss(model, x), model)
    sw.backward(loss(model, x), model, transforms=[sw.clip(0.1)])
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    weights = (0.1 / norms).clamp_max(1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensordot(weights, rows[name], 1))
    inputs = x.clone().requires_grad_()
    losses = loss(model, inputs)
    (expected,) = torch.autograd.grad(losses.sum(), inputs, retain_graph=True)
    torch.testing.assert_close(sw.input_gradients(losses, inputs), expected)


def test_a_weight_that_is_a_matrix_exponential():
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4).double(), orthogonal_map="matrix_exp")
    for _ in range(2):
        assert_as_loop(layer(noise(B, 4).double()).square().sum(1) * torch.arange(B), layer)


LINALG = {
    "inverse": lambda a: torch.linalg.inv(a + 3 * torch.eye(3).to(a)),
    "solve": lambda a: torch.linalg.solve(a + 3 * torch.eye(3).to(a), a.mT),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3).to(a)),
    "eigenvalues": lambda a: torch.linalg.eigvalsh(a + a.mT)[..., None] * a,
    "singular values": lambda a: torch.linalg.svdvals(a)[..., None] * a,
    "qr": lambda a: torch.linalg.qr(a + torch.eye(3).to(a)).R,
    "log of the determinant": lambda a: torch.linalg.slogdet(a @ a.mT + torch.eye(3).to(a))[1][:, None, None] * a,
    "pseudo-inverse": torch.linalg.pinv,
    "matrix power": lambda a: torch.linalg.matrix_power(a, 3),
}


@pytest.mark.parametrize("name", LINALG)
def test_other_operations_of_linear_algebra(name):
    model = net()
    for change_of in (lambda h, f: f(h.view(-1, 3, 3)).reshape(-1, 9), None):
        change_of = change_of or shuffled(lambda h, f: f(h.view(-1, 3, 3)).reshape(-1, 9))
        assert_as_loop(losses_of(model, change_of, LINALG[name]), model, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------- random programs


def draw(number, choices):
    return list(choices)[int(torch.randint(len(choices), (), generator=number))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::samplewise.errors.SamplesMayInteractWarning")  # comes before the error
@pytest.mark.parametrize("seed", range(300))
def test_random_programs_with_changed_gradients(seed):
    """Right or refused, in the first steps and later, with changes that come and go."""
    number = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    changes = {**APART, **TOGETHER, **SCALED, **LINEAR, "none": None, "exponential": None}
    model = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)]).double()
    plan = [(draw(number, ON_ACTIVATIONS), draw(number, [*changes, "none", "none"])) for _ in model]
    strategy = draw(number, ["fused", "twice", "full"])
    for step in range(4):
        h = torch.randn(B, 9).double()
        for layer, (place, change) in zip(model, plan, strict=True):
            h = layer(h).tanh()
            if change == "exponential":
                h = exponential(1)(h, None)
            elif changes[change] is not None and (step % 2 == 0 or "hook" not in place):
                h = ON_ACTIVATIONS[place](h, changes[change])
        losses = h.square().sum(1) * torch.linspace(0.1, 1, B).double()
        weights = torch.linspace(0.05, 1, B).double()
        try:
            assert_as_loop(losses, model, strategy=strategy)
            assert_backward_as_loop(sw.gradients(losses, model, strategy=strategy), losses, model, weights)
        except (sw.GraphError, sw.SamplesInteractError):
            assert any(change in {**APART, **TOGETHER, **SCALED} for _, change in plan)
