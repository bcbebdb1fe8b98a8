"""Time of an update with and without compile=True, measured interleaved; for samplewise doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from samplewise.cli.costs import interleaved_seconds, three_digits
from samplewise.step.step import Step

WARM_UP = 3  # passes over the batch; the first update of a step is never compiled
NO_GAIN = 1.05  # speed-ups up to this factor are within the error of the measurement

MakeStep = Callable[[int | None, bool], Step]  # samples per update, compile


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
            steps |= {(size, compile): _warmed_up(make_step(size, compile), batch) for compile in (False, True)}
        except Exception as error:  # the model may support batches but not a single sample
            failures[size] = f"{type(error).__name__}: {error}"
    reasons = {size: step.compiled for (size, compile), step in steps.items() if compile}
    measured = {
        (size, compile): partial(step, batch)
        for (size, compile), step in steps.items()
        if not compile or reasons[size] == "compiled"
    }
    seconds = interleaved_seconds(measured)
    return [_gain(size, samples, seconds, failures.get(size) or reasons[size]) for size in sizes]


def _warmed_up(step: Step, batch: Any) -> Step:
    for _ in range(WARM_UP):
        step(batch)
    return step


def _gain(
    size: int | None, samples: int | None, seconds: Mapping[tuple[int | None, bool], float], reason: str
) -> CompileGain:
    updates = 1 if size is None or samples is None else samples // size  # per pass over the batch
    times = [seconds.get((size, compile)) for compile in (False, True)]
    eager, compiled = (None if time is None else 1e6 * time / updates for time in times)
    return CompileGain(size, eager, compiled, "" if reason == "compiled" else reason)


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
