"""Costs of updates that samplewise doctor prints, and the advice derived from them."""

import pytest
import torch
from torch import nn

from samplewise.diagnostics import profile
from samplewise.diagnostics.profile import (
    CompileGain,
    Cost,
    compile_advice,
    cost_advice,
    measure_compile_gain,
    measure_costs,
    memory_description,
    table,
)
from samplewise.step.step import Step

CLIP = "with sw.clip(1.0)"
PLENTY = 10**12


def costs(whole=(10.0, 8_000_000), half=(12.0, 4_000_000)):
    return {("plain", None): Cost(*whole), ("plain", 8): Cost(*half), (CLIP, None): Cost(20.0, None)}


def test_table_with_refused_updates_and_unknown_memory():
    assert table({**costs(), (CLIP, 8): None}, "16 samples").splitlines() == [
        "16 samples",
        "at a time     ms, plain  MB, plain  ms, with sw.clip(1.0)  MB, with sw.clip(1.0)",
        "------------  ---------  ---------  ---------------------  ---------------------",
        "all at once   10         8          20                     ?",
        "microbatch 8  12         4          refused",
    ]


def test_advice_on_slower_microbatches():
    assert cost_advice(costs(), 16, 16, PLENTY) == [
        "An update that clips each sample takes 2.0 times as long as a plain one.",
        "Microbatches of 8 take 1.2 times as long as all samples at once and 50% of the memory: "
        "use --microbatch only if memory is short.",
    ]


@pytest.mark.parametrize(
    ("half", "expected"),
    [
        ((10.0, 4_000_000), "1.0 times as long as all samples at once and 50% of the memory."),
        (
            (10.0, 8_000_000),
            "1.0 times as long as all samples at once and 100% of the memory: do not use --microbatch.",
        ),
        ((15.0, None), "1.5 times as long as all samples at once: use --microbatch only if memory is short."),
    ],
)
def test_advice_on_other_microbatches(half, expected):
    assert cost_advice(costs(half=half), 16, 16, PLENTY)[1] == f"Microbatches of 8 take {expected}"


def test_memory_of_the_whole_batch_is_extrapolated_from_two_sizes():
    """8 more samples take 4 MB more: 0.5 MB each, so 128 samples take 8 + 112 / 2 MB."""
    found = "Each sample adds about 0.5 MB, which makes 64 MB for the batch of 128"
    assert cost_advice(costs(), 16, 128, PLENTY)[-1] == f"{found}."
    scarce = f"{found}: more than half of the free memory. Use --microbatch auto."
    assert cost_advice(costs(), 16, 128, 100_000_000)[-1] == scarce


@pytest.mark.parametrize("samples", [None, 1])
def test_no_advice_for_a_batch_without_microbatches(samples):
    assert cost_advice({("plain", None): Cost(1.0, 10)}, samples, samples, PLENTY) == []


def test_no_advice_if_all_updates_are_refused():
    assert cost_advice({("plain", None): None}, 16, 20, PLENTY) == []


def test_memory_on_cuda_is_read_from_the_allocator(monkeypatch):
    """A fake allocator: 100 bytes before the update, a peak of 350 during it."""
    calls = []
    for name, answer in {"reset_peak_memory_stats": None, "memory_allocated": 100, "max_memory_allocated": 350}.items():
        monkeypatch.setattr(torch.cuda, name, lambda d, name=name, answer=answer: calls.append((name, d)) or answer)
    device, model, key = torch.device("cuda:1"), nn.Linear(2, 1), ("plain", None)
    monkeypatch.setattr(profile, "MAX_ROUNDS", 1)
    found = measure_costs({key: lambda: calls.append("update")}, {key: model}, device)
    assert found[key].bytes == 250
    assert calls == [
        "update",
        ("reset_peak_memory_stats", device),
        ("memory_allocated", device),
        "update",
        ("max_memory_allocated", device),
    ]
    assert memory_description(device) == "peak memory of an update, beyond what was allocated before it"


def test_errors_of_the_update_are_raised():
    def failing():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        measure_costs({("plain", None): failing}, {("plain", None): nn.Linear(2, 1)}, torch.device("cpu"))


# --- compile=True -----------------------------------------------------------------------------------------------------

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
def test_advice_on_compiling(gains, expected):
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
def test_lines_of_compiled_updates(gain, expected):
    assert str(gain) == expected


def test_time_is_per_update_and_rounds_are_interleaved(monkeypatch):
    """The measured functions are the calls of eager and compiled steps in turn; a pass has 4 updates of one sample."""
    monkeypatch.setattr(profile, "MAX_ROUNDS", 3)
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
    monkeypatch.setattr(profile, "MAX_ROUNDS", 3)
    model = nn.Linear(2, 3)
    batch = (torch.randn(4, 2), torch.randint(3, (4,)))

    def make_step(samples, compile):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Step(model, optimizer, nn.CrossEntropyLoss(), samples=samples, recheck=False)  # never compiled

    gains = measure_compile_gain(make_step, batch, 4)
    assert [(gain.compiled, gain.reason) for gain in gains] == [(None, "compile=False")] * 2
    assert all(gain.eager > 0 for gain in gains)
