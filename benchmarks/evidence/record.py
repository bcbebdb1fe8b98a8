"""Results of the evidence scripts: each run is made once and kept, so that a second call continues."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
from tables import Table, plural, processor, write  # noqa: E402

Values = dict[str, Any]


class Record:
    """Runs of one script, in build/evidence/NAME.jsonl: a line each, with the command, CPU seconds and values."""

    def __init__(self, path: Path):
        self.path = path
        self.runs: dict[str, Values] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                self.runs[run["key"]] = run

    def run(self, key: str, function: Callable[[], Values]) -> Values:
        """Values of the run `key`, computed by `function` if they are not recorded yet."""
        if key not in self.runs:
            began = cpu_seconds()
            values = function()
            seconds = cpu_seconds() - began
            command = shlex.join(["python", *sys.argv])
            run = {"key": key, "command": command, "cpu_seconds": round(seconds, 1), "values": values}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            self.runs[key] = run
            print(f"{key}: {values}  ({seconds:.0f} s)", flush=True)
        return self.runs[key]["values"]

    def seconds(self, key: str) -> float:
        return self.runs[key]["cpu_seconds"]


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Arguments that all scripts have."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", type=Path, default=ROOT / f"build/evidence/{name}.jsonl")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--write", type=Path, metavar="DOCUMENT", help="document whose tables are replaced")
    return arguments


def show(table: Table, document: Path | None) -> None:
    """Print a table, and replace it in the document."""
    print(table, flush=True)
    if document is not None and not write(table, document):
        raise ValueError(
            f"{document} must have the markers <!-- {table.key} --> and <!-- /{table.key} -->; found none."
        )


def machine() -> str:
    return f"torch {torch.__version__}, {plural(torch.get_num_threads(), 'thread')}; {processor()}"
