"""Recorded updates with library calls, against the same step uncompiled, in float64."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.step.compiled import inductor, replay

ROWS = 12


class Tokens(nn.Module):
    """Products that are large enough for library calls: addmm (with bias), mm (without) and bmm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 36)
        self.second = nn.Linear(36, 40, bias=False)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.second(x @ x.mT @ x / 40).sum((1, 2)) / 40


def losses_of(model, batch):
    return (model(batch[0]) - batch[1]).square()


def steps(**options):
    torch.manual_seed(0)
    model = Tokens().double()
    for compile in (False, True):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
        yield sw.Step(mine, optimizer, losses_of, compile=compile, recheck=False, **options)


@pytest.fixture
def called(monkeypatch):
    """Symbols of the library calls that are recorded."""
    found = []
    as_library_call = replay.as_library_call

    def noted(*arguments):
        call = as_library_call(*arguments)
        if call is not None:
            found.append(call[0].symbol)
        return call

    monkeypatch.setattr(replay, "as_library_call", noted)
    return found


CACHED = """
import torch
import test_replay
_, quick = test_replay.steps(samples=1)
quick.run([test_replay.batch()])
assert quick.compiled == "compiled", quick.compiled
"""


@pytest.mark.slow
def test_the_cache_is_shared_by_machines_with_other_vectors(tmp_path):
    for capability in ("default", "avx2", ""):
        settings = {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        environment = {**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([sys.executable, "-c", CACHED], env=environment, check=True)


def batch(rows=ROWS):
    return torch.randn(rows, 30, 40, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [pytest.param(dict(samples=1), marks=pytest.mark.slow), dict(samples=3, transforms=[sw.clip(9.0)])],
)
def test_library_calls_are_replayed(called, options):
    batches = [batch(), batch()]
    plain, quick = steps(**options)
    for step in (plain, quick):
        step.run(batches)
        for _ in step.over(batches):
            pass
    assert quick.compiled == "compiled"
    (program,) = quick._runner.cache.programs.values()
    assert program.can_make_many
    assert {"aoti_torch_cpu_mm_out", "aoti_torch_cpu_bmm_out"} <= set(called)
    for a, b in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("what", ["too much memory", "no such function"])
def test_not_recorded(monkeypatch, what):
    if what == "too much memory":
        monkeypatch.setattr(replay, "LARGE", 1000)
    else:
        monkeypatch.setattr(inductor, "libtorch_function", lambda symbol: None)
    given = batch()
    plain, quick = steps(samples=3, transforms=[sw.clip(9.0)])  # the graph of the test above, compiled once
    for step in (plain, quick):
        step.run([given])
    (program,) = quick._runner.cache.programs.values()
    assert quick.compiled == "compiled" and not program.can_make_many
    for a, b in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


def test_beta_and_alpha():
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    calls = []
    with replay.CallRecorder(calls) as recorder:
        expected = torch.addmm(c, a, b, beta=0.5, alpha=-2.0, out=torch.empty(5, 3)).clone()
        torch.baddbmm(c[None], a[None], b[None], out=torch.empty(1, 5, 3))
    (call, given), (other, _) = calls
    assert call.numbers == (0.5, -2.0) and other.numbers == (1.0, 1.0)
    assert recorder.other_operations > 0  # the clone
    given[0].zero_()
    handles = replay.Handles()
    values = handles.of(given)
    source = f"""
    #include <stdint.h>
    extern "C" int32_t run(void* function, void** given) {{
        return {call.source("function", [f"given[{k}]" for k in range(4)])};
    }}"""
    function = inductor.load_c(source).run
    assert function(_pointer(call.address), (_pointer * 4)(*values)) == 0
    torch.testing.assert_close(given[0], expected)


_pointer = inductor.ctypes.c_void_p


def test_handles_are_deleted(monkeypatch):
    deleted = []
    monkeypatch.setattr(inductor, "delete_tensor_handles", lambda _, handles: deleted.extend(handles))
    handles = replay.Handles()
    made = handles.of([torch.zeros(2), torch.zeros(3)])
    assert len(set(made)) == 2
    del handles
    gc.collect()
    assert set(made) <= set(deleted)  # others may be those of programs of earlier tests
    monkeypatch.undo()
    inductor.delete_tensor_handles(inductor.libtorch_function(replay.DELETE), deleted)


def test_handles_are_deleted_without_another_look_up(monkeypatch):
    handles = replay.Handles()
    handles.of([torch.zeros(2)])
    monkeypatch.setattr(inductor, "libtorch_function", lambda symbol: None)
    del handles
    gc.collect()  # an error here would be a warning, and fail the test
