"""Trials: compiled updates are used only if they are faster. Times are given by the tests, never measured."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.step.compiled import program_cache, verify

BATCH = torch.randn(6, 4), torch.randn(6, 1)


@pytest.fixture(autouse=True)
def _measured_on_interpreted_code(interpreted, monkeypatch):
    monkeypatch.setattr(program_cache, "refuse_library_bound", verify.refuse_library_bound)
    monkeypatch.setattr(program_cache, "refuse_slower", verify.refuse_slower)


@pytest.fixture
def timed(monkeypatch):
    """Function that sets the seconds of uncompiled and compiled updates; returns the list of measured updates."""

    def set_times(uncompiled, compiled):
        made = []

        def seconds(run):
            run()
            kind = "uncompiled" if getattr(run, "__name__", "") == "uncompiled" else "compiled"
            made.append(kind)
            times = {"uncompiled": uncompiled, "compiled": compiled}[kind]
            return times[made.count(kind) % len(times)]

        monkeypatch.setattr(verify, "seconds", seconds)
        return made

    return set_times


def made(compile=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return sw.Step(model, optimizer, nn.MSELoss(), compile=compile, recheck=False, **options)


def values(step):
    states = [t for state in step.optimizer.state.values() for t in state.values()]
    return [*step.model.state_dict().values(), *states, torch.get_rng_state()]


def assert_same(mine, other):
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)


def run(step, updates=4):
    torch.manual_seed(3)
    lines = []
    with step._slow_compile_notice(lines.append):
        for _ in range(updates):
            step(BATCH)
    return [line for line in lines if not line.startswith("compiling")]  # printed on a busy machine


def test_slower_updates_stay_uncompiled(timed):
    measured = timed([0.010], [0.012])
    step = made()
    lines = run(step)
    reason = "compiled updates are not faster; they take 12 ms, uncompiled ones 10 ms"
    assert step.compiled == reason
    assert lines == [f"updates of 6 samples stay uncompiled: {reason}"]
    assert len(measured) == 2 * verify.MOST  # close to each other, so all rounds; and measured only once
    plain = made(compile=False)
    run(plain)
    assert_same(values(step), values(plain))  # bit for bit: dry runs leave no trace


def test_faster_updates_are_compiled_without_a_trace_of_the_dry_runs(timed, monkeypatch):
    measured = timed([1.0], [0.1])
    step = made()
    assert run(step) == []
    assert step.compiled == "compiled"
    assert measured == ["uncompiled", "compiled"] * verify.ROUNDS
    untried = made()
    monkeypatch.setattr(program_cache, "refuse_slower", lambda *_: None)
    run(untried)
    assert_same(values(step), values(untried))


@pytest.mark.parametrize(
    ("uncompiled", "compiled", "faster"),
    [
        ([1.0], [0.99], False),  # within the noise
        ([1.0], [0.96], True),
        ([1.0] * 3 + [9.0], [0.9] * 4 + [30.0], True),  # a few outliers of either side
        ([1.0] * 4 + [30.0], [1.1] * 3 + [9.0], False),
    ],
)
def test_decision_is_by_medians(timed, uncompiled, compiled, faster):
    timed(uncompiled, compiled)
    step = made()
    run(step)
    assert (step.compiled == "compiled") == faster


def test_a_restored_step_is_not_tried_again(timed):
    for compiled in (0.1, 3.0):
        timed([1.0], [compiled])
        step = made()
        run(step)
        other = made()
        run(other, 1)
        other.load_state_dict(copy.deepcopy(step.state_dict()))
        measured = timed([1.0], [1.0])
        run(other)
        assert measured == [] and other.compiled == step.compiled


def test_state_from_before_updates_were_measured(timed):
    timed([1.0], [0.1])
    for step in (made(), made(compile=False)):
        state = step.state_dict()
        del state["compiling"]["slower"]
        step.load_state_dict(state)
        run(step)
    assert step.compiled == "compile=False"


def test_other_shapes_are_tried_on_their_own(timed):
    timed([1.0], [3.0])
    step = made()
    run(step)
    timed([1.0], [0.1])
    for _ in range(2):
        step(tuple(t[:4] for t in BATCH))
    assert step.compiled == "compiled"
    assert [program is None for program in step._runner.cache.programs.values()] == [True, False]


def test_a_window_that_is_not_finite_is_not_tried(timed):
    measured = timed([1.0], [0.1])
    step = made(on_nonfinite="skip")
    step(BATCH)
    step((BATCH[0] * torch.inf, BATCH[1]))
    assert measured == []
    step(BATCH)
    assert len(measured) == 2 * verify.ROUNDS and step.compiled == "compiled"


def test_tensors_that_the_loss_function_changes_are_restored():
    calls, drawn = torch.zeros(()), torch.Generator().manual_seed(0)

    def loss_fn(model, batch):
        calls.add_(1)
        return (model(batch[0]) - batch[1]).square().sum(1) * torch.rand((), generator=drawn)

    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, compile=compile, recheck=False)
        calls.zero_()
        drawn.manual_seed(0)
        step(BATCH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.TrainingWarning)  # not compiled
            step(BATCH), step(BATCH)
        found.append([calls.clone(), drawn.get_state(), *model.parameters()])
    assert step.compiled not in ("compiled", "not compiled yet, after 3 updates")
    assert_same(*found)


# --- library calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """Function that sets the share of library calls in the time of an update."""

    def set_share(share, many=1):
        class Calls(verify.LibraryCalls):
            def __exit__(self, *error):
                super().__exit__(*error)
                self.seconds = share

        monkeypatch.setattr(verify, "LibraryCalls", Calls)
        monkeypatch.setattr(verify, "MANY", many)

    return set_share


def test_library_bound_updates_are_not_compiled(timed, library, monkeypatch):
    timed([1.0], [0.1])
    library(0.62)
    monkeypatch.setattr(program_cache, "trace_backward", None)  # not called
    step = made()
    (line,) = run(step)
    assert step.compiled == (
        "library calls, such as matrix products, take 62% of the time of an uncompiled update, and compiling would not "
        "make them faster"
    )
    assert line == f"updates of 6 samples stay uncompiled: {step.compiled}"
    plain = made(compile=False)
    run(plain)
    assert_same(values(step), values(plain))


@pytest.mark.parametrize(("share", "many"), [(0.3, 1), (0.9, 10**6)])
def test_compiled_if_library_calls_are_few_or_compiling_is_quick(timed, library, share, many):
    timed([1.0], [0.1])
    library(share, many)
    step = made()
    run(step)
    assert step.compiled == "compiled"


def test_calls_that_compiled_code_does_not_make_are_no_library_calls():
    with verify.LibraryCalls() as calls:
        row = torch.randn(1, 512) @ torch.randn(512, 512)
        torch.outer(row[0], row[0])
        torch.randn(4, 4) @ torch.randn(4, 4)
        nn.Conv2d(1, 2, 3)(torch.randn(1, 1, 8, 8))
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    assert calls.operations > 5 and calls.seconds == 0
    larger = {
        "product": lambda: torch.randn(64, 64) @ torch.randn(64, 64),
        "products": lambda: torch.randn(2, 64, 64) @ torch.randn(2, 64, 64),
        "convolution": lambda: nn.Conv2d(1, 2, 3)(torch.randn(2, 1, 8, 8)),
        "attention": lambda: nn.functional.scaled_dot_product_attention(*torch.randn(3, 4, 2, 128, 8)),
    }
    for name, call in larger.items():
        with verify.LibraryCalls() as calls:
            call()
        assert calls.seconds > 0, name
