"""Time and memory of an update, with and without compile=True, and advice derived from them.

`samplewise doctor RECIPE` prints them. Times are measured interleaved: other load on the machine is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from samplewise.core.memory import count_saved_bytes, has_peak_counter, peak_bytes
from samplewise.core.text import render
from samplewise.errors import SamplewiseError
from samplewise.step.step import Step

MAX_ROUNDS = 30
MAX_SECONDS = 5.0  # of measuring, after MIN_ROUNDS
MIN_ROUNDS = 3
MEGABYTE = 1e6
PLAIN = "plain"
CLIPPED = "with sw.clip(1.0)"
WARM_UP = 3  # passes over the batch before compiled updates are measured; the first update of a step is never compiled
NO_GAIN = 1.05  # speed-ups up to this factor are within the error of the measurement

MakeStep = Callable[..., Step]  # takes arguments of Step by keyword; returns a step of a new copy of a model
K = TypeVar("K")
UpdateKey = tuple[str, int | None]  # transform, microbatch; None: all samples at once
Updates = Mapping[UpdateKey, Callable[[], object]]


@dataclass(frozen=True)
class Cost:
    """Time and memory of one update."""

    milliseconds: float
    bytes: int | None  # None: cannot be measured


Costs = dict[UpdateKey, Cost]


def update_costs(
    make_step: MakeStep, batch: Any, samples: int | None, transforms: Mapping[str, Any], device: torch.device
) -> dict[UpdateKey, Cost | None]:
    """Time and memory of updates with each of the transforms, of the batch at once and in microbatches of a half and a
    quarter of it. None: refused.

    samples: of the batch; None: it cannot be sliced
    transforms: by name
    """
    sizes = [size for size in dict.fromkeys(((samples or 0) // 2, (samples or 0) // 4)) if size]
    keys = [(name, size) for name in transforms for size in (None, *sizes)]
    steps: dict[UpdateKey, Step] = {}
    for name, size in keys:
        try:
            step = make_step(microbatch=size, transforms=transforms[name])
            step(batch)  # the first update is slower
            steps[name, size] = step
        except SamplewiseError:
            continue
    updates = {key: partial(step, batch) for key, step in steps.items()}
    costs = measure_costs(updates, {key: step.model for key, step in steps.items()}, device)
    return {key: costs.get(key) for key in keys}


def measure_costs(updates: Updates, models: Mapping[UpdateKey, nn.Module], device: torch.device) -> Costs:
    """Time and memory of each update."""
    seconds = interleaved_seconds(updates)
    return {key: Cost(1000 * seconds[key], _memory(updates[key], models[key], device)) for key in updates}


def interleaved_seconds(updates: Mapping[K, Callable[[], object]]) -> dict[K, float]:
    """Minimum seconds of each update over interleaved rounds; other load on the machine can only add time."""
    return {key: min(times) for key, times in interleaved_times(updates).items()}


def interleaved_times(
    updates: Mapping[K, Callable[[], object]],
    clock: Callable[[], float] = perf_counter,
    max_seconds: float | None = None,
) -> dict[K, list[float]]:
    """Seconds of each update in each round: other load on the machine is shared by all updates of a round.

    max_seconds: no further round begins after that time, but for MIN_ROUNDS; None: MAX_SECONDS
    """
    max_seconds = MAX_SECONDS if max_seconds is None else max_seconds
    seconds: dict[K, list[float]] = {key: [] for key in updates}
    start = perf_counter()
    for round_ in range(MAX_ROUNDS):
        if round_ >= MIN_ROUNDS and perf_counter() - start > max_seconds:
            break
        for key, update in updates.items():
            _synchronize()
            update_start = clock()
            update()
            _synchronize()
            seconds[key].append(clock() - update_start)
    return seconds


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(update: Callable[[], object], model: nn.Module, device: torch.device) -> int | None:
    """Peak bytes of an update; without a counter of the peak, bytes saved for backward, which do not depend on the
    allocator; None if saved tensors cannot be counted.
    """
    if has_peak_counter(device):
        return peak_bytes(update, device)
    try:
        with count_saved_bytes(model) as saved:
            update()
    except RuntimeError as error:
        if "saved tensor hooks" in str(error):  # torch.func.grad and similar functions forbid saved tensor hooks
            return None
        raise
    return saved.most


def memory_description(device: torch.device) -> str:
    """Description of the memory figure for the title of the table."""
    if has_peak_counter(device):
        return "peak memory of an update, beyond what was allocated before it"
    return "tensors saved for backward by the forward pass, without weights"


# --- table and advice -------------------------------------------------------------------------------------------------


def table(costs: Mapping[UpdateKey, Cost | None], title: str) -> str:
    """Text table with one line per microbatch size."""
    transforms, sizes = (list(dict.fromkeys(column)) for column in zip(*costs, strict=True))
    header = ["at a time", *(f"{unit}, {transform}" for transform in transforms for unit in ("ms", "MB"))]
    rows = []
    for size in sizes:
        row = ["all at once" if size is None else f"microbatch {size}"]
        for transform in transforms:
            cost = costs[transform, size]
            row += ["refused", ""] if cost is None else [three_digits(cost.milliseconds), _megabytes(cost.bytes)]
        rows.append(row)
    return render(header, rows, title)


def _megabytes(size: float | None) -> str:
    return "?" if size is None else three_digits(size / MEGABYTE)


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def cost_advice(
    measured: Mapping[UpdateKey, Cost | None], samples: int | None, batch_size: int | None, free: int
) -> list[str]:
    """Sentences of advice. The costs were measured on `samples` of the `batch_size` samples; `free`: free bytes."""
    costs = {key: cost for key, cost in measured.items() if cost is not None}
    plain = costs.get((PLAIN, None))
    if plain is None:
        return []
    names = {CLIPPED: "that clips each sample"}
    advice = [
        f"An update {names.get(name, name)} takes {cost.milliseconds / plain.milliseconds:.1f} times as long as "
        "a plain one."
        for (name, size), cost in costs.items()
        if name != PLAIN and size is None
    ]
    size = max((size for name, size in costs if name == PLAIN and size is not None), default=None)
    if size is None:
        return advice
    advice.append(_microbatch_advice(size, costs[PLAIN, size], plain))
    small, large = costs[PLAIN, size].bytes, plain.bytes
    if small is None or large is None or samples is None or batch_size is None or batch_size == samples:
        return advice
    # Memory of the whole batch, extrapolated linearly from two sizes.
    per_sample = (large - small) / (samples - size)
    total = large + per_sample * (batch_size - samples)
    end = ": more than half of the free memory. Use --microbatch auto." if total > free / 2 else "."
    advice.append(
        f"Each sample adds about {_megabytes(per_sample)} MB, which makes {_megabytes(total)} MB for the batch of "
        f"{batch_size}{end}"
    )
    return advice


def _microbatch_advice(size: int, microbatch: Cost, batch: Cost) -> str:
    time = microbatch.milliseconds / batch.milliseconds
    text = f"Microbatches of {size} take {time:.1f} times as long as all samples at once"
    if microbatch.bytes is not None and batch.bytes:
        memory = microbatch.bytes / batch.bytes
        text += f" and {memory:.0%} of the memory"
        if memory > 0.95:
            return f"{text}: do not use --microbatch."
    return f"{text}: use --microbatch only if memory is short." if time >= 1.05 else f"{text}."


# --- compile=True -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileGain:
    """Microseconds of one update, eager and compiled. None: the update fails or is not compiled, see `reason`."""

    samples: int | None  # per update; None: a batch that cannot be sliced
    eager: float | None = None
    compiled: float | None = None
    reason: str = ""

    @property
    def update(self) -> str:
        if self.samples is None:
            return "update of the batch"
        return "update of one sample" if self.samples == 1 else f"update of {self.samples} samples"

    @property
    def speed_up(self) -> float | None:
        return None if self.eager is None or self.compiled is None else self.eager / self.compiled

    def __str__(self) -> str:
        if self.eager is None:
            return f"{self.update}: not possible: {self.reason}"
        eager = f"{self.update}: {three_digits(self.eager)} µs eager"
        if self.compiled is None:
            return f"{eager}; not compiled: {self.reason}"
        return f"{eager}, {three_digits(self.compiled)} µs compiled"


def measure_compile_gain(make_step: MakeStep, batch: Any, samples: int | None) -> list[CompileGain]:
    """Measure updates of one sample and of the whole batch of `samples`; None: the batch cannot be sliced."""
    steps: dict[tuple[int | None, bool], Step] = {}
    failures: dict[int | None, str] = {}
    sizes = [None] if samples is None else sorted({1, samples})
    for size in sizes:
        try:
            pair = {(size, compile): make_step(samples=size, compile=compile) for compile in (False, True)}
            for step in pair.values():
                for _ in range(WARM_UP):
                    step(batch)
            steps |= pair
        except Exception as error:  # the model may support batches but not a single sample
            failures[size] = f"{type(error).__name__}: {error}"
    reasons = {size: step.compiled for (size, compile), step in steps.items() if compile}
    measured = {
        (size, compile): partial(step, batch)
        for (size, compile), step in steps.items()
        if not compile or reasons[size] == "compiled"
    }
    seconds = interleaved_seconds(measured)
    gains = []
    for size in sizes:
        updates = 1 if size is None or samples is None else samples // size  # per pass over the batch
        times = [seconds.get((size, compile)) for compile in (False, True)]
        eager, compiled = (None if time is None else 1e6 * time / updates for time in times)
        reason = failures.get(size) or reasons[size]
        gains.append(CompileGain(size, eager, compiled, "" if reason == "compiled" else reason))
    return gains


def compile_advice(gains: Iterable[CompileGain]) -> list[str]:
    """Sentences that say what compile=True would bring."""
    compiled = [gain for gain in gains if gain.speed_up is not None]
    faster = [f"an {g.update} {g.speed_up:.1f} times as fast" for g in compiled if (g.speed_up or 0) > NO_GAIN]
    slower = [f"an {g.update}" for g in compiled if (g.speed_up or 0) <= NO_GAIN]
    if not compiled:
        return ["compile=True would change nothing: updates of this recipe cannot be compiled."]
    if not faster:
        return [f"compile=True would not make {' or '.join(slower)} faster."]
    limits = f", but not {' or '.join(slower)}" if slower else ""
    return [f"compile=True (samplewise train --compile) would make {' and '.join(faster)}{limits}."]
