"""Compiled updates against the same step uncompiled, in float64."""

from __future__ import annotations

import copy
import math
import os
import random
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.step.compiled import program_cache, runner

UPDATES = 500


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3)).double()


def data(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 5, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (rows,), generator=generator),
    )


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Pair:
    """The same training twice: `plain`, and `quick`, which must be compiled."""

    def __init__(self, make_model, make_optimizer, loss_fn=losses_of, make_scheduler=None, **options):
        self.steps = []
        for compile in (False, True):
            model = make_model()
            optimizer = make_optimizer(model.parameters())
            scheduler = None if make_scheduler is None else make_scheduler(optimizer)
            self.steps.append(
                sw.Step(model, optimizer, loss_fn, scheduler=scheduler, compile=compile, recheck=False, **options)
            )
        self.plain, self.quick = self.steps

    def run(self, loader, way="over"):
        found = []
        for step in self.steps:
            torch.manual_seed(3)
            random.seed(3)
            found.append(list(step.over(loader)) if way == "over" else step.run(loader))
        return found

    def assert_same(self, tolerance: float = 1e-10):
        for a, b in zip(
            [*self.plain.model.parameters(), *self.plain.model.buffers()],
            [*self.quick.model.parameters(), *self.quick.model.buffers()],
            strict=True,
        ):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
        states = [step.optimizer.state_dict().get("state", {}) for step in self.steps]
        for mine, other in zip(states[0].values(), states[1].values(), strict=True):
            for key in mine:
                torch.testing.assert_close(other[key], mine[key], rtol=tolerance, atol=tolerance)
        assert self.plain.counters == self.quick.counters


def compiled_updates(step: sw.Step) -> int:
    """How many programs there are; at least one, if anything was compiled."""
    return sum(program is not None for program in step._runner.cache.programs.values())


@pytest.fixture(autouse=True)
def no_word_of_failure():
    """A step that gave up says so, which is an error here unless it is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


any_backend = pytest.mark.usefixtures("backend")


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, dampening=0.1, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.003, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003),
    "rule": lambda p: sw.sgd(0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, alpha=0.9, eps=1e-6, weight_decay=0.01),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True, momentum=0.9, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),  # without a formula
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_parameters_and_state_after_500_updates(name):
    pair = Pair(net, OPTIMIZERS[name], samples=1)
    plain, quick = pair.run([data(UPDATES)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()
    for a, b in zip(plain[::50], quick[::50], strict=True):
        assert (a.index, a.samples, a.lr) == (b.index, b.samples, b.lr)
        torch.testing.assert_close(b.losses, a.losses, rtol=1e-9, atol=1e-9)
        assert math.isclose(b.loss, a.loss, rel_tol=1e-9)
        assert math.isclose(b.grad_norm, a.grad_norm, rel_tol=1e-8)


@pytest.mark.sweep(2 / 5)
@any_backend
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name):
    pair = Pair(net, OPTIMIZERS[name], samples=1)
    pair.run([data(25)])
    (program,) = pair.quick._runner.cache.programs.values()
    assert (program.update.buckets is None) == (name == "adagrad")
    pair.assert_same()


@any_backend
def test_schedule_and_dropout_draw_as_uncompiled():
    pair = Pair(
        lambda: net(dropout=0.2),
        lambda p: torch.optim.Adam(p, lr=0.01),
        make_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100),
        samples=1,
    )
    plain, quick = pair.run([data(100)])
    pair.assert_same()
    assert [u.lr for u in plain] == [u.lr for u in quick]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(
    "transforms",
    [
        pytest.param(lambda: [sw.clip(0.5)], id="clip"),
        pytest.param(lambda: [lambda losses: torch.exp(-losses), sw.normalize()], id="weight and normalize"),
        pytest.param(lambda: [sw.clip(0.3, by="parameter")], id="by parameter"),
    ],
)
@any_backend
def test_transforms_and_norms(transforms):
    pair = Pair(
        net,
        lambda p: torch.optim.Adam(p, lr=0.01),
        samples=8,
        transforms=transforms(),
        record={"norms"},
        max_grad_norm=0.2,
    )
    plain, quick = pair.run([data(8)] * 30 + [data(8 * 20)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()
    torch.testing.assert_close(quick[-1].norms, plain[-1].norms, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(quick[-1].weights, plain[-1].weights, rtol=1e-9, atol=1e-9)
    assert math.isclose(quick[-1].grad_norm, plain[-1].grad_norm, rel_tol=1e-9)


@any_backend
def test_counts_and_tokens():
    def loss_fn(model, batch):
        x, y = batch
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none", ignore_index=-1)
        return each.sum(1), (y >= 0).sum(1).double()

    def batches():
        x, y = torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(0, 3, (6, 4))
        y[0, 1:] = -1
        y[3, :2] = -1
        return [(x, y)] * 20

    torch.manual_seed(5)
    loader = batches()
    pair = Pair(net, OPTIMIZERS["adamw"], loss_fn)
    plain, quick = pair.run(loader)
    pair.assert_same()
    assert math.isclose(plain[-1].loss, quick[-1].loss, rel_tol=1e-10)


@any_backend
def test_batch_norm_advances_its_buffers_and_inplace_layers_work():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True)).double()

    pair = Pair(model, OPTIMIZERS["nesterov"], samples=4)
    pair.run([data(40)])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


@any_backend
def test_batches_of_any_structure():
    def loss_fn(model, batch):
        return F.mse_loss(model(batch["x"]) * batch["scale"], batch["y"], reduction="none").mean(1)

    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    pair = Pair(net, OPTIMIZERS["sgd"], loss_fn, samples=1)
    pair.run([{"x": x, "y": y, "scale": torch.tensor(2.0, dtype=torch.float64), "kind": "train"}])
    assert compiled_updates(pair.quick) == 1
    pair.assert_same()


# --- run --------------------------------------------------------------------------------------------------------------


def tiny():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


# Scalars that depend on the step count, or not. The next test uses nesterov, too.
@pytest.mark.parametrize("name", ["adam", pytest.param("nesterov", marks=pytest.mark.slow)])
def test_run_makes_many_updates_at_once(name):
    pair = Pair(tiny, OPTIMIZERS[name], samples=1)
    plain, quick = pair.run([data(70), data(3), data(41)], way="run")
    (program,) = pair.quick._runner.cache.programs.values()
    assert program.can_make_many
    pair.assert_same()
    assert (plain.updates, plain.samples) == (quick.updates, quick.samples) == (114, 114)
    assert math.isclose(plain.loss, quick.loss, rel_tol=1e-10)
    for step in pair.steps:
        step.optimizer.param_groups[0]["lr"] = 0.001
    pair.run([data(5, seed=2)])
    pair.run([data(runner.CHUNK + 9, seed=3)], way="run")
    pair.assert_same()


def test_many_updates_stop_at_what_is_not_finite():
    x, y = data(60)
    x[37, 2] = math.nan
    x[38, 2] = math.nan
    pair = Pair(tiny, OPTIMIZERS["nesterov"], samples=1, transforms=[sw.clip(0.5)], on_nonfinite="skip")
    plain, quick = pair.run([(x, y)], way="run")
    pair.assert_same()
    assert (quick.updates, quick.skipped) == (plain.updates, plain.skipped) == (58, 2)


# --- what the user may do in between ----------------------------------------------------------------------------------


@pytest.fixture
def going(backend):
    """A pair that has been going on for a while, compiled."""
    pair = Pair(net, OPTIMIZERS["nesterov"], samples=1)
    pair.run([data(10)])
    return pair


def test_parameters_are_changed_in_place_and_replaced(going):
    for step in going.steps:
        for k, _ in enumerate(step.over([data(20, seed=7)])):
            if k == 5:
                step.model[0].weight.data.mul_(0.5)
            if k == 10:
                step.model[0].weight.data = step.model[0].weight.data * 2
            if k == 15:
                step.model.load_state_dict({name: t * 1.1 for name, t in step.model.state_dict().items()})
    going.assert_same()


def test_hyperparameters_take_effect_without_compiling_again(going):
    programs = dict(going.quick._runner.cache.programs)
    for step in going.steps:
        for k, _ in enumerate(step.over([data(20, seed=7)])):
            if k == 5:
                step.optimizer.param_groups[0]["lr"] = 0.5
            if k == 8:
                step.optimizer.param_groups[0]["momentum"] = 0.3
    going.assert_same()
    assert going.quick._runner.cache.programs == programs


def test_a_setting_that_is_part_of_the_code_compiles_again(going):
    before = list(going.quick._runner.cache.programs.values())
    for step in going.steps:
        for k, _ in enumerate(step.over([data(20, seed=7)])):
            if k == 5:
                step.optimizer.param_groups[0]["weight_decay"] = 0.0
    going.assert_same()
    assert list(going.quick._runner.cache.programs.values()) != before


def test_settings_of_the_step_take_effect_at_the_next_update(going):
    before = list(going.quick._runner.cache.programs.values())
    for step in going.steps:
        sizes = []
        for update in step.over([data(40, seed=7)]):
            sizes.append(update.samples)
            if len(sizes) == 5:
                step.transforms = [sw.clip(0.3)]
            if len(sizes) == 10:
                step.transforms = [sw.weight(lambda losses: losses / 3)]
            if len(sizes) == 15:
                step.max_grad_norm = 0.05
            if len(sizes) == 20:
                step.samples = 4
        assert sizes == [1] * 20 + [4] * 5
    going.assert_same()
    assert list(going.quick._runner.cache.programs.values()) != before
    assert going.quick.compiled == "compiled"


def test_settings_that_change_before_an_update_is_compiled_and_back():
    pair = Pair(tiny, OPTIMIZERS["adam"], samples=1)
    for step in pair.steps:
        for k, _ in enumerate(step.over([data(12)])):
            if k == 0:
                step.max_grad_norm = 0.05
            if k in (1, 2):
                step.max_grad_norm = None
    pair.assert_same()
    assert pair.quick.compiled == "compiled"


def test_the_first_update_of_new_transforms_is_checked():
    step = Pair(tiny, OPTIMIZERS["adam"], samples=1).quick
    updates = step.over([data(12)])
    next(updates)
    step.transforms = [sw.weight(lambda losses: losses * 0)]
    with pytest.raises(sw.TransformError, match="must have a nonzero weight"):
        next(updates)


def test_a_layer_is_frozen_and_another_replaced(going):
    for step in going.steps:
        for k, _ in enumerate(step.over([data(30, seed=7)])):
            if k == 5:
                step.model[3].weight.requires_grad_(False)
            if k == 10:
                step.model[3].weight.requires_grad_(True)
            if k == 15:
                step.model[1] = nn.Sigmoid()
    going.assert_same()


def test_the_optimizer_state_is_loaded(going):
    for step in going.steps:
        kept = copy.deepcopy(step.optimizer.state_dict())
        for k, _ in enumerate(step.over([data(20, seed=7)])):
            if k == 8:
                step.optimizer.load_state_dict(kept)
    going.assert_same()


@any_backend
def test_a_number_in_the_loss_function_changes():
    scale = 1.0

    def loss_fn(model, batch):
        return scale * losses_of(model, batch)

    found = []
    for compile in (False, True):
        model, scale = net(), 1.0
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, samples=1, compile=compile)
        for k, _ in enumerate(step.over([data(20)])):
            scale = 0.1 if k > 10 else 1.0
        found.append(model)
    for a, b in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_hooks_are_called(going):
    seen = []
    going.quick.model[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(TrainingWarning, match="updates stay uncompiled: modules have hooks"):
        list(going.quick.over([data(4)]))
    assert len(seen) == 4


def test_breaking_out_leaves_the_rest_for_the_next_call(going):
    for step in going.steps:
        for k, _ in enumerate(step.over([data(10, seed=8)])):
            if k == 3:
                break
        assert len(list(step.over([data(5, seed=9)]))) == 11
    going.assert_same()


# --- state ------------------------------------------------------------------------------------------------------------


@any_backend
def test_save_in_the_middle_and_resume_compiled_bit_for_bit_or_uncompiled():
    def run(first, second, compile_later=True):
        model = net(dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = sw.Step(model, optimizer, losses_of, samples=1, compile=True)
        torch.manual_seed(0)
        list(step.over([first]))
        if second is None:
            return model
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), step.state_dict(), torch.get_rng_state()])
        again = net(dropout=0.2)
        optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
        step = sw.Step(again, optimizer, losses_of, samples=1, compile=compile_later, recheck=False)
        again.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        step.load_state_dict(state[2])
        torch.set_rng_state(state[3])
        list(step.over([second]))
        return again

    x, y = data(60)
    whole = run((x, y), None)
    resumed = run((x[:25], y[:25]), (x[25:], y[25:]))
    eager = run((x[:25], y[:25]), (x[25:], y[25:]), compile_later=False)
    for a, b, c in zip(whole.parameters(), resumed.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a, rtol=1e-9, atol=1e-9)


def test_nothing_is_compiled_by_default(monkeypatch):
    monkeypatch.setattr(runner, "AUTO_AFTER", 5)
    model = net()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of, samples=1)
    step.run([data(20)])
    assert step.compiled == "compile=False"
    assert all(p.grad is not None for p in model.parameters())


@any_backend
def test_auto_compiles_updates_of_one_sample_after_a_while(monkeypatch):
    monkeypatch.setattr(runner, "AUTO_AFTER", 5)
    for samples, expected in ((1, 1), (2, 0)):
        model = net()
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of, samples=samples, compile="auto")
        for k, _ in enumerate(step.over([data(20)])):
            assert k > 3 or not step._runner.cache.programs
        assert compiled_updates(step) == expected


# --- what cannot be compiled ------------------------------------------------------------------------------------------


@any_backend
def test_shapes_are_compiled_up_to_a_small_number(monkeypatch):
    monkeypatch.setattr(program_cache, "SHAPES", 2)

    def loss_fn(model, batch):
        return (model(batch[0]) ** 2).mean((1, 2))

    loader = [(torch.randn(3, length, 5, dtype=torch.float64),) for length in (2, 3, 2, 6, 7, 3)]
    pair = Pair(tiny, OPTIMIZERS["sgd"], loss_fn, samples=1)
    with pytest.warns(TrainingWarning, match="at most 2 sample shapes are compiled; found another") as caught:
        pair.run(loader)
    assert len(caught) == 1
    assert compiled_updates(pair.quick) == 2
    pair.assert_same()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = tiny()

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Counting(Branching):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Replacing(Branching):
    """Replaces a buffer instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x)


class Drawing(Branching):
    def forward(self, x):
        return self.layer(x) * (1 + random.random())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Branching, "reads the value of a tensor"),
        (Counting, "the model changes its own attributes in the forward pass"),
        (Replacing, "the model replaces a buffer in the forward pass"),
        (Drawing, "the model draws random numbers from Python or NumPy"),
        (lambda: Recurrent(), "recurrent layers are no faster compiled"),
    ],
)
def test_what_cannot_be_compiled_goes_on_as_it_is(kind, reason):
    def model():
        torch.manual_seed(0)
        random.seed(0)
        return kind()

    pair = Pair(model, OPTIMIZERS["nesterov"], samples=1)
    with pytest.warns(TrainingWarning, match=rf"updates stay uncompiled: .*{reason}.*Training continues") as caught:
        pair.run([data(12)])
    assert len(caught) == 1
    pair.assert_same(tolerance=0)
    if kind in (Counting, Replacing):
        assert pair.quick.model.calls == pair.plain.model.calls


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(5, 3).double()

    def forward(self, x):
        return self.layer(x[None])[0][0]


@pytest.mark.slow
def test_without_a_compiler_it_goes_on(tmp_path):
    script = """
import torch, warnings, samplewise as sw
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = sw.Step(model, optimizer, lambda m, x: m(x).square().mean(1), samples=1, compile=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(len(list(step.over([torch.randn(5, 3)]))))
print(*(w.message for w in caught))
"""
    nothing = tmp_path / "bin"
    nothing.mkdir()
    environment = {**os.environ, "PATH": str(nothing), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "", "CC": ""}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    count, said = found.stdout.strip().splitlines()
    assert count == "5"
    assert said.startswith("updates stay uncompiled: ")
    assert said.endswith("Training continues; uncompiled updates give the same results, without the speedup.")


def test_the_first_model_of_a_process_has_pooling():
    """Torch imports its compiler for the first convolution, and expects it in the decomposition of pooling. In its
    first call of an optimizer, torch calls functions of `typing`, which typing_extensions replaces.
    """
    script = (
        "import torch, samplewise as sw\n"
        "from torch import nn\n"
        "from samplewise.step.compiled import inductor, program_cache\n"
        "inductor.compile_graph = lambda graph, inputs, threads: lambda flat: graph(*flat)\n"
        "program_cache.refuse_slower = lambda *_: None\n"
        "model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, compile=True)\n"
        "step((torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])))\n"
        "print(len(step._runner.cache.programs), step._runner.cache.gave_up, step.compiled)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "1 None compiled\n"


@any_backend
def test_an_exception_in_the_loss_leaves_everything_as_it_was():
    fails = False

    def loss_fn(model, batch):
        if fails:
            raise ValueError("no")
        return losses_of(model, batch)

    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = sw.Step(model, optimizer, loss_fn, samples=1, compile=True, recheck=False)
    list(step.over([data(5)]))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    fails = True
    with pytest.raises(ValueError, match="no"):
        list(step.over([data(5)]))
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert str(before[1]) == str(optimizer.state_dict())


@any_backend
def test_what_is_not_finite_is_told_of_before_anything_is_changed():
    x, y = data(12)
    x[8, 0] = math.nan
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = sw.Step(model, optimizer, losses_of, samples=1, compile=True)
    updates = step.over([(x, y)])
    assert [next(updates).index for _ in range(8)] == list(range(8))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(sw.NonFiniteLossError, match=r"losses must be finite; found nan at sample 0 of the window"):
        next(updates)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert str(before[1]) == str(optimizer.state_dict())


def test_bad_choice():
    with pytest.raises(ValueError, match="compile must be True, False or 'auto'; found 'always'"):
        sw.Step(net(), sw.sgd(0.1), losses_of, compile="always")
