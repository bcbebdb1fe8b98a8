"""Time and memory of per-sample gradients and of clipped updates, compared with other methods, as Markdown tables.

python benchmarks/run.py [table ...] [--quick] [--nets NAME ...] [--threads 1 2] [--rounds N] [--write FILE ...]

  small     clipped updates of small networks, relative to a textbook update
  medium    norms, clipped sums and rows of six networks, relative to a forward and backward pass
  real      norms and clipped sums of five networks of real size
  compiled  time to compile, and speed of compiled updates of the larger networks
  single    updates from one sample
  everyday  clipped sums of a small transformer with one ordinary line, hook or changing shape

Tables are printed to stdout, progress to stderr. --quick measures samplewise with few rounds, in less than three
minutes. --write replaces the tables in documents, between their markers. Instead of a number a cell may contain
  -        not installed
  refuses  the library reports that it does not support this
  error    it raises another exception
  wrong    its result differs from that of the loop
"""

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from compiled import NETS as COMPILED_NETS
from compiled import compiled
from everyday import everyday, situations
from passes import medium, real
from real_nets import REAL_NETS
from single import WORKS, single
from small import small
from small_nets import SMALL_NETS
from tables import Options, Table, write
from workloads import MEDIUM_NETS

TABLES: dict[str, Callable[[Options], Iterator[Table]]] = {
    "small": small,
    "medium": medium,
    "real": real,
    "single": single,
    "compiled": compiled,
    "everyday": everyday,
}
NETS: dict[str, Collection[str]] = {
    "small": SMALL_NETS,
    "medium": MEDIUM_NETS,
    "real": REAL_NETS,
    "single": WORKS,
    "compiled": COMPILED_NETS,
    "everyday": situations(),
}
QUICK = ("small", "real", "single", "everyday")


def main() -> None:
    arguments = parse()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_flush_denormal(arguments.flush_denormal)
    quick = arguments.quick
    options = Options(
        rounds=arguments.rounds or (3 if quick else 7),
        threads=arguments.threads or ([2] if quick else [1, 2]),
        nets=arguments.nets,
        peers=arguments.peers and not quick,
        memory=arguments.memory and not quick,
        quick=quick,
    )
    chosen = [name for name in arguments.tables or (QUICK if quick else TABLES) if options.choose(NETS[name])]
    complete = [show(name, options, arguments.write) for name in chosen]
    sys.exit(not all(complete))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # No choices=: argparse would reject the empty list.
    parser.add_argument("tables", nargs="*", metavar="table", help=f"any of {', '.join(TABLES)}; default: all")
    parser.add_argument("--quick", action="store_true", help=f"few rounds of samplewise alone: {', '.join(QUICK)}")
    parser.add_argument("--nets", nargs="+", default=[], metavar="NAME", help="default: all networks of a table")
    parser.add_argument("--threads", nargs="+", type=int, help="of the tables medium, real and compiled")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--flush-denormal", action="store_true", help="of the table single: 1e-38 and less is zero")
    parser.add_argument("--write", nargs="+", type=Path, default=[], metavar="FILE", help="for example docs/speed.md")
    arguments = parser.parse_args()
    nets = dict.fromkeys(name for names in NETS.values() for name in names)
    for kind, found, known in [("table", arguments.tables, TABLES), ("net", arguments.nets, nets)]:
        if unknown := [name for name in found if name not in known]:
            parser.error(f"a {kind} must be one of {', '.join(known)}; found {unknown[0]}.")
    return arguments


def show(name: str, options: Options, documents: list[Path]) -> bool:
    """Print the tables of this name and write them into documents; False if an error has ended the measurement."""
    started = time.perf_counter()
    try:
        for table in TABLES[name](options):
            print(table, flush=True)
            for document in documents:
                if write(table, document):
                    print(f"{table.key}: written to {document}", file=sys.stderr)
    except Exception:  # the other tables are still measured
        traceback.print_exc()
        return False
    finally:
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return True


if __name__ == "__main__":
    main()
