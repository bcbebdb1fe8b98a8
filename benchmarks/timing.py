"""Times relative to a plain step: interleaved in one process, each call next to its own plain step."""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from peers import Contender, Plain, Samplewise
from results import JOBS, Cells, Judge, Result, failed, jobs_of
from workloads import Workload

TOO_SLOW = 20  # times a plain step: above this, one call is enough


@dataclass
class Turn:
    """Measurements of one cell of the table."""

    contender: type[Contender]
    job: str
    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.seconds) / statistics.median(self.plain)


@dataclass(frozen=True)
class Timing:
    plain_ms: float
    cells: Cells
    walk: Result  # as a share of a plain step


def measure(work: Workload, contenders: list[type[Contender]], rounds: int) -> Timing:
    plain = Plain(work).step
    plain(), plain()
    cells, turns = warm_up(work, contenders, plain)
    for number in range(1, rounds + 1):
        for turn in turns:
            turn.plain.append(seconds(plain))
            turn.seconds.append(seconds(turn.call))
        print(f"{work.name}: round {number} of {rounds}", file=sys.stderr)
    for turn in turns:
        cells[turn.contender, turn.job] = Result(turn.ratio)
        progress(work, turn.contender, turn.job, cells[turn.contender, turn.job])
    plain_times = [s for turn in turns for s in turn.plain] or [seconds(plain) for _ in range(rounds)]
    return Timing(1e3 * statistics.median(plain_times), cells, walk_share(work, plain, rounds))


def warm_up(work: Workload, contenders: list[type[Contender]], plain: Callable[[], object]) -> tuple[Cells, list[Turn]]:
    """Cells that need no measurement, and the calls to measure for the others."""
    judge = Judge(work)
    cells: Cells = {}
    turns: list[Turn] = []
    for contender in contenders:
        for job in jobs_of(contender):
            entry = first_calls(work, contender, job, plain, judge)
            if isinstance(entry, Turn):
                turns.append(entry)
            else:
                cells[contender, job] = entry
                progress(work, contender, job, entry)
    return cells, turns


def first_calls(
    work: Workload, contender: type[Contender], job: str, plain: Callable[[], object], judge: Judge
) -> Turn | Result:
    """The first call is checked, the second one is timed."""
    try:
        call = getattr(contender(work), job)
        verdict = judge.verdict(job, call())
        if verdict is not None:
            return verdict
        ratio = seconds(call) / seconds(plain)
    except Exception as error:  # the other contenders are still measured
        return failed(error)
    return Result(ratio) if ratio > TOO_SLOW else Turn(contender, job, call)


def walk_share(work: Workload, plain: Callable[[], object], rounds: int) -> Result:
    try:
        walk = Samplewise(work).walk
        walk(), walk()
        times = [(walk(), seconds(plain)) for _ in range(rounds)]
    except Exception as error:
        return failed(error)
    walks, plains = zip(*times, strict=True)
    return Result(statistics.median(walks) / statistics.median(plains))


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, including the release of its result."""
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def progress(work: Workload, contender: type[Contender], job: str, result: Result) -> None:
    why = f"  ({result.why})" if result.why else ""
    print(f"{work.name}: {contender.name}, {JOBS[job]}: {result}{why}", file=sys.stderr)
