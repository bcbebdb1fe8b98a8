"""Peak memory of one job in a fresh process: maximum resident size minus resident size before the job.

python memory.py WORKLOAD CONTENDER JOB THREADS prints bytes as JSON. Linux only.
"""

import ctypes
import gc
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import isolated

CALLS = 2  # including the first call, which must fit into memory, too


def measure(workload: str, contender: str, job: str, threads: int) -> int:
    """Peak memory in bytes, measured in a new process."""
    return int(isolated.call(__file__, workload, contender, job, threads))


def peak_of_job(workload: str, contender: str, job: str, threads: int) -> int:
    import torch
    from catalog import build
    from peers import CONTENDERS

    torch.set_num_threads(threads)
    work = build(workload)
    # A run with two samples loads the kernels and starts the threads without raising the measured peak.
    few = replace(work, inputs=work.inputs[:2], targets=work.targets[:2])
    getattr(CONTENDERS[contender](few), job)()
    return peak_above_start(getattr(CONTENDERS[contender](work), job))


def peak_above_start(call: Callable[[], object]) -> int:
    """Peak resident memory in bytes during calls, minus the resident memory before them."""
    release_free_memory()
    start = resident("VmRSS")
    forget_peak()
    for _ in range(CALLS):
        call()
    return resident("VmHWM") - start


def release_free_memory() -> None:
    """Return free memory to the system; free but resident memory would hide the memory of the job."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """VmRSS (current) or VmHWM (peak). Not getrusage's ru_maxrss, which inherits the parent's peak through exec."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(peak_of_job(*sys.argv[1:4], threads=int(sys.argv[4]))))
