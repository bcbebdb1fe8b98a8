"""Time and memory of per-sample gradients and of clipped updates, compared with other methods, as Markdown tables.

python benchmarks/run.py [table ...] [--quick] [--nets NAME ...] [--threads 1 2] [--rounds N] [--write FILE ...]

  small        clipped updates of small networks, relative to a textbook update
  step         time that `Step` and `Trainer` add to a plain loop
  real         norms and clipped sums of five networks of real size, relative to a forward and backward pass
  medium       the same of six networks of medium size
  everyday     clipped sums of a small transformer with one ordinary line, hook or changing shape
  compiled     time to compile, and speed of compiled updates of the larger networks
  single       updates from one sample
  lora         clipped sums of language models with LoRA adapters
  private      time and memory of private updates
  distributed  updates of two ranks

Each table is measured in a process of its own. Tables are printed to stdout, progress to stderr. --quick measures
samplewise with few rounds, in less than three minutes. --write replaces the tables in documents, between their markers,
and says below `<!-- run -->` when they were measured, and how much of the processors other programs used meanwhile.
Instead of a number a cell may contain
  -        not installed
  refuses  the library reports that it does not support this
  error    it raises another exception
  wrong    its result differs from that of the loop
"""

import argparse
import logging
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path

import torch
from tables import Options, Table, processor, replace_text, write


@dataclass(frozen=True)
class Benchmark:
    """Function that measures tables, and the names of its networks, each by its module."""

    module: str
    function: str
    nets: str = ""

    def tables(self) -> Callable[[Options], Iterator[Table]]:
        return getattr(import_module(self.module), self.function)

    def names(self) -> Collection[str]:
        names = getattr(import_module(self.module), self.nets) if self.nets else ()
        return names() if callable(names) else names


# In the order of docs/speed.md. Modules are imported when they are used: some need other libraries.
BENCHMARKS = {
    "small": Benchmark("small", "small", "SMALL_NETS"),
    "step": Benchmark("step", "step", "NETS"),
    "real": Benchmark("passes", "real", "REAL_NETS"),
    "medium": Benchmark("passes", "medium", "MEDIUM_NETS"),
    "everyday": Benchmark("everyday", "everyday", "situations"),
    "compiled": Benchmark("compiled", "compiled", "NETS"),
    "single": Benchmark("single", "single", "WORKS"),
    "lora": Benchmark("lora", "lora"),
    "private": Benchmark("private", "private"),
    "distributed": Benchmark("distributed", "distributed", "NETS"),
}
QUICK = ("small", "real", "single", "everyday")


def main() -> None:
    arguments = parse()
    names = arguments.tables or list(QUICK if arguments.quick else BENCHMARKS)
    if arguments.nets:
        names = [name for name in names if set(BENCHMARKS[name].names()) & set(arguments.nets)]
    if len(names) == 1:
        sys.exit(not measure(names[0], arguments))
    run = Run()
    options = [argument for argument in sys.argv[1:] if argument not in arguments.tables]
    complete = [subprocess.run([sys.executable, __file__, name, *options]).returncode == 0 for name in names]
    print(f"\n{run.summary()}")
    for document in arguments.write:
        replace_text("run", run.summary(), document)
    sys.exit(not all(complete))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # No choices=: argparse would reject the empty list.
    parser.add_argument("tables", nargs="*", metavar="table", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help=f"few rounds of samplewise alone: {', '.join(QUICK)}")
    parser.add_argument("--nets", nargs="+", default=[], metavar="NAME", help="default: all networks of a table")
    parser.add_argument("--threads", nargs="+", type=int, default=[2], help="of the tables medium, real and compiled")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--flush-denormal", action="store_true", help="of the table single: 1e-38 and less is zero")
    parser.add_argument("--write", nargs="+", type=Path, default=[], metavar="FILE", help="for example docs/speed.md")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.tables if name not in BENCHMARKS]:
        parser.error(f"a table must be one of {', '.join(BENCHMARKS)}; found {unknown[0]}.")
    if arguments.nets:
        nets = dict.fromkeys(name for benchmark in BENCHMARKS.values() for name in benchmark.names())
        if unknown := [name for name in arguments.nets if name not in nets]:
            parser.error(f"a net must be one of {', '.join(nets)}; found {unknown[0]}.")
    return arguments


def measure(name: str, arguments: argparse.Namespace) -> bool:
    """Print the tables of this name and write them into documents; False if an error has ended the measurement."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_flush_denormal(arguments.flush_denormal)
    quick = arguments.quick
    options = Options(
        rounds=arguments.rounds or (3 if quick else 5),
        threads=arguments.threads,
        nets=arguments.nets,
        peers=arguments.peers and not quick,
        memory=arguments.memory and not quick,
        quick=quick,
    )
    started = time.perf_counter()
    try:
        for table in BENCHMARKS[name].tables()(options):
            print(table, flush=True)
            for document in arguments.write:
                if write(table, document):
                    print(f"{table.key}: written to {document}", file=sys.stderr)
    except Exception:  # the other tables are still measured
        traceback.print_exc()
        return False
    finally:
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return True


@dataclass
class Run:
    """Date and duration of a run, and the share of the processors that programs outside of it have used meanwhile."""

    started: float = field(default_factory=time.perf_counter)
    busy: float = field(default_factory=lambda: busy_seconds() - run_seconds())

    def summary(self) -> str:
        duration = time.perf_counter() - self.started
        # Rounded clocks of the kernel may add up to a little less than the time of the run.
        others = max(0.0, busy_seconds() - run_seconds() - self.busy) / duration / (os.cpu_count() or 1)
        day = f"{date.today():%d %B %Y}".lstrip("0")
        where = f"torch {torch.__version__}, {processor()}"
        return (
            f"Measured in one run of {duration / 60:.0f} minutes on {day}: {where}. Other programs used {others:.1%} "
            "of the processors meanwhile."
        )


def busy_seconds() -> float:
    """Seconds that the processors of this machine have spent on programs and the kernel. Linux only."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run_seconds() -> float:
    """Processor seconds of this process and its children that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
