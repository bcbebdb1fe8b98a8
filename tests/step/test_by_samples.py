"""Learning rate by samples seen: the formula of the scheduler at the position, for any number of samples per update."""

import copy
import io
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

N = 60
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(N) % 3
LR = 0.4


def optimizer_of(model=None, groups=False):
    torch.manual_seed(0)
    model = model or nn.Linear(5, 3).double()
    parameters = model.parameters()
    if groups:
        parameters = [{"params": [model.weight], "lr": LR}, {"params": [model.bias], "lr": LR / 8}]
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def half_way(position):
    return 1 / (1 + position / 30)


def warmup(scheduler=CosineAnnealingLR, **options):
    parts = [sw.by_samples(LinearLR, total=20, start_factor=0.1), sw.by_samples(scheduler, total=40, **options)]
    return sw.by_samples(SequentialLR, total=N, schedulers=parts, milestones=[20])


# by_samples, and the same scheduler of torch with one step for each sample
KINDS = {
    "cosine": (lambda: sw.by_samples(CosineAnnealingLR, N, eta_min=0.01), lambda o: CosineAnnealingLR(o, N, 0.01)),
    "linear": (
        lambda: sw.by_samples(LinearLR, N, start_factor=1.0, end_factor=0.1),
        lambda o: LinearLR(o, 1.0, 0.1, N),
    ),
    "polynomial": (lambda: sw.by_samples(PolynomialLR, N, power=2.0), lambda o: PolynomialLR(o, N, 2.0)),
    "constant": (lambda: sw.by_samples(ConstantLR, N, total_iters=11), lambda o: ConstantLR(o, total_iters=11)),
    "exponential": (lambda: sw.by_samples(ExponentialLR, N, gamma=0.97), lambda o: ExponentialLR(o, 0.97)),
    "step": (lambda: sw.by_samples(StepLR, N, step_size=17, gamma=0.3), lambda o: StepLR(o, 17, 0.3)),
    "multistep": (
        lambda: sw.by_samples(MultiStepLR, N, milestones=[9, 41]),
        lambda o: MultiStepLR(o, [9, 41]),
    ),
    "lambda": (lambda: sw.by_samples(LambdaLR, N, lr_lambda=half_way), lambda o: LambdaLR(o, half_way)),
    "one cycle": (
        lambda: sw.by_samples(OneCycleLR, N, max_lr=1.0),
        lambda o: OneCycleLR(o, max_lr=1.0, total_steps=N + 1),
    ),
    "cyclic": (
        lambda: sw.by_samples(CyclicLR, N, base_lr=0.1, max_lr=1.0, step_size_up=13),
        lambda o: CyclicLR(o, 0.1, 1.0, 13),
    ),
    "sequence": (
        warmup,
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 20), CosineAnnealingLR(o, 40)], [20]),
    ),
}


def groups_of(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def rates_by_steps(make, groups):
    """Learning rate and momentum before each sample, and after the last, by one step of torch's scheduler each."""
    optimizer = optimizer_of(groups=groups)
    scheduler = make(optimizer)
    rates = [groups_of(optimizer)]
    with warnings.catch_warnings(action="ignore"):  # the optimizer makes no steps
        for _ in range(N):
            scheduler.step()
            rates.append(groups_of(optimizer))
    return rates


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 20, 60])
def test_equal_to_one_step_for_each_sample(kind, size, groups):
    by_samples, by_steps = KINDS[kind]
    expected = rates_by_steps(by_steps, groups)
    optimizer = optimizer_of(groups=groups)
    scheduler = by_samples()(optimizer)
    for start in range(0, N, size):
        torch.testing.assert_close(groups_of(optimizer), expected[start], rtol=1e-9, atol=1e-12)
        scheduler.step(size)
    torch.testing.assert_close(groups_of(optimizer), expected[N], rtol=1e-9, atol=1e-12)
    assert scheduler.get_last_lr() == [lr for lr, _ in groups_of(optimizer)]
    end = groups_of(optimizer)
    scheduler.step(50)
    assert groups_of(optimizer) == end  # the last one, also after the end


def step_of(scheduler, samples=4, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return sw.Step(model, optimizer, loss_fn, samples, scheduler=scheduler, recheck=False, **options)


def loader(batch=7):
    return DataLoader(TensorDataset(X, Y), batch_size=batch)


def rate(step):
    return step.optimizer.param_groups[0]["lr"]


@given(
    starts=st.lists(st.integers(1, N), max_size=3, unique=True),
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    tail=st.sampled_from(["update", "drop", "carry"]),
)
def test_the_last_rate_is_exact_for_every_ramp(starts, sizes, tail):
    ramp = sw.ramp(dict(zip([0, *sorted(starts)], sizes, strict=False)))
    step = step_of(sw.by_samples(CosineAnnealingLR, total=N, eta_min=0.0625), ramp, tail=tail)
    seen = 0
    for update in step.over(loader()):
        assert update.lr == pytest.approx(0.0625 + (LR - 0.0625) * (1 + math.cos(math.pi * seen / N)) / 2, rel=1e-12)
        seen += update.samples
    if tail == "carry":
        step.flush()
    assert step.counters.samples == N
    assert rate(step) == 0.0625


def test_an_update_across_the_end_and_samples_of_skipped_updates():
    step = step_of(sw.by_samples(LinearLR, total=20, start_factor=1.0, end_factor=0.5), 8, on_nonfinite="skip")
    x = X[:24].clone()
    x[9] = math.nan
    updates = step((x, Y[:24]))
    assert [(update.lr, update.skipped) for update in updates] == [(LR, False), (LR * 0.8, True), (LR * 0.6, False)]
    assert rate(step) == LR * 0.5


def test_a_schedule_bound_by_hand_is_the_one_of_the_step():
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = sw.by_samples(CosineAnnealingLR, total=N)(optimizer)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), 10, scheduler=scheduler)
    step.run(loader())
    assert step.scheduler is scheduler
    assert (scheduler.samples, optimizer.param_groups[0]["lr"]) == (N, 0.0)
    assert repr(scheduler) == "by_samples(CosineAnnealingLR, total=60) at sample 60"


def test_a_rate_in_a_tensor_is_changed_in_place():
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(LR))
    value = optimizer.param_groups[0]["lr"]
    sw.by_samples(CosineAnnealingLR, total=10)(optimizer).step(5)
    assert optimizer.param_groups[0]["lr"] is value
    assert value.item() == pytest.approx(LR / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 5])
def test_resume_is_bit_identical(kind, at):
    """Also inside a window: batches of 7, and windows of 4, 6 and 10."""
    ramp = sw.ramp({0: 4, 12: 6, 30: 10})
    batches = list(loader())

    def updates(step, part):
        return [(update.samples, update.lr) for batch in part for update in step(batch)]

    whole = step_of(KINDS[kind][0](), ramp)
    expected = updates(whole, batches)
    first = step_of(KINDS[kind][0](), ramp)
    found = updates(first, batches[:at])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (first.model, first.optimizer, first.scheduler, first)], file)
    file.seek(0)
    second = step_of(KINDS[kind][0](), ramp)
    for part, state in zip(
        (second.model, second.optimizer, second.scheduler, second), torch.load(file, weights_only=False), strict=True
    ):
        part.load_state_dict(state)
    assert found + updates(second, batches[at:]) == expected
    assert groups_of(second.optimizer) == groups_of(whole.optimizer)
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("kind", ["cosine", "one cycle", "sequence"])
def test_a_trainer_resumes_it(kind, tmp_path):
    def trainer(name):
        step = step_of(KINDS[kind][0](), sw.ramp({0: 4, 20: 8}))
        return sw.Trainer(step, tmp_path / name, progress=False, device="cpu", log_every=1)

    whole = trainer("whole")
    whole.fit(loader(), epochs=2)
    trainer("parts").fit(loader(), updates=7)
    second = trainer("parts")
    second.fit(loader(), epochs=2, resume=True)
    assert rate(second.step) == rate(whole.step)
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)
    settings = json.loads((tmp_path / "whole" / "run.json").read_text())["settings"]
    assert settings["scheduler"].startswith("by_samples(")
    other = step_of(sw.by_samples(PolynomialLR, N), sw.ramp({0: 4, 20: 8}))
    with pytest.raises(sw.CheckpointError, match=r"must fit the scheduler .* same scheduler, PolynomialLR; found "):
        sw.Trainer(other, tmp_path / "parts", progress=False, device="cpu").fit(loader(), epochs=3, resume=True)


def test_the_total_of_the_checkpoint_is_kept(tmp_path):
    def trainer(total):
        step = step_of(sw.by_samples(CosineAnnealingLR, total=total))
        return sw.Trainer(step, tmp_path / "run", progress=False, device="cpu")

    trainer(120).fit(loader(), epochs=1)
    second = trainer(200)
    with pytest.warns(sw.TrainingWarning, match="total of the scheduler: the checkpoint's 120 is kept"):
        second.fit(loader(), epochs=2, resume=True)
    assert rate(second.step) == 0.0
    assert "total=120)" in repr(second.step.scheduler)


@pytest.mark.sweep(1 / 2)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", ["over", "run"])
def test_compiled_updates_have_the_same_rates(way):
    steps = [step_of(KINDS["one cycle"][0](), sw.ramp({0: 4, 20: 10}), compile=compile) for compile in (False, True)]
    rates = [[update.lr for update in step.over(loader(N))] if way == "over" else step.run(loader(N)) for step in steps]
    assert steps[1].compiled == "compiled"
    if way == "over":
        assert rates[0] == rates[1]
    for p, q in zip(*(step.model.parameters() for step in steps), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    assert groups_of(steps[0].optimizer) == groups_of(steps[1].optimizer)


def test_functions_that_return_a_lambda_scheduler():
    def get_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
        def factor(position):
            if position < num_warmup_steps:
                return position / num_warmup_steps
            return (num_training_steps - position) / (num_training_steps - num_warmup_steps)

        return LambdaLR(optimizer, factor)

    optimizer = optimizer_of()
    scheduler = sw.by_samples(get_schedule_with_warmup, 100, num_warmup_steps=20)(optimizer)
    rates = []
    for samples in (10, 10, 40, 40):
        rates += scheduler.get_last_lr()
        scheduler.step(samples)
    assert rates == pytest.approx([0.0, LR / 2, LR, LR / 2])
    assert scheduler.get_last_lr() == [0.0]


def test_an_audit_finds_no_fault():
    model = nn.Linear(5, 3).double()
    step = step_of(warmup(), 5, model=model)
    with sw.audit(model) as audit:
        for _ in range(2):
            step.run(list(loader(10))[:1])
    assert audit.ok, audit


# --- errors -----------------------------------------------------------------------------------------------------------


class Recursive(CosineAnnealingLR):
    """It inherits a formula that is not its own."""

    def get_lr(self):
        return [0.9 * group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    "kind", [MultiplicativeLR, ChainedScheduler, ReduceLROnPlateau, CosineAnnealingWarmRestarts, Recursive]
)
def test_schedulers_without_a_formula_are_refused(kind):
    message = (
        rf"whose learning rate is a formula of the number of steps; found {kind.__name__}, .* Use CosineAnnealingLR"
    )
    with pytest.raises(TypeError, match=message):
        sw.by_samples(kind, total=N)
    returned = Recursive(optimizer_of(), N)
    with pytest.raises(TypeError, match="found Recursive, which computes it from the one before"):
        sw.by_samples(lambda optimizer: returned, total=N)(optimizer_of())


@pytest.mark.parametrize("total", [0, -1, 1e6, True, None])
def test_bad_totals(total):
    with pytest.raises(ValueError, match=f"total must be a positive whole number of samples; found {total}"):
        sw.by_samples(CosineAnnealingLR, total=total)


def test_bad_sequences():
    part = sw.by_samples(LinearLR, total=10)
    for options in (
        {},
        {"schedulers": [part, part], "milestones": []},
        {"schedulers": [part, part], "milestones": [0]},
        {"schedulers": [part, part, part], "milestones": [9, 5]},
        {"schedulers": [part, LinearLR], "milestones": [5]},
        {"schedulers": [part, warmup()], "milestones": [5]},
        {"schedulers": [part, part], "milestones": [5], "last_epoch": 3},
    ):
        with pytest.raises(ValueError, match=r"needs schedulers=\[\.\.\.\], each a by_samples.* found schedulers="):
            sw.by_samples(SequentialLR, total=N, **options)


def test_wrong_objects():
    optimizer = optimizer_of()
    with pytest.raises(TypeError, match="needs the class of a scheduler; found CosineAnnealingLR"):
        sw.by_samples(CosineAnnealingLR(optimizer, 9), total=9)
    model = nn.Linear(5, 3)
    with pytest.raises(TypeError, match=r"by_samples needs an optimizer .*, whose learning rate it sets; found "):
        sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), scheduler=sw.by_samples(CosineAnnealingLR, total=9))
    with pytest.raises(TypeError, match="must be created with the optimizer of the step"):
        step_of(sw.by_samples(CosineAnnealingLR, total=9)(optimizer))
    plan = sw.Privacy(noise_multiplier=1.0, delta=1e-5, updates=3, sample_rate=0.1, clip=1.0)
    schedule = sw.by_samples(CosineAnnealingLR, total=9)
    with pytest.raises(sw.PrivacyError, match=r"step once per update with privacy=, .*; found by_samples\(Cosine"):
        sw.Step(model, optimizer_of(model), nn.CrossEntropyLoss(), scheduler=schedule, privacy=plan)


def test_a_schedule_can_be_copied_with_its_step():
    step = step_of(sw.by_samples(CosineAnnealingLR, total=N))
    step.run(loader())
    twin = copy.deepcopy(step)
    assert rate(twin) == 0.0
    assert twin.scheduler.optimizer is twin.optimizer
