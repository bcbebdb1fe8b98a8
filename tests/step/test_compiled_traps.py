"""What people do between two updates, and what a compiler may misread: the same numbers as uncompiled."""

from __future__ import annotations

import copy
import math
import random
import re
import sys
from collections import deque
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_compiled import (
    OPTIMIZERS,
    Pair,
    any_backend,
    compiled_updates,
    data,
    losses_of,
    net,
    no_word_of_failure,  # noqa: F401
    tiny,
)
from torch import nn

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.step.compiled import inductor

UNCOMPILED = "updates stay uncompiled: "
OTHER_ROUNDING = re.escape(f"compiled code of torch {torch.__version__} rounds to bfloat16 at other places than unco")


def going(optimizer="sgd", make=tiny, loss_fn=losses_of, **options):
    """A pair that has been going on for a while, compiled."""
    pair = Pair(make, OPTIMIZERS[optimizer], loss_fn, samples=1, **options)
    pair.run([data(6)])
    assert compiled_updates(pair.quick) == 1
    return pair


def meddled(pair, meddle, rows=20, at=8):
    """Both steps over the same rows, with something done to each after update `at`."""
    for step in pair.steps:
        torch.manual_seed(3)
        for k, _ in enumerate(step.over([data(rows, seed=7)])):
            if k == at:
                meddle(step)
    return pair


# --- batches ----------------------------------------------------------------------------------------------------------


def apart(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1)


@any_backend
def test_the_same_tensor_twice_in_the_first_batch_only():
    x, z = torch.randn(2, 12, 3, dtype=torch.float64)
    pair = Pair(lambda: nn.Linear(3, 3).double(), OPTIMIZERS["sgd"], apart, samples=1)
    pair.quick.model.load_state_dict(pair.plain.model.state_dict())
    pair.run([(x, x), (x, z)])
    pair.assert_same()


def test_a_batch_that_is_a_view_is_changed_in_place():
    pair = going()
    for step in pair.steps:
        x, y = data(5 * 12, seed=7)[0][:60].reshape(5, 60).t()[:12], data(12)[1]
        assert not x.is_contiguous()
        for k, _ in enumerate(step.over([(x, y)])):
            if k == 5:
                x.mul_(-1)
    pair.assert_same()


@any_backend
def test_data_that_is_still_to_be_negated():
    x, y = data(10)
    pair = going()
    with pytest.warns(TrainingWarning, match=UNCOMPILED + "the batch has tensors with a pending conjugation"):
        pair.run([(x, y), (torch._neg_view(x), y)])
    pair.assert_same()


@any_backend
def test_losses_that_are_a_column_of_something():
    def loss_fn(model, batch):
        h = model(batch[0]).square()
        return (h.cumsum(1) + h)[:, 1]

    pair = Pair(tiny, OPTIMIZERS["sgd"], loss_fn, samples=4)
    plain, quick = pair.run([data(24)])
    pair.assert_same()
    for a, b in zip(plain, quick, strict=True):
        torch.testing.assert_close(b.losses, a.losses, rtol=1e-10, atol=1e-10)


@any_backend
def test_losses_that_are_all_the_same_number():
    def loss_fn(model, batch):
        return model(batch[0]).square().mean().expand(len(batch[0]))

    pair = Pair(tiny, OPTIMIZERS["sgd"], loss_fn, samples=4)
    plain, quick = pair.run([data(24)])
    pair.assert_same()
    for a, b in zip(plain, quick, strict=True):
        torch.testing.assert_close(b.losses, a.losses, rtol=1e-10, atol=1e-10)


@any_backend
def test_a_number_of_the_batch_that_is_an_int_and_then_a_float():
    def loss_fn(model, batch):
        return model(batch["x"]).square().mean(1) * (2.0 if isinstance(batch["k"], float) else 1.0)

    x = torch.randn(8, 5, dtype=torch.float64)
    pair = Pair(tiny, OPTIMIZERS["sgd"], loss_fn, samples=1)
    pair.run([{"x": x, "k": 1}, {"x": x, "k": 1.0}])
    pair.assert_same()


@any_backend
def test_a_draw_for_an_update_that_is_not_finite_is_drawn_once():
    x, y = data(20)
    x[12, 0] = math.nan
    pair = Pair(lambda: net(dropout=0.5), OPTIMIZERS["sgd"], samples=1, on_nonfinite="skip")
    pair.run([(x, y)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, ids):
        return self.out(self.words(ids).mean(1))


INDICES = [(9, 0), (0, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((10**9, 0), (-1, 0), (0, -1)))]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "label"), INDICES)
def test_an_index_out_of_range_raises_as_it_does_uncompiled(word, label):
    pair = Pair(Words, OPTIMIZERS["nesterov"], losses_of, samples=1)
    ids, y = torch.randint(0, 9, (12, 2)), torch.randint(0, 3, (12,))
    ids[9, 1], y[9] = word, label
    for way in ("over", "run"):
        pair.run([(ids[:9], y[:9])], way=way)
        before = copy.deepcopy([pair.quick.model.state_dict(), pair.quick.optimizer.state_dict()])
        for step in pair.steps:
            with pytest.raises(IndexError, match="out of"):
                list(step.over([(ids[9:], y[9:])])) if way == "over" else step.run([(ids[9:], y[9:])])
        assert str(before) == str([pair.quick.model.state_dict(), pair.quick.optimizer.state_dict()])
    pair.assert_same()
    assert compiled_updates(pair.quick) == 1


# --- the optimizer ----------------------------------------------------------------------------------------------------


@any_backend
def test_a_learning_rate_that_is_a_tensor_changes_in_place():
    pair = Pair(
        tiny,
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05, dtype=torch.float64)),
        make_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        samples=1,
    )
    plain, quick = pair.run([data(12)])
    pair.assert_same()
    assert [float(update.lr) for update in quick] == [float(update.lr) for update in plain]


@pytest.mark.parametrize("way", ["over", "run"])
def test_a_schedule_that_changes_momentum_and_betas(way):
    for name in ("nesterov", "adam"):
        pair = Pair(
            tiny,
            OPTIMIZERS[name],
            make_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=40),
            samples=1,
        )
        pair.run([data(30)], way=way)
        assert compiled_updates(pair.quick) == 1
        pair.assert_same()


class Decaying(torch.optim.lr_scheduler.LRScheduler):
    """Switches weight decay on after a while."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.3 if self.last_epoch > 8 else 0.0
        return [group["lr"] for group in self.optimizer.param_groups]


@any_backend
def test_a_schedule_that_changes_the_formula():
    pair = Pair(tiny, OPTIMIZERS["sgd"], make_scheduler=Decaying, samples=1)
    pair.run([data(20)], way="run")
    pair.assert_same()


@any_backend
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_hooks_of_the_optimizer_are_called(name):
    pair, calls = going(name), {}
    meddled(
        pair,
        lambda step: step.optimizer.register_step_post_hook(
            lambda *_: calls.update({id(step): calls.get(id(step), 0) + 1})
        ),
    )
    pair.assert_same()
    assert list(calls.values()) == [11, 11]


@any_backend
def test_hooks_of_every_optimizer_are_called():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    pair, calls = going(), []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        pair.run([data(4)])
    finally:
        handle.remove()
    assert len(calls) == 8
    pair.assert_same()


@any_backend
def test_somebody_has_replaced_the_method_step():
    pair, calls = going(), []

    def replace(step):
        original = step.optimizer.step
        step.optimizer.step = lambda *args: (calls.append(1), original(*args))

    meddled(pair, replace)
    assert len(calls) == 22
    pair.assert_same()


@any_backend
def test_a_hook_of_a_parameter_that_had_one_before():
    pair = Pair(tiny, OPTIMIZERS["sgd"], samples=1)
    for step in pair.steps:
        step.model.weight.register_hook(lambda g: g).remove()
    pair.run([data(6)])
    assert compiled_updates(pair.quick) == 1
    with pytest.warns(TrainingWarning, match="parameters have hooks"):
        meddled(pair, lambda step: step.model.weight.register_hook(lambda g: g * 0.1))
    pair.assert_same()


@any_backend
def test_some_parameters_make_steps_of_their_own():
    """The optimizer counts for each parameter."""
    pair = going("adam", net)

    def train_a_layer(step):
        step.optimizer.zero_grad()
        step.model[0](data(3)[0]).square().sum().backward()
        step.optimizer.step()
        step.optimizer.zero_grad()

    meddled(pair, train_a_layer)
    pair.assert_same()


@any_backend
def test_groups_are_added_and_differ():
    pair = Pair(net, lambda p: torch.optim.Adam([*p][:2], lr=0.01), samples=1)
    pair.run([data(6)])

    def add(step):
        step.optimizer.add_param_group({"params": list(step.model[3].parameters()), "lr": 0.1, "weight_decay": 0.1})

    meddled(pair, add)
    pair.run([data(6)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@pytest.mark.sweep(1 / 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_parameters_in_bfloat16_over_many_updates(name):
    """Numbers of the formula are not rounded to it, as they are not uncompiled: 0.999 would be 1."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1], reduction="none")

    pair = Pair(lambda: tiny().bfloat16(), OPTIMIZERS[name], loss_fn, samples=1)
    pair.run([data(300)])
    assert compiled_updates(pair.quick) == 1
    for a, b in zip(pair.plain.model.parameters(), pair.quick.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.out = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.out((x * self.filter).abs())


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "amsgrad"])
def test_complex_parameters(name):
    pair = Pair(Spectral, OPTIMIZERS[name], samples=1)
    pair.run([data(30)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@pytest.mark.slow
def test_mixed_precision_rounds_as_uncompiled():
    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0].float()), batch[1], reduction="none").float()

    pair = Pair(lambda: tiny().float(), OPTIMIZERS["sgd"], loss_fn, samples=4, precision="bf16-mixed")
    if inductor.emulates_casts():
        pair.run([data(40)])
        assert compiled_updates(pair.quick) == 1
    else:
        with pytest.warns(TrainingWarning, match=UNCOMPILED + OTHER_ROUNDING):
            pair.run([data(40)])
    pair.assert_same(tolerance=1e-3)


@pytest.mark.slow
def test_torch_rounds_to_bfloat16_elsewhere(monkeypatch):
    monkeypatch.setattr(inductor, "emulates_casts", lambda: False)
    monkeypatch.setattr("samplewise.step.compiled.program_cache.agrees", lambda *_, **options: False)
    pair = Pair(lambda: tiny().float(), OPTIMIZERS["sgd"], losses_of, samples=4, precision="bf16-mixed")
    with pytest.warns(TrainingWarning, match=UNCOMPILED + OTHER_ROUNDING):
        pair.run([(data(8)[0].float(), data(8)[1])])


# --- the model and the loss function ----------------------------------------------------------------------------------


@any_backend
def test_a_layer_is_appended():
    def append(step):
        torch.manual_seed(5)
        step.model.append(nn.Linear(3, 3).double())

    pair = meddled(going(make=net), append)
    pair.assert_same()


class Scaled(nn.Module):
    """Looks for things in many places."""

    def __init__(self):
        super().__init__()
        self.layer = tiny()
        self.config = SimpleNamespace(scale=1.0, more={"shift": 0.0})
        self.factors = [1.0, torch.ones(3, dtype=torch.float64)]
        self.mask = torch.ones(3, dtype=torch.float64)
        self.register_buffer("bias", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        more = getattr(self, "more", 1.0)
        h = self.layer(x) * self.config.scale * (1 + self.config.more["shift"])
        h = h * self.factors[0] * self.factors[1] * self.mask * more + self.bias
        return h * self.power * self.table["factor"]


def scaled():
    """A model with a class of its own."""
    return type("OwnScaled", (Scaled,), {"power": 1.0, "table": {"factor": 1.0}})()


CHANGES = {
    "new attribute": lambda m: setattr(m, "more", 0.5),
    "attribute of a configuration": lambda m: setattr(m.config, "scale", 0.5),
    "entry of a dict": lambda m: m.config.more.update(shift=2.0),
    "entry of a list": lambda m: m.factors.__setitem__(0, 0.5),
    "tensor in a list": lambda m: m.factors.__setitem__(1, torch.full((3,), 0.5, dtype=torch.float64)),
    "tensor in a list, in place": lambda m: m.factors[1].mul_(0.5),
    "tensor replaced": lambda m: setattr(m, "mask", m.mask * 0.5),
    "tensor's data replaced": lambda m: setattr(m.mask, "data", m.mask * 0.5),
    "tensor in place": lambda m: m.mask.mul_(0.5),
    "buffer replaced": lambda m: m.register_buffer("bias", m.bias + 1),
    "buffer in place": lambda m: m.bias.add_(1),
    "forward": lambda m: setattr(m, "forward", lambda x: m.layer(x) * 2),
    "attribute of the class": lambda m: setattr(type(m), "power", 0.5),
    "entry of a dict of the class": lambda m: m.table.update(factor=0.5),
}


@pytest.mark.sweep(1 / 3)
@any_backend
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_model_looks_at_is_changed(change):
    pair = going(make=scaled)
    meddled(pair, lambda step: CHANGES[change](step.model))
    pair.assert_same()


@any_backend
def test_the_default_type_changes():
    def loss_fn(model, batch):
        return model(batch[0]).square().mean(1) * (1.0 if torch.get_default_dtype() is torch.float32 else 2.0)

    pair = going(loss_fn=loss_fn)
    for step in pair.steps:
        torch.set_default_dtype(torch.float32)
        for k, _ in enumerate(step.over([data(12, seed=7)])):
            torch.set_default_dtype(torch.float64 if k > 5 else torch.float32)
    pair.assert_same()


class Noting(nn.Module):
    """Keeps what it has computed, in one of many places."""

    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept = tiny(), kept

    def forward(self, x):
        h = self.layer(x)
        if isinstance(self.kept, dict):
            self.kept["h"] = h.detach()
        elif isinstance(self.kept, SimpleNamespace):
            self.kept.h = h.detach()
        else:
            self.kept.append(h.detach())
        return h


@pytest.mark.parametrize("kind", [list, dict, deque, SimpleNamespace])
def test_what_the_model_notes_down_is_no_figment(kind):
    pair = Pair(lambda: Noting(kind()), OPTIMIZERS["sgd"], samples=1)
    with pytest.warns(TrainingWarning, match=UNCOMPILED + "the model changes its own attributes"):
        pair.run([data(8)])
    pair.assert_same(tolerance=0)
    assert str(pair.plain.model.kept) == str(pair.quick.model.kept)


def test_what_the_loss_function_notes_down_is_no_figment():
    kept, calls = [], 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        losses = losses_of(model, batch)
        kept.append(losses.detach())
        return losses

    model = tiny()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, samples=1, compile=True, recheck=False)
    with pytest.warns(TrainingWarning, match=UNCOMPILED + "the model changes its own attributes"):
        updates = list(step.over([data(8)]))
    assert calls == 8
    assert torch.equal(torch.cat(kept), torch.cat([update.losses for update in updates]))


class Private(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, rng):
        super().__init__()
        self.layer, self.rng = tiny(), rng

    def forward(self, x):
        if isinstance(self.rng, torch.Generator):
            return self.layer(x) + torch.randn(3, generator=self.rng, dtype=torch.float64) * 1e-3
        return self.layer(x) * (1 + self.rng.random() * 1e-3)


def numpy_generator():
    import numpy

    return numpy.random.default_rng(0)


@pytest.mark.parametrize(
    "make",
    [lambda: random.Random(0), numpy_generator, lambda: torch.Generator().manual_seed(0)],
    ids=["python", "numpy", "torch"],
)
def test_random_numbers_of_a_private_generator(make):
    pair = Pair(lambda: Private(make()), OPTIMIZERS["sgd"], samples=1)
    reason = "(the model draws random numbers from|the graph has an object that is neither a tensor nor a number|{})"
    reason = reason.format("NotImplementedError: argument of type: <class 'torch._C.Generator'>")  # torch 2.8
    with pytest.warns(TrainingWarning, match=UNCOMPILED + reason):
        pair.run([data(8)])
    pair.assert_same(tolerance=0)


@any_backend
def test_norms_are_required_in_the_middle_of_a_batch():
    pair = going()
    for step in pair.steps:
        updates = step.over([data(10, seed=7)])
        for _ in range(3):
            update = next(updates)
        with pytest.raises(sw.errors.ParameterError, match="must be requested before the update is made"):
            print(update.norms)
        step.require(norms=True)
        assert [float(update.norms) for update in updates]
    pair.assert_same()


@pytest.mark.sweep(1 / 2)
@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_a_batch_of_images_in_another_layout(samples):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten()).double()

    def loss_fn(model, batch):
        return model(batch[0].relu()).square().mean(1)

    x = torch.randn(8, 3, 6, 5, dtype=torch.float64)
    pair = Pair(model, OPTIMIZERS["sgd"], loss_fn, samples=samples)
    pair.run([(x.contiguous(memory_format=torch.channels_last),), (x,), (x.transpose(2, 3).contiguous().mT,)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@any_backend
def test_gradients_are_switched_off():
    pair = going()
    for step in pair.steps:
        with pytest.raises(sw.SamplewiseError), torch.no_grad():
            list(step.over([data(4)]))
    pair.assert_same()


@any_backend
def test_a_step_can_be_copied():
    step = going("adam").quick
    twin = copy.deepcopy(step)
    for one in (step, twin):
        list(one.over([data(5, seed=9)]))
    for a, b in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


# --- looked up elsewhere ----------------------------------------------------------------------------------------------

SHIFT = 0.0


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = tiny()

    def shifted(self, x):
        return x + SHIFT

    def forward(self, x):
        return self.shifted(self.layer(x))


@any_backend
def test_a_global_of_a_method_and_a_variable_of_another_module(monkeypatch):
    settings = ModuleType("settings")
    settings.scale = 1.0

    def scaled(model, batch):
        return settings.scale * losses_of(model, batch)

    pair = Pair(Shifted, OPTIMIZERS["sgd"], scaled, samples=1)
    for step in pair.steps:
        settings.scale = 1.0
        monkeypatch.setitem(globals(), "SHIFT", 0.0)
        for k, _ in enumerate(step.over([data(20)])):
            if k == 5:
                monkeypatch.setitem(globals(), "SHIFT", torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64))
            if k == 10:
                settings.scale = 0.3
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@any_backend
def test_code_that_could_not_be_tried_is_tried_later():
    x, y = data(30)
    x[1:4] = math.nan
    pair = Pair(tiny, OPTIMIZERS["sgd"], samples=1, on_nonfinite="skip")
    pair.run([(x[k : k + 1], y[k : k + 1]) for k in range(30)])
    (program,) = pair.quick._runner.cache.programs.values()
    assert program.verified
    pair.assert_same()


@any_backend
def test_modules_that_are_imported_meanwhile_stay():
    def loss_fn(model, batch):
        assert "torch" in sys.modules
        return losses_of(model, batch)

    pair = going(loss_fn=loss_fn)
    meddled(pair, lambda step: sys.modules.update(meddling=ModuleType("meddling")))
    assert sys.modules.pop("meddling")
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@any_backend
def test_columns_where_a_loss_is_of_several_rows():
    def of_pairs(model, batch):
        return losses_of(model, batch).reshape(-1, 2).sum(1)

    pair = Pair(tiny, OPTIMIZERS["sgd"], of_pairs)
    for step in pair.steps:
        step.require(columns={"label": 1})
    plain, quick = pair.run([data(6, seed=k) for k in range(3)])
    assert compiled_updates(pair.quick) == 1
    for a, b in zip(plain, quick, strict=True):
        assert torch.equal(a.columns["label"], b.columns["label"])
