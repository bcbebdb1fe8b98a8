"""What the doctor makes of measured costs."""

import pytest
import torch
from torch import nn

from samplewise.cli.costs import Cost, advice, measured, memory_is, table

CLIP = "with sw.clip(1.0)"
PLENTY = 10**12


def costs(whole=(10.0, 8_000_000), half=(12.0, 4_000_000)):
    return {("plain", None): Cost(*whole), ("plain", 8): Cost(*half), (CLIP, None): Cost(20.0, None)}


def test_a_table_with_what_was_refused_and_what_cannot_be_counted():
    keys = [(kind, size) for kind in ("plain", CLIP) for size in (None, 8)]
    assert table(costs(), keys, "16 samples").splitlines() == [
        "16 samples",
        "at a time     ms, plain  MB, plain  ms, with sw.clip(1.0)  MB, with sw.clip(1.0)",
        "------------  ---------  ---------  ---------------------  ---------------------",
        "all at once   10         8          20                     ?",
        "microbatch 8  12         4          refused",
    ]


def test_advice_of_slower_microbatches():
    assert advice(costs(), 16, 16, PLENTY) == [
        "An update that clips each sample takes 2.0 times as long as a plain one.",
        "Microbatches of 8 take 1.2 times as long as all samples at once and 50% of the memory: "
        "use --microbatch only if memory is short.",
    ]


@pytest.mark.parametrize(
    ("half", "said"),
    [
        ((10.0, 4_000_000), "1.0 times as long as all samples at once and 50% of the memory."),
        (
            (10.0, 8_000_000),
            "1.0 times as long as all samples at once and 100% of the memory: do not use --microbatch.",
        ),
        ((15.0, None), "1.5 times as long as all samples at once: use --microbatch only if memory is short."),
    ],
)
def test_advice_of_other_microbatches(half, said):
    assert advice(costs(half=half), 16, 16, PLENTY)[1] == f"Microbatches of 8 take {said}"


def test_the_whole_batch_is_reckoned_from_two_sizes():
    """8 samples more take 4 MB more: half a MB each, and 8 + 112 / 2 for 128."""
    found = "Each sample adds about 0.5 MB, which makes 64 MB for the batch of 128"
    assert advice(costs(), 16, 128, PLENTY)[-1] == f"{found}."
    scarce = f"{found}: more than half of the free memory. Use --microbatch auto."
    assert advice(costs(), 16, 128, 100_000_000)[-1] == scarce


@pytest.mark.parametrize("samples", [None, 1])
def test_nothing_to_say_of_a_batch_in_one_piece(samples):
    assert advice({("plain", None): Cost(1.0, 10)}, samples, samples, PLENTY) == []


def test_nothing_to_say_where_all_is_refused():
    assert advice({}, 16, 20, PLENTY) == []


def test_on_cuda_the_allocator_is_asked(monkeypatch):
    """There is none here: one that had 100 bytes before the update, and 350 at most during it."""
    asked = []
    for name, answer in {"reset_peak_memory_stats": None, "memory_allocated": 100, "max_memory_allocated": 350}.items():
        monkeypatch.setattr(torch.cuda, name, lambda d, name=name, answer=answer: asked.append((name, d)) or answer)
    device, model, key = torch.device("cuda:1"), nn.Linear(2, 1), ("plain", None)
    monkeypatch.setattr("samplewise.cli.costs.ROUNDS", 1)
    found = measured({key: lambda: asked.append("update")}, {key: model}, device)
    assert found[key].bytes == 250
    assert asked == [
        "update",
        ("reset_peak_memory_stats", device),
        ("memory_allocated", device),
        "update",
        ("max_memory_allocated", device),
    ]
    assert memory_is(device) == "peak memory of an update, beyond what was allocated before it"


def test_an_error_of_the_update_is_not_swallowed():
    def failing():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        measured({("plain", None): failing}, {("plain", None): nn.Linear(2, 1)}, torch.device("cpu"))
