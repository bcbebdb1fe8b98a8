"""What a step says about its being compiled."""

import re
import sys

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.step.compiled import CannotCompile, program_cache

BATCH = torch.randn(6, 4), torch.randn(6, 1)


def made(**options):
    return sw.Step(nn.Linear(4, 1), sw.sgd(0.1), nn.MSELoss(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(samples=1), "compile=False"),
        (dict(samples=2, compile="auto"), "compile='auto' compiles only steps with samples=1"),
        (dict(compile="auto"), "compile='auto' compiles only steps with samples=1"),
        (dict(samples=1, compile="auto"), "not compiled yet, after 6 updates"),
        (dict(samples=6, compile=True), "not compiled yet, after 1 update"),
    ],
)
def test_why_not_yet(options, said):
    step = made(**options)
    step(BATCH)
    assert step.compiled == said


def test_why_not_at_all(monkeypatch):
    def fails(*_):
        raise CannotCompile("the moon is full")

    monkeypatch.setattr(program_cache, "trace_backward", fails)
    step = made(samples=1, compile=True)
    with pytest.warns(sw.TrainingWarning, match="updates stay uncompiled: the moon is full"):
        step(BATCH)
    assert step.compiled == "the moon is full"


def test_private_updates_stay_uncompiled():
    privacy = sw.Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-3, sample_rate=0.5, updates=4)
    step = made(privacy=privacy, compile=True)
    step.run(privacy.loader(torch.utils.data.TensorDataset(*BATCH)))
    assert step.counters.updates == 2
    assert step.compiled.startswith("private updates are not compiled: ")


@pytest.mark.parametrize(
    "lacking", ["torch._guards", "torch._inductor.decomposition", "torch._inductor.inductor_prims"]
)
def test_torch_lacks_a_private_interface(monkeypatch, lacking):
    monkeypatch.setitem(sys.modules, lacking, None)
    step = made(samples=1, compile=True)
    said = f"torch {torch.__version__} lacks an interface that compiled updates need (import of {lacking}"
    with pytest.warns(sw.TrainingWarning, match=re.escape(said)):
        updates = step(BATCH)
    assert step.compiled.startswith(said)
    assert [update.samples for update in updates] == [1] * 6


@pytest.mark.usefixtures("backend")
def test_compiled_and_then_changed():
    step = made(samples=1, compile=True)
    state = step.state_dict()
    step(BATCH)
    assert step.compiled == "compiled"
    step.load_state_dict(state)
    assert step.compiled == "not compiled yet, after 0 updates"
    step(BATCH)
    step.model.register_forward_hook(lambda *_: None)
    with pytest.warns(sw.TrainingWarning, match="updates stay uncompiled: modules have hooks"):
        step(BATCH), step(BATCH)
    assert step.compiled == "modules have hooks"


def test_lines_go_where_they_are_wanted_for_a_while():
    step, lines = made(compile=True), []
    printed = step._runner.cache.notify
    with step._slow_compile_notice(lines.append):
        step._runner.cache.notify("compiling ...")
    assert lines == ["compiling ..."]
    assert step._runner.cache.notify is printed
