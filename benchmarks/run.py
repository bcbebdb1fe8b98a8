"""Time and peak memory of per-sample gradients, relative to a plain step: forward + losses.mean().backward().

python benchmarks/run.py [workload ...] [--threads 1 2] [--rounds 7] [--no-peers] [--no-memory]

Prints Markdown to stdout and progress to stderr. Instead of a number a cell may contain
  -        not installed
  refuses  the library reports that it does not support this
  error    it raises another exception
  wrong    its result differs from that of the loop
"""

import argparse
import logging
import sys
import warnings
from dataclasses import replace

import memory
import timing
import torch
from catalogue import WORKLOADS, build
from peers import PEERS, Contender, Plain, Samplewise
from results import JOBS, Cells, Result, failed, jobs_of
from timing import Timing
from workloads import MEDIUM_NETS

Columns = dict[str, Cells]  # by workload


def main() -> None:
    options = parse()
    quieten()
    contenders = [Samplewise, *(PEERS if options.peers else [])]
    for threads in options.threads:
        torch.set_num_threads(threads)
        timings = {name: timing.measure(build(name), contenders, options.rounds) for name in options.workloads}
        print_times(timings, threads)
    if options.memory:
        print_memory({name: t.cells for name, t in timings.items()}, options.threads[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # No choices=: argparse would reject the empty list.
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"a workload must be one of {', '.join(WORKLOADS)}; found {unknown[0]}.")
    options.workloads = options.workloads or list(MEDIUM_NETS)
    return options


def quieten() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


# ----------------------------------------------------------------------------------------- time and memory


def print_times(timings: dict[str, Timing], threads: int) -> None:
    columns = {name: t.cells for name, t in timings.items()}
    rows = [
        ["plain step, ms", "", *(f"{t.plain_ms:.0f}" for t in timings.values())],
        *(row for job in JOBS for row in [*job_rows(columns, job), *best_peer_row(columns, job)]),
        ["walk and plan", Samplewise.name, *(percent(t.walk) for t in timings.values())],
    ]
    print_table("Time as a multiple of one plain step", threads, columns, rows)


def print_memory(timed: Columns, threads: int) -> None:
    plain = {name: memory.measure(name, Plain.__name__, "step", threads) for name in timed}
    columns = {name: memory_of(name, timed[name], threads, plain[name]) for name in timed}
    rows = [
        ["plain step, MB", "", *(f"{bytes_ / 1e6:.0f}" for bytes_ in plain.values())],
        *(row for job in JOBS for row in job_rows(columns, job)),
    ]
    print_table("Peak memory as a multiple of one plain step's", threads, columns, rows)


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


# -------------------------------------------------------------------------------------------------- tables


def job_rows(columns: Columns, job: str) -> list[list[str]]:
    contenders = [c for c in contenders_of(columns) if job in jobs_of(c)]
    return [[JOBS[job], c.name, *(str(cells[c, job]) for cells in columns.values())] for c in contenders]


def best_peer_row(columns: Columns, job: str) -> list[list[str]]:
    if not any(job in jobs_of(c) for c in contenders_of(columns) if c is not Samplewise):
        return []
    return [[JOBS[job], "*best peer*", *(best_peer(cells, job) for cells in columns.values())]]


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


def reasons(columns: Columns) -> list[str]:
    """Reasons for cells without a number: the first one of each contender and workload."""
    found: dict[str, str] = {}
    for name, cells in columns.items():
        for (contender, _), result in cells.items():
            if result.why:
                found.setdefault(f"{contender.name} on {name}", f"{result.word} ({result.why[:160]})")
    return [f"- {where}: {what}" for where, what in found.items()]


def print_table(title: str, threads: int, columns: Columns, rows: list[list[str]]) -> None:
    table = [["", "", *columns], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *body = ("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in table)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    title += f", {threads} thread{'' if threads == 1 else 's'}"
    print("", f"### {title}", "", head, rule, *body, "", *reasons(columns), sep="\n", flush=True)


if __name__ == "__main__":
    main()
