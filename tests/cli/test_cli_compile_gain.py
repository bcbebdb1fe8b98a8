"""Advice of samplewise doctor on compile=True."""

import pytest
import torch
from torch import nn

from samplewise.cli import costs
from samplewise.cli.compile_gain import CompileGain, compile_advice, measure_compile_gain
from samplewise.step.step import Step

FASTER = CompileGain(1, eager=600.0, compiled=200.0)
EQUAL = CompileGain(16, eager=700.0, compiled=700.0)
REASON = "the size of microbatches is automatic"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        (
            [FASTER, CompileGain(16, 900.0, 600.0)],
            "compile=True (samplewise train --compile) would make an update of one sample 3.0 times as fast and an "
            "update of 16 samples 1.5 times as fast.",
        ),
        (
            [FASTER, EQUAL],
            "compile=True (samplewise train --compile) would make an update of one sample 3.0 times as fast, but not "
            "an update of 16 samples.",
        ),
        ([EQUAL], "compile=True would not make an update of 16 samples faster."),
        (
            [CompileGain(16, 900.0, None, REASON)],
            "compile=True would change nothing: updates of this recipe cannot be compiled.",
        ),
    ],
)
def test_advice(gains, expected):
    assert compile_advice(gains) == [expected]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (FASTER, "update of one sample: 600 µs eager, 200 µs compiled"),
        (CompileGain(16, 900.0, None, REASON), f"update of 16 samples: 900 µs eager; not compiled: {REASON}"),
        (CompileGain(1, reason="ValueError: no"), "update of one sample: not possible: ValueError: no"),
        (CompileGain(None, 12.34, 1.0), "update of the batch: 12.3 µs eager, 1 µs compiled"),
    ],
)
def test_lines(gain, expected):
    assert str(gain) == expected


def test_time_is_per_update_and_rounds_are_interleaved(monkeypatch):
    """The measured functions are the calls of eager and compiled steps in turn; a pass has 4 updates of one sample."""
    monkeypatch.setattr(costs, "MAX_ROUNDS", 3)
    calls = []

    class FakeStep:
        def __init__(self, samples, compile):
            self.key = (samples, compile)
            self.compiled = "compiled" if compile else "compile=False"

        def __call__(self, batch):
            calls.append(self.key)

    gains = measure_compile_gain(FakeStep, torch.zeros(4, 2), 4)
    assert [gain.samples for gain in gains] == [1, 4]
    assert all(gain.speed_up is not None for gain in gains)
    assert calls[-4:] == [(1, False), (1, True), (4, False), (4, True)]


def test_an_update_that_cannot_be_compiled_is_measured_eager(monkeypatch):
    monkeypatch.setattr(costs, "MAX_ROUNDS", 3)
    model = nn.Linear(2, 3)
    batch = (torch.randn(4, 2), torch.randint(3, (4,)))

    def make_step(samples, compile):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Step(model, optimizer, nn.CrossEntropyLoss(), samples=samples, recheck=False)  # never compiled

    gains = measure_compile_gain(make_step, batch, 4)
    assert [(gain.compiled, gain.reason) for gain in gains] == [(None, "compile=False")] * 2
    assert all(gain.eager > 0 for gain in gains)
