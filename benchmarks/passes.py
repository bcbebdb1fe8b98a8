"""Tables of one pass: norms, clipped sums and rows of per-sample gradients, relative to a plain step.

A plain step is a forward pass and `losses.mean().backward()`. Every result is first compared with that of the loop over
single samples. Each contender has a process of its own, because methods in one process change each other's times, up to
several times; in it, each call is made next to a plain step.

python passes.py WORKLOAD CONTENDER THREADS ROUNDS JOB ... prints the times of one contender as JSON.
"""

import json
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import isolated
import memory
import torch
from catalog import TITLES, build
from peers import CONTENDERS, PEERS, Backpack, Contender, ExpandedWeights, Plain, Samplewise, Vmap
from real_nets import REAL_NETS
from results import JOBS, Cells, Judge, Result, failed
from tables import Options, Table
from timing import Call, interleaved, seconds
from workloads import MEDIUM_NETS, Workload

Columns = dict[str, Cells]  # by workload
Entry = tuple[type[Contender], str]  # contender and job
OURS: list[Entry] = [(Samplewise, job) for job in ("norms", "clipped_sum", "clipped_sum_twice")]
OTHERS: list[Entry] = [(contender, "clipped_sum") for contender in PEERS]
ROWS: list[Entry] = [(contender, "full") for contender in (Samplewise, Vmap)]
QUICK = OURS[:2]
QUICK_NETS = ("resnet18", "vit")  # in less than three minutes with the other tables


def medium(options: Options) -> Iterator[Table]:
    entries = [*OURS, *(OTHERS + ROWS if options.peers else ROWS[:1])]
    yield from tables("medium", options.choose(MEDIUM_NETS), QUICK if options.quick else entries, options)


def real(options: Options) -> Iterator[Table]:
    # The models have layers for which BackPACK and ExpandedWeights have no rules.
    others = [entry for entry in OTHERS if entry[0] not in (Backpack, ExpandedWeights)]
    entries = QUICK if options.quick else [*OURS, *(others if options.peers else [])]
    yield from tables("real", options.choose(REAL_NETS, QUICK_NETS), entries, options)


def tables(key: str, names: list[str], entries: list[Entry], options: Options) -> Iterator[Table]:
    for threads in options.threads:
        timings = {name: time(name, entries, threads, options.rounds) for name in names}
        yield from time_tables(f"{key}-{threads}", timings, options.caption(threads))
    if options.memory:
        threads = options.threads[-1]
        yield from memory_tables(f"{key}-memory", {name: t.cells for name, t in timings.items()}, threads)


# ----------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Timing:
    plain_ms: float
    cells: Cells
    walk: Result  # as a share of a plain step


def time(name: str, entries: list[Entry], threads: int, rounds: int) -> Timing:
    """Times of all entries, with a new process for each contender."""
    cells: Cells = {}
    plain_ms: list[float] = []
    walk = Result()
    for contender in dict.fromkeys(contender for contender, _ in entries):
        jobs = [job for other, job in entries if other is contender]
        try:
            found = isolated.call(__file__, name, contender.__name__, threads, rounds, *jobs)
        except Exception as error:  # the other contenders are still measured
            cells |= {(contender, job): failed(error) for job in jobs}
            continue
        cells |= {(contender, job): Result(**found["cells"][job]) for job in jobs}
        plain_ms.append(found["plain_ms"])
        if contender is Samplewise:
            walk = Result(**found["walk"])
        for job in jobs:
            result = cells[contender, job]
            print(f"{name}: {contender.name}, {JOBS[job]}: {result} {result.why}", file=sys.stderr)
    return Timing(statistics.median(plain_ms), cells, walk)


def time_contender(name: str, contender: str, threads: str, rounds: str, *jobs: str) -> dict[str, Any]:
    """Times of one contender, measured in this process."""
    torch.set_num_threads(int(threads))
    work = build(name)
    plain = Plain(work).step
    plain(), plain()
    cells, calls = warm_up(work, CONTENDERS[contender], jobs)
    series = interleaved(name, plain, calls, int(rounds))
    cells |= {job: Result(found.ratio) for job, found in series.items()}
    plain_times = [s for found in series.values() for s in found.plain] or [seconds(plain)]
    plain_seconds = statistics.median(plain_times)
    walk = walk_share(work, plain_seconds, int(rounds)) if contender == Samplewise.__name__ else Result()
    shown = {job: asdict(cell) for job, cell in cells.items()}
    return {"plain_ms": 1e3 * plain_seconds, "cells": shown, "walk": asdict(walk)}


def warm_up(
    work: Workload, contender: type[Contender], jobs: Iterable[str]
) -> tuple[dict[str, Result], dict[str, Call]]:
    """Cells of the jobs that fail or are wrong, and the calls to measure for the others."""
    judge = Judge(work)
    cells: dict[str, Result] = {}
    calls: dict[str, Call] = {}
    for job in jobs:
        try:
            call = getattr(contender(work), job)
            verdict = judge.verdict(job, call())
            call()  # the second call may still verify or allocate more than later ones
        except Exception as error:  # the other jobs are still measured
            verdict = failed(error)
        if verdict is None:
            calls[job] = call
        else:
            cells[job] = verdict
    return cells, calls


def walk_share(work: Workload, plain_seconds: float, rounds: int) -> Result:
    try:
        walk = Samplewise(work).walk
        walk(), walk()
        times = [walk() for _ in range(rounds)]
    except Exception as error:
        return failed(error)
    return Result(statistics.median(times) / plain_seconds)


def time_tables(key: str, timings: dict[str, Timing], caption: str) -> Iterator[Table]:
    columns = {name: t.cells for name, t in timings.items()}
    plain = ["plain step, ms", "", *(f"{t.plain_ms:.0f}" for t in timings.values())]
    walk = ["walk and plan", Samplewise.name, *(percent(t.walk) for t in timings.values())]
    caption = f"Multiples of a plain step (forward and backward pass). {caption}"
    yield from long_and_short(key, f"Time as a multiple of one plain step ({key})", columns, [plain, walk], caption)


# --------------------------------------------------------------------------------------------------- memory


def memory_tables(key: str, timed: Columns, threads: int) -> Iterator[Table]:
    plain = {name: memory.measure(name, Plain.__name__, "step", threads) for name in timed}
    columns = {name: memory_of(name, timed[name], threads, plain[name]) for name in timed}
    used = ["plain step, MB", "", *(f"{bytes_ / 1e6:.0f}" for bytes_ in plain.values())]
    caption = "Peak memory above that before the step, as a multiple of the plain step's; a process each."
    yield from long_and_short(key, f"Peak memory as a multiple of one plain step's ({key})", columns, [used], caption)


def memory_of(name: str, timed: Cells, threads: int, plain: int) -> Cells:
    """Peak memory of every contender and job that could be timed."""
    cells = {key: replace(result, why="") for key, result in timed.items()}  # printed below the other table
    for contender, job in (key for key, result in timed.items() if result.value is not None):
        try:
            result = Result(memory.measure(name, contender.__name__, job, threads) / plain)
        except Exception as error:
            result = failed(error)
        cells[contender, job] = result
        print(f"{name}: memory of {contender.name}, {JOBS[job]}: {result} {result.why}", file=sys.stderr)
    return cells


# ----------------------------------------------------------------------------------------------------- rows


def long_and_short(key: str, title: str, columns: Columns, ends: list[list[str]], caption: str) -> Iterator[Table]:
    """Table of all contenders and, if there are peers, one of samplewise and the best of them."""
    contenders = contenders_of(columns)
    rows = [row for job in JOBS for row in job_rows(columns, job, contenders)]
    yield Table(key, title, [header(columns), *rows, *ends], caption, reasons(columns))
    if contenders != [Samplewise]:
        rows = [row for job in JOBS for row in [*job_rows(columns, job, [Samplewise]), *best_peer_row(columns, job)]]
        yield Table(f"{key}-short", f"{title}, summary", [header(columns), *rows, *ends], caption)


def header(columns: Columns) -> list[str]:
    return ["", "", *(TITLES[name] for name in columns)]


def job_rows(columns: Columns, job: str, contenders: list[type[Contender]]) -> list[list[str]]:
    measured = {entry for cells in columns.values() for entry in cells}
    found = [c for c in contenders if (c, job) in measured]
    return [[JOBS[job], c.name, *(str(cells[c, job]) for cells in columns.values())] for c in found]


def best_peer_row(columns: Columns, job: str) -> list[list[str]]:
    if not any(j == job and c is not Samplewise for cells in columns.values() for c, j in cells):
        return []
    return [[JOBS[job], "*best other*", *(best_peer(cells, job) for cells in columns.values())]]


def contenders_of(columns: Columns) -> list[type[Contender]]:
    present = {c for cells in columns.values() for c, _ in cells}
    return [c for c in [Samplewise, *PEERS] if c in present]


def best_peer(cells: Cells, job: str) -> str:
    peers = {c: r.value for (c, j), r in cells.items() if j == job and c is not Samplewise and r.value is not None}
    if not peers:
        return "none"
    best = min(peers, key=lambda c: peers[c])
    return f"{Result(peers[best])} {best.name}"


def percent(share: Result) -> str:
    return str(share) if share.value is None else f"{share.value:.1%}"


def reasons(columns: Columns) -> tuple[str, ...]:
    """Reasons for cells without a number: the first one of each contender and workload."""
    found: dict[str, str] = {}
    for name, cells in columns.items():
        for (contender, _), result in cells.items():
            if result.why:
                found.setdefault(f"{contender.name} on {name}", f"{result.word} ({result.why[:160]})")
    return tuple(f"{where}: {what}" for where, what in found.items())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(time_contender(*sys.argv[1:])))
