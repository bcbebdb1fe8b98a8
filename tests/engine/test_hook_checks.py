"""Hooks that are verified at their nodes: called as in an ordinary pass if they read, right or refused if they act."""

import random

import pytest
import torch
from by_loop import assert_as_loop, count_passes, rows_by_loop
from nonlinear_hooks import (
    ACCURACY,
    LINEAR,
    MODELS,
    STRATEGIES,
    changes,
    hooked,
    largest_error,
    with_posthook,
    with_prehook,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import samplewise as sw
from samplewise.engine import strategies
from samplewise.engine.ownership import verify
from samplewise.engine.strategies import jacobian_rows

B, D = 6, 5
WARM = 3  # steps after which hooks are verified at their nodes


def net():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(D, D) for name in ("first", "second", "last")}).double()


def losses_of(model, place, step=0):
    """`place` registers hooks on h, which is used twice; `h + other` hands one gradient tensor to both."""
    x = torch.randn(B, D, generator=torch.Generator().manual_seed(step)).double()
    other = model["first"](x).sin()
    h = model["second"](x).tanh()
    h = place(h)
    out = model["last"](h + other)
    return (out.square().sum(1) + h.cos().sum(1)) * torch.linspace(0.5, 1.5, B).double()


def warm(model, place):
    for step in range(WARM):
        assert_as_loop(losses_of(model, place, step), model)


def assert_right_or_refused(make_losses, model):
    """Of a sum and of rows; a hook may do something else in each call, so each has a graph and hooks of its own."""
    try:
        rows = sw.gradients(make_losses(), model).full()
    except (sw.GraphError, sw.SamplesInteractError):
        return "refused"
    for name, expected in rows_by_loop(make_losses(), model).items():
        torch.testing.assert_close(rows[name], expected, rtol=1e-9, atol=1e-12)
    return "right"


# ------------------------------------------------------------------------------------------- hooks that read


class Record(list):
    """Hook that stores the gradients that it gets."""

    def __call__(self, gradient):
        self.append(gradient.clone())

    def before_node(self, gradients):
        self(gradients[0])

    def of_module(self, module, inputs, outputs):
        self(outputs[0])


class Identity(nn.Module):
    def forward(self, h):
        return h * 1.0


def place_of(kind, record):
    module = Identity()
    if kind == "module":
        module.register_full_backward_hook(record.of_module)

    def place(h):
        h = module(h)
        if kind == "tensor":
            h.register_hook(record)
        if kind == "node":
            h.grad_fn.register_prehook(record.before_node)
        return h

    return place


@pytest.mark.parametrize("kind", ["tensor", "node", "module"])
def test_a_hook_that_reads_is_called_as_in_an_ordinary_pass(kind, monkeypatch):
    model = net()
    record = Record()
    place = place_of(kind, record)
    warm(model, place)
    passes = count_passes(monkeypatch)
    for step in range(10, 14):
        record.clear()
        losses_of(model, place, step).sum().backward()
        (expected,) = record
        record.clear()
        losses = losses_of(model, place, step)
        passes.clear()
        g = sw.gradients(losses, model)
        g.norms()
        g.backward()
        assert len(passes) == 1
        (gradient,) = record
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_retained_gradients_are_not_changed_by_the_search_for_hooks():
    model = net()
    for step in range(3):
        kept = []

        def place(h, kept=kept):
            h.retain_grad()
            kept.append(h)
            return h

        losses = losses_of(model, place, step)
        nn.Linear(1, 1).register_forward_hook(lambda *_: None)
        (expected,) = torch.autograd.grad(losses.sum(), kept[0], retain_graph=True)
        kept[0].grad = None
        sw.gradients(losses, model).norms()
        if step:  # the first one is verified by more passes
            torch.testing.assert_close(kept[0].grad, expected)


def test_hooks_that_appear_at_another_place_are_verified_by_single_samples(monkeypatch):
    model = net()
    warm(model, place_of("tensor", Record()))
    passes = count_passes(monkeypatch)
    for step in range(2):
        losses = losses_of(model, lambda h: hooked(h * 1.0, lambda g: None) + hooked(h.sin(), lambda g: None), step)
        sw.gradients(losses, model).norms()
        if step == 0:
            assert len(passes) > B
    passes.clear()
    losses = losses_of(model, lambda h: hooked(h * 1.0, lambda g: None) + hooked(h.sin(), lambda g: None), 2)
    sw.gradients(losses, model).norms()
    assert len(passes) == 1


# ------------------------------------------------------------------------------------- hooks that begin to act


def in_place(change):
    def hook(g):
        g.copy_(change(g))

    return hook


def in_place_of_data(change):
    def hook(g):
        g.data.copy_(change(g.data))

    return hook


def in_place_with_a_clean_result(change):
    """The other operand of a sum has the same gradient tensor."""

    def hook(g):
        clean = g.clone()
        g.data.copy_(change(g.data))
        return clean

    return hook


def later_in_place(change):
    """A gradient is changed by another hook before the other operand of a sum, which has the same tensor, uses it."""

    def place(h):
        kept = []
        other = h * 1.0
        low = h * 2.0
        top = low.sin()

        def change_kept(g):
            if kept and kept[-1].stride(0):  # not the zeros of a search
                kept[-1].data.copy_(change(kept[-1].data))

        low.register_hook(change_kept)
        top.register_hook(lambda g: kept.append(g))
        return top + other

    return place


def registering(change):
    """A hook that only registers another one, on a tensor whose gradient comes later in the same pass."""

    def place(h):
        below = h * 1.0
        above = below.sin()
        above.register_hook(lambda g: below.register_hook(change) and None)
        return above

    return place


def remembering(change):
    """One hook stores its gradient, another one uses it."""

    def place(h):
        store = []
        low = h * 1.0
        top = low.sin()
        top.register_hook(lambda g: store.append(g.clone()))
        low.register_hook(lambda g: g + change(store[-1]))
        return top

    return place


def on_tensor(hook_of):
    return lambda change: lambda h: hooked(h * 1.0, hook_of(change))


ACTING = {
    "returned": on_tensor(lambda change: change),
    "in place": on_tensor(in_place),
    "in place of data": on_tensor(in_place_of_data),
    "in place, with a clean result": lambda change: lambda h: hooked(h, in_place_with_a_clean_result(change)),
    "in place, later": later_in_place,
    "by a hook that a hook registers": registering,
    "with what another hook has stored": remembering,
    "on one of two uses": lambda change: lambda h: hooked(h * 1.0, change) + h.sin(),
    "on an operand of the losses": lambda change: lambda h: h + 0 * hooked(h.sum(1), change)[:, None],
    "on one part of a split": lambda change: lambda h: torch.cat([hooked(part, change) for part in h.split(3, 1)], 1),
}
CHANGES = {
    "minus the mean": lambda g: g - g.mean(0),
    "rolled": lambda g: g.roll(1, 0),
    "rounded": lambda g: (g * 10).round() / 10,
    "largest of the batch": lambda g: g * (g.abs() > 0.3 * g.abs().max()),
    "shifted": lambda g: g + 1e-3,
    "two samples": lambda g: g + 1e-6 * g[[1, 0, *range(2, len(g))]],
}
HARMLESS = {"doubled": lambda g: 2 * g, "unchanged": lambda g: g * 1.0}


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ACTING)
def test_hooks_that_begin_to_mix_samples(way, change, cold):
    model = net()
    acts = []

    def switched(g):
        return CHANGES[change](g) if acts else g * 1.0

    place = ACTING[way](switched)
    if not cold:
        for step in range(WARM):
            assert_right_or_refused(lambda step=step: losses_of(model, place, step), model)
    acts.append(True)
    for step in range(20, 23):
        assert_right_or_refused(lambda step=step: losses_of(model, place, step), model)
    if way != "by a hook that a hook registers":
        acts.clear()
        assert_right_or_refused(lambda: losses_of(model, place, 30), model)


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize(
    "way", ["returned", "in place", "in place of data", "on one of two uses", "on one part of a split"]
)
def test_linear_hooks_are_part_of_the_gradient(way, change):
    model = net()
    for step in range(6):
        assert_as_loop(losses_of(model, ACTING[way](HARMLESS[change]), step), model)
        assert_as_loop(losses_of(model, ACTING[way](HARMLESS[change]), step), model, create_graph=True)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_act_in_some_calls_only(change, number):
    """Rows are those of the loop without the hook, or refused."""
    model = net()
    calls = []

    def hook(g):
        calls.append(g)
        return CHANGES[change](g) if len(calls) % number == 0 and len(calls) > 5 * B else None

    for step in range(40):
        try:
            rows = sw.gradients(losses_of(model, lambda h: hooked(h, hook), step), model).full()
        except (sw.GraphError, sw.SamplesInteractError):
            continue
        expected = rows_by_loop(losses_of(model, lambda h: h, step), model)
        for name in rows:
            torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-12)
    assert len(calls) > 6 * B


def vanishing(g):
    """Small gradients are set to zero, all others are left as they are."""
    return g if g.norm() > 1.5 else torch.zeros_like(g)


def test_a_hook_that_changes_gradients_of_single_samples_only(monkeypatch):
    """Noticed when hooks are first verified, and always if another pass with weights follows."""
    monkeypatch.setattr(verify, "_records", {})
    model = net()
    with pytest.raises(sw.GraphError, match="is not linear"):
        sw.gradients(losses_of(model, lambda h: hooked(h, vanishing)), model).norms()
    warm(model, lambda h: hooked(h, lambda g: g))
    with pytest.raises(sw.GraphError, match="is not linear"):
        sw.gradients(losses_of(model, lambda h: hooked(h, vanishing)), model, strategy="twice").norms()


@pytest.mark.parametrize("change", ["rounded", "shifted"])
def test_a_weighted_sum_in_an_ordinary_pass_after_linear_hooks(change):
    model = net()
    warm(model, lambda h: hooked(h, HARMLESS["doubled"]))
    g = sw.gradients(losses_of(model, lambda h: hooked(h, CHANGES[change])), model, strategy="twice")
    with pytest.raises(sw.GraphError, match="is not linear"):
        g.backward(torch.linspace(0.01, 1, B).double())
    assert all(p.grad is None for p in model.parameters())


# --------------------------------------------------------------------------------------------- hooks of modules


class Pair(nn.Module):
    """Two inputs, of which one needs no gradient, and three outputs, of which one is not used."""

    def forward(self, h, constant):
        return h.sin() + constant, h.cos(), h * 3


MODULE_HOOKS = {
    "reads": lambda module, inputs, outputs: None,
    "doubles": lambda module, inputs, outputs: tuple(None if g is None else 2 * g for g in inputs),
    "adds an output": lambda module, inputs, outputs: (inputs[0] + outputs[1], *inputs[1:]),
    "norm of an output": lambda module, inputs, outputs: (inputs[0] * outputs[1].norm(), *inputs[1:]),
    "mean of an output": lambda module, inputs, outputs: (inputs[0] + outputs[0].mean(0), *inputs[1:]),
}


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("name", MODULE_HOOKS)
def test_full_backward_hooks_of_a_module_with_several_inputs_and_outputs(name, unused, monkeypatch):
    model = net()
    module = Pair()
    acts = []

    def hook(module, inputs, outputs):
        return MODULE_HOOKS[name](module, inputs, outputs) if acts else None

    module.register_full_backward_hook(hook)

    def place(h):
        a, b, c = module(h * 1.0, torch.ones(D).double())
        return a + b if unused else a + b + c

    warm(model, place)
    acts.append(True)
    for step in range(20, 23):
        outcome = assert_right_or_refused(lambda step=step: losses_of(model, place, step), model)
        assert outcome == "right" or name in ("norm of an output", "mean of an output")
    if name in ("reads", "doubles", "adds an output") and not unused:
        passes = count_passes(monkeypatch)
        losses = losses_of(model, place, 40)
        passes.clear()
        sw.gradients(losses, model).norms()
        assert len(passes) == 1


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_full_backward_pre_hooks(change):
    model = net()
    module = Identity()
    acts = []
    module.register_full_backward_pre_hook(
        lambda module, outputs: (CHANGES[change](outputs[0]),) if acts and change else None
    )
    warm(model, module)
    acts.append(True)
    for step in range(20, 22):
        outcome = assert_right_or_refused(lambda step=step: losses_of(model, module, step), model)
        assert outcome == "right" or change is not None


@pytest.mark.parametrize("kind", ["tensor", "module"])
@pytest.mark.parametrize("change", [None, "doubled", "rolled"])
def test_hooks_on_the_losses(change, kind):
    model = net()
    acts = []
    hook = {**CHANGES, **HARMLESS}.get(change)
    whole = Identity()
    if kind == "module":
        whole.register_full_backward_hook(lambda m, inputs, outputs: (hook(inputs[0]),) if acts and hook else None)

    def losses(step):
        values = whole(losses_of(model, lambda h: h, step))
        if kind == "tensor":
            values.register_hook(lambda g: hook(g) if acts and hook else None)
        return values

    for step in range(WARM):
        assert_as_loop(losses(step), model)
    acts.append(True)
    for step in range(20, 22):
        assert_right_or_refused(lambda step=step: losses(step), model)


# ------------------------------------------------------------------------------------------------------- modes


class Rolling(FlopCounterMode):
    """Subclass whose operations return something else."""

    def _count_flops(self, func_packet, out, args, kwargs):
        out = super()._count_flops(func_packet, out, args, kwargs)
        return out.roll(1, 0) if func_packet is torch.ops.aten.mm and self.rolls else out

    rolls = False


def test_flop_counters_that_change_results():
    model = net()
    for step in range(WARM):
        with Rolling(display=False):
            assert_as_loop(losses_of(model, lambda h: h, step), model)
    for step in range(20, 22):
        losses = losses_of(model, lambda h: h, step)
        expected = rows_by_loop(losses, model)
        mode = Rolling(display=False)
        mode.rolls = True
        with mode, pytest.raises((sw.GraphError, sw.SamplesInteractError)):
            sw.gradients(losses, model).norms()
        for name, rows in sw.gradients(losses, model).full().items():
            torch.testing.assert_close(rows, expected[name])


def test_a_flop_counter_costs_no_further_pass(monkeypatch):
    model = net()
    for step in range(WARM):
        with FlopCounterMode(display=False):
            assert_as_loop(losses_of(model, lambda h: h, step), model)
    weighted = []
    monkeypatch.setattr(strategies, "follows_weights", lambda *arguments: weighted.append(arguments))
    with FlopCounterMode(display=False) as counter:
        sw.gradients(losses_of(model, lambda h: h, 5), model).norms()
    assert not weighted
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_mix_samples_next_to_a_flop_counter(change):
    model = net()
    acts = []

    def place(h):
        return hooked(h * 1.0, lambda g: CHANGES[change](g) if acts else None)

    for step in range(WARM + 2):
        acts[:] = [True] * (step >= WARM)
        with FlopCounterMode(display=False):
            assert_right_or_refused(lambda step=step: losses_of(model, place, step), model)


# ---------------------------------------------------------------------------------------------- random programs

PLACES = (hooked, with_prehook, with_posthook)
SEEDS = 400
MANY = 20  # cases of one test


def outcome(seed):
    """(description, whether the change is linear, results of steps in which a hook begins to change gradients)"""
    r = random.Random(seed)
    known = changes(size=10 ** r.uniform(-1, 0), part=r.randint(2, 5), levels=r.choice([3, 15, 127]))
    name = r.choice(list(known))
    place = r.choice(PLACES)
    build = r.choice(MODELS)
    strategy = r.choice(STRATEGIES)
    calm = r.choice([lambda g: g, lambda g: 2 * g, lambda g: g * 1.0])
    samples = r.choice([2, 3, 6, 16, 60])
    dtype = r.choice([torch.float64, torch.float32])
    acts = []
    model, shape, program = build(lambda x: place(x, lambda g: known[name](g) if acts else calm(g)))
    torch.manual_seed(seed)
    model = model.to(dtype)
    weights = torch.rand(samples, dtype=dtype)
    results = []
    for step in range(5):
        acts[:] = [True] * (step >= 3)
        x = torch.randn(samples, *shape, dtype=dtype)
        sizes = torch.linspace(0.1, 1, samples, dtype=dtype)
        expected = jacobian_rows(program(model, x) * sizes, dict(model.named_parameters()))
        try:
            error = largest_error(sw.gradients(program(model, x) * sizes, model, strategy=strategy), weights, expected)
            results.append("right" if error <= ACCURACY[dtype] else f"wrong by {error:.0e}")
        except (sw.GraphError, sw.SamplesInteractError):
            results.append("refused")
    return (
        f"{seed}: {build.__name__}, {place.__name__}, {name}, {samples}, {dtype}, {strategy}",
        name in LINEAR,
        results,
    )


@pytest.mark.sweep(1 / 10)
@pytest.mark.parametrize("first", range(0, SEEDS, MANY))
def test_random_hooks_that_begin_to_change_gradients(first):
    for seed in range(first, first + MANY):
        description, is_linear, results = outcome(seed)
        assert results[:3] == ["right"] * 3, (description, results)
        assert set(results[3:]) <= ({"right"} if is_linear else {"right", "refused"}), (description, results)
